"""The start of a run: Ray comes up while torch, transformers and the rest of the driver are imported, each of which takes seconds."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
from pathlib import Path

from hybrid.cluster import running_ray
from hybrid.config import RunConfig
from hybrid.garbage import pause_gc, resume_gc
from hybrid.waiting import told


def launch(cfg: RunConfig, run_dir: Path) -> None:
    """`hybrid.trainer.train` of a resolved config; raises what it raises, and `PlacementError` when Ray cannot be started."""
    pause_gc()
    importing = threading.Thread(target=_import_trainer, name="imports", daemon=True)
    importing.start()
    cluster = cfg.cluster
    with running_ray(
        address=cluster.address,
        gpus=cluster.gpus_per_node,
        processes=cfg.processes_per_gpu,
        device=cluster.device,
        dashboard=cluster.dashboard,
        timeout_s=cluster.start_timeout_s,
        logs=run_dir / "logs",
    ):
        with told("loading torch and the trainer"):
            importing.join()
        from hybrid.trainer import train

        resume_gc()
        train(cfg, run_dir)


def _import_trainer() -> None:
    with suppress(Exception):  # it comes again where the main thread imports
        importlib.import_module("hybrid.trainer")
