"""What must hold when a run starts here, but not when it is only planned: weights that can be read, folders that can be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hybrid.config.load import check_report
from hybrid.config.resolve import resolve
from hybrid.config.run import RunConfig
from hybrid.config.violations import Violation
from hybrid.files import nearest_there

WEIGHT_FILES = ("*.safetensors", "*.bin")


def check_start(cfg: RunConfig) -> None:
    """Raise `ConfigError` with all that keeps `cfg`, as written, from starting on this machine."""
    resolved = resolve(cfg)
    named = _run_folder(resolved) if cfg.logging.name else []  # a name of ours, if taken, gets a number
    runs = _folder("logging.runs_dir", Path(resolved.logging.runs_dir))
    check_report(cfg, [*_weights(resolved), *named, *runs, *_record(resolved), *_swap(resolved)])


def _weights(cfg: RunConfig) -> Iterator[Violation]:
    models = {"model.path": cfg.model.path, "reward.model": cfg.reward.model}
    models["critic.path"] = cfg.critic.path if cfg.uses_critic and cfg.critic else None
    models["reference.path"] = cfg.reference.path if cfg.uses_reference and cfg.reference else None
    for key, value in models.items():
        folder = Path(value) if value else None
        repeated = key != "model.path" and value == cfg.model.path
        if folder and not repeated and folder.is_dir() and not any(any(folder.glob(p)) for p in WEIGHT_FILES):
            yield Violation(
                (key,), f"{key} {value} has no weights ({' or '.join(WEIGHT_FILES)})", "Complete the folder."
            )


def _run_folder(cfg: RunConfig) -> Iterator[Violation]:
    runs, name = Path(cfg.logging.runs_dir), cfg.logging.name
    if (runs / name).exists():
        said = f"logging.name {name}: the folder {runs / name} exists already, and a run never writes into another's"
        yield Violation(("logging.name",), said, "Give another name, leave it out for a new one, or remove the folder.")


def _swap(cfg: RunConfig) -> Iterator[Violation]:
    if cfg.memory.swap_dir:
        yield from _folder("memory.swap_dir", Path(cfg.memory.swap_dir))


def _record(cfg: RunConfig) -> Iterator[Violation]:
    if cfg.rollout.record is None:
        return
    file = Path(cfg.rollout.record)
    if file.is_dir():
        yield Violation(("rollout.record",), f"rollout.record {file} is a folder", "Name a file in it.")
    elif file.exists() and file.stat().st_size > 0:
        said = f"rollout.record {file} exists, and recordings are not mixed"
        yield Violation(("rollout.record",), said, "Name another file, or remove it.")
    else:
        yield from _folder("rollout.record", file.parent)


def _folder(key: str, folder: Path) -> Iterator[Violation]:
    """`folder` must be one that can be made and written to."""
    there = nearest_there(folder)
    if not there.is_dir():
        yield Violation((key,), f"{key}: {there} is a file, not a folder", "Name another folder.")
    elif not os.access(there, os.W_OK):
        yield Violation((key,), f"{key}: {there} may not be written to", "Name a folder of yours.")
