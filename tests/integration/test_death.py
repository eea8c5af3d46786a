"""However a run is ended from outside, it says so and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hybrid.leftovers import clear_abandoned
from launch.tiny_models import make_tiny_llama
from tests.integration.runs import profile

START_S, END_S = 240, 30
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running(folder: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen, list[psutil.Process]]]:
    """A run that trains for ever, past its first step, and all processes under it; afterwards none of them may be alive."""
    path = profile(folder, make_tiny_llama(folder / "model"))
    command = [sys.executable, "-P", "-m", "hybrid.cli", "train", str(path), "train.steps=100000", "logging.name=run"]
    process = subprocess.Popen(
        [*command, f"logging.runs_dir={folder}", *overrides],
        cwd=_shadowed(folder),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        _await_steps(folder / "run" / "metrics.jsonl", process)
        family = psutil.Process(process.pid).children(recursive=True)
        yield process, family
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    _, alive = psutil.wait_procs(family, timeout=15)
    assert alive == []


@pytest.mark.parametrize(("victim", "tp"), [("actor-1", 1), ("rollout-0", 2)])
def test_a_killed_process_ends_the_run_by_name(victim, tp, tmp_path):
    """N5: what a killed engine's processes had in shared memory goes too, see conftest.py."""
    with running(tmp_path, f"rollout.tensor_parallel_size={tp}") as (process, _):
        log = tmp_path / "run" / "logs" / f"{victim}.log"
        os.kill(int(log.read_text().split("\n", 1)[0].removeprefix("pid ")), signal.SIGKILL)
        output, _ = process.communicate(timeout=END_S)
    assert process.returncode == 1, output
    role, rank = victim.split("-")
    assert f"{role} rank {rank} on node" in output


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["driver", "process group"])
def test_a_terminated_run_ends_in_order(send, tmp_path):
    with running(tmp_path, "cluster.gpus_per_node=1") as (process, _):
        send(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=END_S)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert output.rstrip().endswith("interrupted") and "Traceback" not in output
    assert not (tmp_path / "run" / "swap").exists()


def test_n5_a_start_after_a_killed_driver_removes_what_it_left(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        with running(tmp_path) as (process, family):
            assert clear_abandoned() == [], "it lives"
            process.kill()
            process.wait()
            psutil.wait_procs(family, timeout=120)  # Ray's agents look for their parent now and then
        left = [*Path(short).glob("hybrid-*"), *Path(short).glob("ray/session_2*")]
        assert len(left) == 3, "the run's, that of Ray's processes, and Ray's session"
        assert sorted(clear_abandoned()) == sorted(left)
        assert list(Path(short).iterdir()) == []


def _shadowed(folder: Path) -> Path:
    """C49: a working directory with another `hybrid/`. A run that gets past its first step has imported nothing of it, in no process."""
    made = folder / "elsewhere" / "hybrid"
    shutil.copytree(ROOT / "hybrid", made, ignore=shutil.ignore_patterns("__pycache__"))
    for file in made.rglob("*.py"):
        file.write_text("raise SystemExit('the working directory was imported')\n")
    return made.parent


def _await_steps(metrics, process) -> None:
    deadline = time.monotonic() + START_S
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no step within the deadline"
        time.sleep(0.5)
