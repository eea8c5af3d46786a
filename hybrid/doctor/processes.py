"""Runs a check in processes of its own, so that a crash or a hang of one says nothing about the others."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import hybrid
from hybrid.doctor.check import Check, Figures, Setting
from hybrid.environment import Place, process_environment

LOG_LINES = 15
"""Of a process that ended without a result, what is kept."""
POLL_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """What a check found: `status` pass, fail or skip; `said` why not pass; the figures of each process, rank by rank and role by role."""

    name: str
    status: str
    said: str
    proves: str
    means: str
    seconds: float
    figures: list[Figures] = field(default_factory=list)
    log: str = ""


def run_check(check: Check, device: str, gpus: Sequence[str], folder: Path, small: bool = False) -> Outcome:
    """Run `check` on the GPUs named (as in CUDA_VISIBLE_DEVICES; on the CPU as many processes as names), with files below `folder`."""
    started = time.perf_counter()

    def outcome(status: str, said: str = "", **more: Any) -> Outcome:
        return Outcome(check.name, status, said, check.proves, check.means, time.perf_counter() - started, **more)

    if device == "cpu" and not check.on_cpu:
        return outcome("skip", "it needs a GPU")
    if len(gpus) < check.least_gpus:
        return outcome("skip", f"it needs {check.least_gpus} GPUs")
    used = gpus[: check.gpus]
    world = len(used) if check.everywhere else 1
    with _scratch(folder, check.name) as own:
        setting = Setting(device, own, world=world, gpus=tuple(used), small=small)
        with _started(check, setting, used) as processes:
            late = _wait(processes, started + check.deadline_s)
        answers = [_answer(own, index, process) for index, process in enumerate(processes)]
    figures = [answer["figures"] for answer in answers]
    status = next((kind for kind in ("fail", "skip") if any(a["status"] == kind for a in answers)), "pass")
    # Those that waited for one that failed were ended, and have no answer of their own.
    worst = min((answer for answer in answers if answer["status"] == status), key=lambda answer: "log" in answer)
    said, log = worst["said"], worst.get("traceback", "") + worst.get("log", "")
    if late:
        said = f"no answer within {check.deadline_s:.0f} s"
    return outcome(status, said, figures=figures, log=log if status == "fail" else "")


@contextlib.contextmanager
def _scratch(folder: Path, name: str) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f"{name.replace('/', '-')}-", dir=folder))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


@contextlib.contextmanager
def _started(check: Check, setting: Setting, gpus: Sequence[str]) -> Iterator[list[subprocess.Popen]]:
    """The processes of a check; each ends with what it started."""
    processes: list[subprocess.Popen] = []
    try:
        for role in range(check.roles):
            for rank in range(setting.world):
                visible = gpus[rank] if check.everywhere else ",".join(gpus)
                own = replace(setting, rank=rank, role=role)
                processes.append(_start(check, own, len(processes), environment(check, setting.device, visible)))
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(check: Check, setting: Setting, index: int, env: Mapping[str, str]) -> subprocess.Popen:
    given = json.dumps(asdict(setting) | {"folder": str(setting.folder)})
    command = [sys.executable, "-m", "hybrid.doctor.rank", check.name, str(setting.folder / f"{index}.json"), given]
    with (setting.folder / f"{index}.log").open("wb") as log:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def environment(check: Check, device: str, visible: str) -> dict[str, str]:
    """Variables of a process of a check: what the process of its role gets in a run."""
    root = str(Path(hybrid.__file__).resolve().parents[1])
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    env |= {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1"), "TOKENIZERS_PARALLELISM": "false"}
    env |= process_environment(Place(device, check.process_role, visible, several_nodes=False), env, "127.0.0.1")
    # Kernels that add in one order: what is compared bit by bit is the same in every run.
    env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return env | ({"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if device == "cpu" else {})


def _wait(processes: Sequence[subprocess.Popen], until: float) -> bool:
    """Whether some have not ended in time. One that failed takes the others with it, as they would wait for it."""
    while any(process.poll() is None for process in processes):
        if time.perf_counter() > until:
            return True
        if any(process.poll() not in (None, 0) for process in processes):
            return False
        time.sleep(POLL_S)
    return False


def _answer(folder: Path, index: int, process: subprocess.Popen) -> dict[str, Any]:
    try:
        return json.loads((folder / f"{index}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        text = (folder / f"{index}.log").read_text(encoding="utf-8", errors="replace")
        log = "\n".join(text.strip().splitlines()[-LOG_LINES:])
        return {"status": "fail", "said": f"its process ended with {process.returncode}", "figures": {}, "log": log}
