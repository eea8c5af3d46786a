"""The quickstart as a user types it, on three seeds: it learns, in time, and leaves a model that generates what it was trained to.

Twelve minutes a seed on two cores.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from statistics import mean

import pytest

from hybrid.telemetry.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 15


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quickstart_learns(seed, tmp_path):
    command = ["bash", str(ROOT / "launch" / "quickstart.sh"), f"train.seed={seed}", f"logging.runs_dir={tmp_path}"]
    subprocess.run([*command, "logging.name=run"], check=True, timeout=60 * (MINUTES + 10), cwd=tmp_path)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rewards = [line["reward/mean"] for line in lines]
    assert mean(rewards[-5:]) - mean(rewards[:5]) >= 0.25
    assert lines[-1]["eval/accuracy"] - lines[0]["eval/accuracy"] >= 0.2
    assert sum(line["time/step"] for line in lines) < 60 * MINUTES
