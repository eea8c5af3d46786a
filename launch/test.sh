#!/usr/bin/env bash
# Installs what the tests need and runs them.
#
#   bash launch/test.sh [unit|integration|e2e|gpu|all ...] [-- pytest arguments]
#
# Default: unit and integration. all adds e2e, and gpu where there is CUDA. Works from any folder, leaves nothing running.
# Where there is CUDA, the suite gpu runs in the usual environment and the others, which are for CPUs, in one of their own: .venv-cpu.
# The exit status is that of the first suite that failed. HYBRID_TEST_LIMIT: seconds that one suite may take.
[ -n "${BASH_VERSION:-}" ] || { echo "error: $0 is a bash script: run it with bash: bash $0" >&2; exit 2; }
set -u
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

main() {
    local suites=() suite
    while (($#)); do
        case "$1" in
            unit | integration | e2e | gpu) suites+=("$1") ;;
            all) suites+=(unit integration e2e); [[ "$(detect_device)" == gpu ]] && suites+=(gpu) ;;
            -h | --help) print_help "${BASH_SOURCE[0]}"; return 0 ;;
            --) shift; break ;;
            *) fail "unknown suite '$1'. Usage: bash launch/test.sh [unit|integration|e2e|gpu|all ...] [-- pytest arguments]" ;;
        esac
        shift
    done
    ((${#suites[@]})) || suites=(unit integration)
    for suite in "${suites[@]}"; do
        compgen -G "$CHECKOUT/tests/$suite/**/test_*.py" >/dev/null || compgen -G "$CHECKOUT/tests/$suite/test_*.py" >/dev/null ||
            fail "tests/$suite holds no tests"
    done

    MAIN_VENV="$(venv_folder)" || exit 1
    MAIN_DEVICE="$(detect_device)"
    for suite in "${suites[@]}"; do install_for "$suite"; done
    local models=(--tiny)
    [[ "${suites[*]}" == unit ]] || models+=(--smollm2)
    run_session "$VENV/bin/python" "$CHECKOUT/launch/make_models.py" "${models[@]}" || give_up $? "the models were not made (above)"
    offline_environment
    cd "$CHECKOUT" || exit 1
    REPORTS="$(mktemp -d)"
    trap 'rm -rf "$REPORTS"' EXIT
    local first_failure=0 status
    for suite in "${suites[@]}"; do
        run_suite "$suite" "$@"
        status=$?
        ((status == 130 || status == 143)) && give_up "$status"
        ((first_failure)) || first_failure=$status
    done
    totals || first_failure=$((first_failure ? first_failure : 1))
    exit "$first_failure"
}

# Sets VENV and DEVICE of a suite. vLLM's GPU build does not run on a CPU, so where there are GPUs there are two environments.
choose_environment() { # suite
    VENV="$MAIN_VENV" DEVICE="$MAIN_DEVICE"
    [[ "$MAIN_DEVICE" == gpu && "$1" != gpu ]] && VENV="$CHECKOUT/.venv-cpu" DEVICE=cpu
    return 0
}

install_for() { # suite
    choose_environment "$1"
    run_session env HYBRID_VENV="$VENV" bash "$CHECKOUT/launch/install.sh" "$DEVICE" --test ||
        give_up $? "the installation failed (above); no test was run"
}

run_suite() { # suite pytest-arguments...
    local suite="$1" status threads="" workers=0 limit=7200
    shift
    choose_environment "$suite"
    # A process per core, of one thread each; eight at most, as each imports for ten seconds. nproc takes OMP_NUM_THREADS for the cores.
    [[ "$suite" == unit ]] && threads=1 limit=600 workers="$(env -u OMP_NUM_THREADS nproc)"
    [[ "$suite" == integration ]] && limit=4200
    say "== $suite"
    PATH="$VENV/bin:$PATH" LIMIT="${HYBRID_TEST_LIMIT:-$limit}" run_session \
        env ${threads:+OMP_NUM_THREADS=$threads} HYBRID_VENV="$VENV" HYBRID_EXTRA="$DEVICE" \
        "$VENV/bin/python" -m pytest "$CHECKOUT/tests/$suite" --numprocesses="$workers" --maxprocesses=8 --dist=worksteal \
        --durations=15 --durations-min=1 --junitxml="$REPORTS/$suite.xml" "$@"
    status=$?
    ((status == 5)) && warn "$suite: no test was run (pytest found none, or the arguments selected none)"
    ((status == 0 || status == 130 || status == 143)) || warn "$suite: failed (exit status $status)"
    return "$status"
}

# Models and data are made here; nothing may look for them elsewhere, send usage data, or ask a person.
offline_environment() {
    export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE="${WANDB_MODE:-offline}"
    export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 TOKENIZERS_PARALLELISM=false
}

# The closing line: counts over all suites. A suite without a report did not end by itself.
totals() {
    "$VENV/bin/python" - "$REPORTS" "${suites[@]}" <<'PY'
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

folder, suites = Path(sys.argv[1]), sys.argv[2:]
reports = [folder / f"{suite}.xml" for suite in suites]
counted = [ElementTree.parse(report).getroot().find("testsuite") for report in reports if report.exists()]
tests, failed, skipped = (
    sum(int(suite.get(key, 0)) for suite in counted for key in keys)
    for keys in (["tests"], ["failures", "errors"], ["skipped"])
)
passed = tests - failed - skipped
failed += len(reports) - len(counted)
print(f"{passed} passed, {failed} failed, {skipped} skipped")
sys.exit(bool(failed))
PY
}

hear_interrupts "$@"
main "$@"
