"""What must hold when a run starts here, but not when it is only planned: weights that can be read, folders that can be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hybrid.config import machine
from hybrid.config.checkpoint import is_without_weights, weight_elements, weights_problem
from hybrid.config.kind_rules import role_models
from hybrid.config.load import check_report
from hybrid.config.paths import swap_folder
from hybrid.config.resolve import resolve
from hybrid.config.run import RunConfig
from hybrid.config.violations import Violation
from hybrid.cuda_machine import vllm_device
from hybrid.files import nearest_there

RECORDS_BYTES = 16 * 2**20
"""Room for logs, metrics and report of a run, on the disk of its folder."""


def check_start(cfg: RunConfig) -> None:
    """Raise `ConfigError` with all that keeps `cfg`, as written, from starting on this machine."""
    resolved = resolve(cfg)
    named = _run_folder(resolved) if cfg.logging.name else []  # a name of ours, if taken, gets a number
    runs = _folder("logging.runs_dir", Path(resolved.logging.runs_dir))
    weights = list(unusable_weights(resolved))
    room = [] if weights else check_room(resolved)
    folders = [*named, *runs, *room, *_record(resolved), *_swap(resolved)]
    check_report(cfg, [*wrong_build(resolved), *_attention(resolved), *weights, *folders])


def wrong_build(cfg: RunConfig) -> list[Violation]:
    """A resolved `cfg` for CPUs where vLLM's GPU build is installed: that build has no CPU platform, and DeepSpeed takes the GPU."""
    if cfg.cluster.device != "cpu" or vllm_device() != "cuda":
        return []
    was_auto = "cluster.device" in cfg.autos
    said = "cluster.device: cpu (auto, as no GPU is visible)" if was_auto else "cluster.device: cpu"
    fix = "Use a GPU, or the CPU build in another environment: HYBRID_VENV=.venv-cpu bash launch/install.sh cpu."
    why = "is invalid: the packages installed here are for GPUs, and this build of vLLM does not run on a CPU"
    return [Violation(("cluster.device",), f"{said} {why}", fix)]


def unusable_weights(cfg: RunConfig, shape_is_enough: bool = False) -> Iterator[Violation]:
    """Model folders of a resolved `cfg` whose weights cannot be trained. `shape_is_enough`: a plan needs none."""
    for key, (path, _) in role_models(cfg).items():
        folder = Path(path)
        if not folder.is_dir() or (shape_is_enough and is_without_weights(folder)):
            continue
        if found := weights_problem(folder):
            yield Violation((key,), f"{key}: {path} is invalid: {found[0]}", found[1])


def check_room(cfg: RunConfig, swap_bytes: int = 0) -> list[Violation]:
    """Bytes that the disk of the run's folder must have free for a resolved `cfg`: the exported model, records, and what leaves memory.

    `swap_bytes`: files of the slow tier on this node, where the plan knows them.
    """
    runs, swap = nearest_there(Path(cfg.logging.runs_dir)), nearest_there(swap_folder(cfg))
    if not runs.is_dir():
        return []  # another rule says so
    needed = {"the exported model": export_bytes(cfg), "records": RECORDS_BYTES}
    if swap.stat().st_dev == runs.stat().st_dev:
        needed["what leaves memory"] = swap_bytes
    free, total = shutil.disk_usage(runs).free, sum(needed.values())
    if free >= total:
        return []
    parts = ", ".join(f"{size / 2**20:.1f} MiB for {name}" for name, size in needed.items() if size)
    said = f"logging.runs_dir: {cfg.logging.runs_dir} is invalid: its disk has {free / 2**20:.1f} MiB free, and the run needs "
    fix = "Free some, name a folder on another disk, or train without checkpoint.export."
    return [Violation(("logging.runs_dir",), f"{said}{total / 2**20:.1f} MiB: {parts}", fix)]


def export_bytes(cfg: RunConfig) -> int:
    """Bytes of the model that a run writes at its end; 0 where it writes none or the weights are not here."""
    if not cfg.checkpoint.export or not Path(cfg.model.path).is_dir():
        return 0
    return weight_elements(cfg.model.path) * (4 if cfg.model.dtype == "float32" else 2)


def _run_folder(cfg: RunConfig) -> Iterator[Violation]:
    runs, name = Path(cfg.logging.runs_dir), cfg.logging.name
    if (runs / name).exists():
        said = f"logging.name {name}: the folder {runs / name} exists already, and a run never writes into another's"
        yield Violation(("logging.name",), said, "Give another name, leave it out for a new one, or remove the folder.")


def _swap(cfg: RunConfig) -> Iterator[Violation]:
    if cfg.memory.swap_dir:
        yield from _folder("memory.swap_dir", Path(cfg.memory.swap_dir))


def _attention(cfg: RunConfig) -> Iterator[Violation]:
    if cfg.model.attention == "flash_attention_2" and not machine.has_flash_attention():
        said = "model.attention: flash_attention_2 is invalid: flash-attn cannot be imported here"
        fix = "Set model.attention to auto, or install flash-attn for this torch (pip install --no-build-isolation flash-attn)."
        yield Violation(("model.attention",), said, fix)


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
