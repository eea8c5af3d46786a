"""wandb never asks, never prints, and never ends a run. The real package, offline, in a process of its own with an empty home."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import psutil
import hybrid.telemetry.wandb as ours
from hybrid.config import RunConfig

ours.START_TIMEOUT_S = 2
cfg = RunConfig(
    model={"path": "m"},
    train={"steps": 1, "prompts_per_step": 4},
    rollout={"max_new_tokens": 8},
    data={"train": "d"},
    logging={"wandb": sys.argv[2] == "on"},
)
warnings = []
run = ours.start_wandb(cfg, Path(sys.argv[1]), warnings.append)
if run is not None:
    run.log(1, {"step": 1, "reward/mean": 0.25, "loss/value": None})
    run.finish()
    run.log(2, {"step": 2})
    run.log(3, {"step": 3})
Path(sys.argv[1], "result").write_text("\\n".join([str(run is not None), str(len(psutil.Process().children())), *warnings]))
"""


def run_script(tmp_path, wandb="on", **env):
    """(started, children left, warnings, files, what it printed)."""
    run_dir, home = tmp_path / "runs" / "first", tmp_path / "home"
    run_dir.mkdir(parents=True)
    home.mkdir()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run_dir), wandb],
        env={**inherited, "HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2]), **env},
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    started, children, *warnings = (run_dir / "result").read_text().splitlines()
    assert not any(home.rglob("*")), "nothing belongs in the home folder"
    return started == "True", int(children), warnings, list(run_dir.rglob("*.wandb")), done.stdout + done.stderr


def test_offline_without_a_key(tmp_path):
    started, children, warnings, files, printed = run_script(tmp_path)
    assert started and children == 0 and printed == ""
    (file,) = files
    assert "offline" in str(file) and b"reward/mean" in file.read_bytes() and b"loss/value" not in file.read_bytes()
    assert len(warnings) == 1 and warnings[0].startswith("wandb stopped taking metrics")  # Logged twice after the end.


@pytest.mark.parametrize("key, reason", [("short", "AuthenticationError"), ("k" * 40, "CommError")])
def test_a_failure_to_start_is_a_warning(tmp_path, key, reason):
    started, _, warnings, _, printed = run_script(tmp_path, WANDB_API_KEY=key, WANDB_BASE_URL="http://127.0.0.1:9")
    assert not started and printed == ""
    assert (
        len(warnings) == 1 and "wandb could not start, the run goes on without" in warnings[0] and reason in warnings[0]
    )


def test_off_means_off(tmp_path):
    started, children, warnings, files, printed = run_script(tmp_path, wandb="off")
    assert (started, children, warnings, files, printed) == (False, 0, [], [], "")
