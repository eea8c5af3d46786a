"""The start of a run: Ray comes up while torch, transformers and the rest of the driver are imported, each of which takes seconds."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
from pathlib import Path

from hybrid.cluster import running_ray
from hybrid.garbage import resume_gc
from hybrid.preparation import Prepared
from hybrid.waiting import told


def launch(ready: Prepared, run_dir: Path) -> None:
    """`hybrid.trainer.train` of a prepared run; raises what it raises, and `PlacementError` when Ray cannot be started."""
    importing = threading.Thread(target=_import_trainer, name="imports", daemon=True)
    importing.start()
    cluster = ready.cfg.cluster
    with running_ray(
        address=cluster.address,
        gpus=cluster.gpus_per_node,
        processes=ready.cfg.processes_per_gpu,
        device=cluster.device,
        dashboard=cluster.dashboard,
        timeout_s=cluster.start_timeout_s,
        logs=run_dir / "logs",
    ):
        with told("loading torch and the trainer"):
            importing.join()
        from hybrid.trainer import train

        resume_gc()
        train(ready, run_dir)


def _import_trainer() -> None:
    with suppress(Exception):  # it comes again where the main thread imports
        importlib.import_module("hybrid.trainer")
