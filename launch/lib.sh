# shellcheck shell=bash
# Shared by the launch scripts: source it. Sets CHECKOUT and nothing else; works from any folder.
[ -n "${BASH_VERSION:-}" ] || { echo "error: $0 is a bash script: run it with bash: bash $0" >&2; exit 2; }
if ! { [[ -r . && -x . ]] && pwd -P >/dev/null 2>&1; }; then
    printf 'error: %s: the working directory was deleted or may not be read. Change to another folder: cd ~.\n' "$0" >&2
    exit 2
fi
CHECKOUT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"

say() { printf '%s\n' "$*"; }
warn() { printf '%s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# After a `run_session` that failed: an interruption is none of the command's faults.
give_up() { # status message...
    (($1 == 130 || $1 == 143)) && { warn "interrupted: all that was started has ended"; exit "$1"; }
    fail "${@:2}"
}

# The comment at the head of a script is its help.
print_help() { awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$1"; }

# A script that another one starts in the background gets INT ignored, and a shell cannot take that back: start it anew with INT as usual.
# Call it first, with the script's arguments.
hear_interrupts() { # arguments...
    [[ "$(trap -p INT)" == "trap -- '' "* ]] && exec env --default-signal=INT bash "$0" "$@"
    return 0
}

# Seconds as people read them: 42 s, 4 min 05 s.
human_seconds() {
    if (($1 < 60)); then printf '%d s' "$1"; else printf '%d min %02d s' $(($1 / 60)) $(($1 % 60)); fi
}

# The virtual environment to use: HYBRID_VENV when set, else the active one, else .venv in the checkout.
venv_folder() {
    local active="${VIRTUAL_ENV:-}"
    [[ -n "${HYBRID_VENV:-}" ]] && { realpath -m -s "$HYBRID_VENV"; return; }
    [[ -z "$active" && "${CONDA_DEFAULT_ENV:-base}" != base ]] && active="${CONDA_PREFIX:-}"
    if [[ -n "$active" && ! -x "$active/bin/python" ]]; then
        fail "the active virtual environment $active has no bin/python: deactivate it (unset VIRTUAL_ENV) or make it anew"
    fi
    printf '%s\n' "${active:-$CHECKOUT/.venv}"
}

lists_gpus() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; } # whether the driver does

# cpu or gpu: HYBRID_EXTRA when set, else gpu when the driver lists a GPU.
detect_device() {
    if [[ -n "${HYBRID_EXTRA:-}" ]]; then
        echo "$HYBRID_EXTRA"
    elif lists_gpus; then
        echo gpu
    else
        echo cpu
    fi
}

# Ids of live processes that belong to a session started by `start_session`: by session id, and by the mark in their environment,
# which also finds those that made a session of their own.
session_members() { # session mark
    local stat pid rest fields marked
    marked=" $(grep -lzsF -- "$2" /proc/[0-9]*/environ | tr '\n' ' ')"
    for stat in /proc/[0-9]*/stat; do
        { read -r rest <"$stat"; } 2>/dev/null || continue # it may have ended meanwhile
        pid="${rest%% *}"
        read -r -a fields <<<"${rest##*) }" # state ppid pgrp session ...
        [[ "${fields[0]}" == Z || "$pid" == "$$" ]] && continue
        if [[ "${fields[3]}" == "$1" || "$marked" == *" /proc/$pid/environ "* ]]; then echo "$pid"; fi
    done
}

# Runs a command in a session of its own and waits for it. INT, TERM and HUP are passed on to the command; it has GRACE seconds (20)
# to end, and afterwards, however it ended, what is left of its session (Ray, engines) is told to end, then killed.
# Replaces the traps of its caller.
# Returns the command's exit status; 124 after LIMIT seconds when LIMIT is set; 130 or 143 when a signal ended it.
run_session() { # command...
    local mark="hybrid-launch-$$-$RANDOM$RANDOM" grace="${GRACE:-20}" caught="" child status=0 began=$SECONDS
    # Background commands of a script ignore SIGINT; the command must not. Descriptor 9 is a lock of the caller.
    HYBRID_LAUNCH="${HYBRID_LAUNCH:-} $mark" setsid env --default-signal=INT,QUIT "$@" </dev/null 9>&- &
    child=$!
    trap 'caught=INT' INT
    trap 'caught=TERM' TERM HUP
    while kill -0 "$child" 2>/dev/null; do
        if [[ -n "${LIMIT:-}" && -z "$caught" ]] && ((SECONDS - began >= LIMIT)); then
            warn "stopped after $(human_seconds "$LIMIT"), the limit of this step: $*"
            caught=LIMIT
        fi
        if [[ -n "$caught" ]]; then
            kill -s "${caught/LIMIT/INT}" "$child" 2>/dev/null
            await_end "$grace" "$child"
            break
        fi
        sleep 0.1 & # in the background: a trap interrupts `wait`, not a command
        wait "$!"
    done
    trap '' INT TERM HUP # a second Ctrl-C does not leave the sweep half done
    end_session "$child" "$mark"
    wait "$child" 2>/dev/null
    status=$?
    trap - INT TERM HUP
    case "$caught" in
        INT) return 130 ;;
        TERM) return 143 ;;
        LIMIT) return 124 ;;
    esac
    return "$status"
}

# Waits up to so many seconds for a process to end.
await_end() { # seconds pid
    local until=$((SECONDS + $1))
    while kill -0 "$2" 2>/dev/null && ((SECONDS < until)); do sleep 0.2; done
}

# Ends what is left of a session: TERM, 5 seconds, KILL. Says how many there were after the command had ended by itself.
end_session() { # session mark
    local left until=$((SECONDS + ${SETTLE:-5}))
    while left="$(session_members "$1" "$2")" && [[ -n "$left" ]] && ((SECONDS < until)); do sleep 0.3; done
    [[ -z "$left" ]] && return
    # shellcheck disable=SC2086  # one word per process id
    kill -TERM $left 2>/dev/null
    until=$((SECONDS + 5))
    while left="$(session_members "$1" "$2")" && [[ -n "$left" ]]; do
        # shellcheck disable=SC2086
        if ((SECONDS >= until)); then kill -KILL $left 2>/dev/null; fi
        ((SECONDS >= until + 5)) && break
        sleep 0.3
    done
}
