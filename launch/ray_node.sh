#!/usr/bin/env bash
# One node of a Ray cluster for runs over several nodes. Stays in the foreground; Ctrl-C (or TERM) ends the node and all on it.
#
#   bash launch/ray_node.sh head   [--port 6379] [--ip ADDRESS] [--num-gpus N]
#   bash launch/ray_node.sh worker HEAD[:PORT]   [--ip ADDRESS] [--num-gpus N]
#
# Start the head on the first node, a worker on each other one (for example one `srun` task a node), then on the head:
#   hybrid train PROFILE cluster.address=auto cluster.num_nodes=N
# (from elsewhere: RAY_AUTH_MODE=token hybrid train PROFILE cluster.address=HEAD:PORT ...)
# Every node needs the checkout, the environment (launch/install.sh) and the model at the same paths, and the same Ray token:
# the head makes ~/.ray/auth_token where there is none; copy it to the others, or set RAY_AUTH_TOKEN on all.
# --num-gpus gives a machine without GPUs that many logical ones.
[ -n "${BASH_VERSION:-}" ] || { echo "error: $0 is a bash script: run it with bash: bash $0" >&2; exit 2; }
set -u
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

CONNECT_SECONDS="${HYBRID_CONNECT_SECONDS:-300}" # that a worker waits for its head

main() {
    local kind="${1:-}" head="" port=6379 options=()
    case "$kind" in
        head) shift ;;
        worker)
            (($# > 1)) || fail "usage: bash launch/ray_node.sh worker HEAD[:PORT]"
            head="${2%%:*}"
            [[ "$2" == *:* ]] && port="${2##*:}"
            shift 2
            ;;
        -h | --help) print_help "${BASH_SOURCE[0]}"; return 0 ;;
        *) fail "'$kind' is neither head nor worker. bash launch/ray_node.sh --help" ;;
    esac
    while (($#)); do
        (($# > 1)) || fail "$1 needs a value"
        case "$1" in
            --port) port="$2" ;;
            --ip) options+=("--node-ip-address=$2") ;;
            --num-gpus) options+=("--num-gpus=$2") ;;
            *) fail "unknown option '$1'. bash launch/ray_node.sh --help" ;;
        esac
        shift 2
    done
    [[ "$port" =~ ^[0-9]+$ ]] || fail "port '$port' is not a number"

    local venv python settings
    venv="$(venv_folder)" || exit 1
    python="$venv/bin/python"
    [[ -x "$venv/bin/ray" ]] || fail "no Ray in $venv: run bash launch/install.sh first"
    # A run gives the Ray that it starts the same settings.
    settings="$("$python" -c 'from hybrid.cluster import NODE_ENV, OBJECT_STORE_BYTES as store
print(f"STORE={store}", *(f"{name}={value}" for name, value in NODE_ENV.items()), sep="\n")')" || fail "hybrid does not import (above)"
    while read -r setting; do export "${setting?}"; done <<<"$settings"
    options+=("--object-store-memory=$STORE" --block)
    check_token "$kind" "$venv"

    # Else the first run that joins waits for a process on every core, and they are for nothing.
    export RAY_prestart_worker_first_driver=0
    if [[ "$kind" == head ]]; then
        say "starting the head. When it is up: bash launch/ray_node.sh worker $(hostname):$port   on each other node, then here:"
        say "  hybrid train PROFILE cluster.address=auto cluster.num_nodes=N"
        run_session "$venv/bin/ray" start --head "--port=$port" "${options[@]}"
    else
        await_head "$head" "$port"
        run_session "$venv/bin/ray" start "--address=$head:$port" "${options[@]}"
    fi
    local status=$?
    forget_cluster
    return "$status"
}

# Ray notes the cluster that it started last, and programs on this machine join it: not one that has ended.
forget_cluster() {
    local note="${RAY_TMPDIR:-/tmp}/ray/ray_current_cluster" address
    address="$(cat "$note" 2>/dev/null)" || return
    answers "${address%:*}" "${address##*:}" || rm -f "$note"
}

answers() { timeout 3 bash -c "</dev/tcp/$1/$2" 2>/dev/null; } # host port

# Ray refuses who does not know the cluster's token: anyone who reaches its ports could run code otherwise.
check_token() { # kind venv
    export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
    [[ "$RAY_AUTH_MODE" == token && -z "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" && ! -s "$HOME/.ray/auth_token" ]] || return 0
    [[ "$1" == head ]] || fail "this node has no Ray token: copy ~/.ray/auth_token from the head to the same place here (or set" \
        "RAY_AUTH_TOKEN on both), then start the worker again"
    "$2/bin/ray" get-auth-token --generate >/dev/null || fail "could not write ~/.ray/auth_token"
}

await_head() { # host port
    local until=$((SECONDS + CONNECT_SECONDS))
    until answers "$1" "$2"; do
        ((SECONDS < until)) || fail "nothing answers at $1:$2 after $CONNECT_SECONDS s: is the head up, is the name right, does a firewall stand between?"
        sleep 1
    done
}

hear_interrupts "$@"
main "$@"
