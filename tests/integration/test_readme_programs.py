"""Programs that the README names and no other test starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALL_HELP = """
import runpy, sys
for file in sys.argv[1:]:
    sys.argv = [file, "--help"]
    sys.path[0] = file.rpartition("/")[0]
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as end:
        assert not end.code
"""


def run_program(*command: str | Path) -> str:
    """What it printed; it must end with status 0."""
    done = subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_benchmarks_start():
    """As far as their options: each measures for minutes. One process imports what all of them need."""
    named = sorted(set(re.findall(r"\w+\.py\b", _row("tests/benchmarks"))))
    assert len(named) == 4
    printed = run_program("-c", ALL_HELP, *[ROOT / "tests" / "benchmarks" / name for name in named])
    assert [printed.count(f"usage: {name}") for name in named] == [1] * 4


def test_the_tiny_models_are_made(tmp_path):
    printed = run_program(ROOT / "launch" / "make_models.py", "--tiny", "--models", tmp_path)
    made = {file.parent.name for file in tmp_path.glob("*/model.safetensors")}
    assert made == {"tiny-llama", "tiny-reward"} and all(f"made {tmp_path / name}" in printed for name in made)


def _row(word: str) -> str:
    (row,) = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if word in line]
    return row
