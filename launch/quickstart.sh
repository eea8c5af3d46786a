#!/usr/bin/env bash
# From nothing to a trained model: installs hybrid, makes the SmolLM2-135M-Instruct folder, trains it with GRPO on arithmetic.
#
#   bash launch/quickstart.sh [section.key=value ...]     for example: train.steps=10 rollout.max_new_tokens=16
#
# Works from any folder; a second call reuses what is there and trains anew. Ctrl-C ends all that it started.
[ -n "${BASH_VERSION:-}" ] || { echo "error: $0 is a bash script: run it with bash: bash $0" >&2; exit 2; }
set -u
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

MODEL="$CHECKOUT/models/SmolLM2-135M-Instruct"

main() {
    local argument
    for argument in "$@"; do
        case "$argument" in
            -h | --help) print_help "${BASH_SOURCE[0]}"; return 0 ;;
            *.*=* | critic=* | reference=* | --dry-run) ;;
            *) fail "'$argument' is not an override: write section.key=value, for example train.steps=10" ;;
        esac
    done
    run_session bash "$CHECKOUT/launch/install.sh" auto || give_up $? "the installation failed (above); nothing was trained"
    local venv python gpus status
    venv="$(venv_folder)" || exit 1
    python="$venv/bin/python"
    run_session "$python" "$CHECKOUT/launch/make_models.py" || give_up $? "the model was not made (above); nothing was trained"
    gpus="$(gpus_to_use "$python")" || exit 1

    # `ninja` and `hybrid` are found by name where the environment is not active.
    PATH="$venv/bin:$PATH" run_session "$venv/bin/hybrid" train "$CHECKOUT/profiles/quickstart.yaml" \
        "cluster.gpus_per_node=$gpus" "model.path=$MODEL" "logging.runs_dir=$CHECKOUT/runs" "$@"
    status=$?
    case "$status" in
        0) ;;
        130 | 143) warn "interrupted: all that was started has ended. What was written is in $CHECKOUT/runs" ;;
        *) warn "hybrid train ended with exit status $status: the reason is above, logs of every process are in the newest folder of" \
            "$CHECKOUT/runs" ;;
    esac
    return "$status"
}

# Two: logical ones without CUDA, else as many as there are up to two.
gpus_to_use() { # python
    [[ "$(detect_device)" == cpu ]] && { echo 2; return; }
    local count
    count="$("$1" -c 'import torch; print(min(2, torch.cuda.device_count()))')" || fail "torch does not import (above)"
    ((count > 0)) || fail "the driver lists GPUs, but torch sees none: is CUDA_VISIBLE_DEVICES ('${CUDA_VISIBLE_DEVICES-unset}') right," \
        "is the driver new enough for this torch? To train on the CPU: HYBRID_EXTRA=cpu bash launch/quickstart.sh"
    echo "$count"
}

hear_interrupts "$@"
main "$@"
