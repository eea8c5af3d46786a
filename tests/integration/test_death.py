"""A process that is killed ends the run, by name, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from launch.tiny_models import make_tiny_llama
from tests.integration.runs import profile

START_S, END_S = 240, 30


@pytest.mark.parametrize("victim", ["actor-1", "rollout-0"])
def test_a_killed_process_ends_the_run(victim, tmp_path):
    path = profile(tmp_path, make_tiny_llama(tmp_path / "model"))
    command = [sys.executable, "-m", "hybrid.cli", "train", str(path), "train.steps=100000", "logging.name=run"]
    process = subprocess.Popen(
        [*command, f"logging.runs_dir={tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        _await_steps(tmp_path / "run" / "metrics.jsonl", process)
        family = psutil.Process(process.pid).children(recursive=True)
        log = tmp_path / "run" / "logs" / f"{victim}.log"
        os.kill(int(log.read_text().split("\n", 1)[0].removeprefix("pid ")), signal.SIGKILL)
        output, _ = process.communicate(timeout=END_S)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert process.returncode == 1, output
    role, rank = victim.split("-")
    assert f"{role} rank {rank} on node" in output
    _, alive = psutil.wait_procs(family, timeout=15)
    assert alive == []


def _await_steps(metrics, process) -> None:
    deadline = time.monotonic() + START_S
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "no step within the deadline"
        time.sleep(0.5)
