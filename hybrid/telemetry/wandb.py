"""Metrics to Weights & Biases. Offline unless a key is set; never asks, never prints, and never ends or holds up a run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybrid.config import RunConfig

START_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 60


class WandbRun:
    """A run there. After a first failure to log it stays silent; everything is in metrics.jsonl anyway."""

    def __init__(self, run: Any, folder: Path, warn: Callable[[str], None]):
        self.folder = folder
        self._run = run
        self._warn = warn
        self._failed = False

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Log what is not null of a step."""
        if self._failed:
            return
        try:
            self._run.log({key: value for key, value in metrics.items() if value is not None}, step=step)
        except Exception as error:
            self._failed = True
            self._warn(f"wandb stopped taking metrics: {_first_line(error)}. They are in metrics.jsonl all the same.")

    def finish(self) -> None:
        """End the run there and wandb's own processes; waits at most `FINISH_TIMEOUT_S` seconds for the upload."""
        import wandb

        try:
            self._run.finish()
            wandb.teardown()
        except Exception as error:
            self._warn(
                f"wandb did not take everything: {_first_line(error)}. Upload it later with `wandb sync {shlex.quote(str(self.folder))}`; "
                "metrics.jsonl is complete."
            )


def start_wandb(cfg: RunConfig, run_dir: Path, warn: Callable[[str], None]) -> WandbRun | None:
    """Begin a run named as `run_dir`, its files under it; None when `logging.wandb` is off, or with a warning when it cannot start.

    Online when WANDB_API_KEY is set (WANDB_MODE may then say otherwise), offline else: `wandb sync` uploads it later.
    """
    if not cfg.logging.wandb:
        return None
    # Read when wandb is imported: without these it writes logs below the home folder, and prints around logging in.
    os.environ.setdefault("WANDB_CACHE_DIR", str(run_dir / "wandb" / "cache"))
    os.environ.setdefault("WANDB_SILENT", "true")
    mode = os.environ.get("WANDB_MODE", "online") if os.environ.get("WANDB_API_KEY") else "offline"
    try:
        import wandb

        run = wandb.init(
            project=cfg.logging.wandb_project,
            name=run_dir.name,
            dir=str(run_dir),
            mode=mode,
            config=cfg.model_dump(mode="json"),
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=START_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                finish_timeout_raises=True,
            ),
        )
    except Exception as error:
        warn(f"wandb could not start, the run goes on without: {_first_line(error)}")
        return None
    return WandbRun(run, Path(run.dir).parent, warn)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]
