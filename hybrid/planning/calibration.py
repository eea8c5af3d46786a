"""What this machine's processes take and how fast its slow tier is, measured once and kept.

Kept as JSON in `$XDG_CACHE_HOME/hybrid/calibration.json` (default ~/.cache), by host, GPU and versions: another torch is another machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from hybrid.config import RunConfig, machine, swap_folder
from hybrid.errors import HybridError
from hybrid.files import nearest_there, write_atomic
from hybrid.planning.facts import ProcessBytes

PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "ray")
PROBE_TENSORS, PROBE_BYTES, PROBE_ROUNDS = 64, 8 * 2**20, 5
"""Moved to the slow tier and back by each process, to time it."""
TIMEOUT_S, TIER_TIMEOUT_S = 600.0, 180.0


@dataclass(frozen=True)
class Calibration:
    """Bytes of processes (see `ProcessBytes`), and bytes per second with the tier that was measured (see `tier_speed`)."""

    device: str
    tier: str
    role: ProcessBytes
    engine: ProcessBytes
    leave_bytes_per_s: float
    come_bytes_per_s: float

    def of(self, device: str, cfg: RunConfig) -> dict[str, Any]:
        """Fields of `MachineFacts` that this replaces in a plan for `device`. GPUs of a node share its disk."""
        if device != self.device:
            return {"source": "stated"}
        found: dict[str, Any] = {"role": self.role, "engine": self.engine, "source": "measured"}
        if self.tier == cfg.memory.tier:
            users = cfg.cluster.gpus_per_node if self.tier == "file" else 1
            found["leave_bytes_per_s"] = self.leave_bytes_per_s / users
            found["come_bytes_per_s"] = self.come_bytes_per_s / users
        return found


def calibration_file() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "hybrid" / "calibration.json"


def machine_key() -> str:
    """Names this host, its GPU and the versions of what fills memory."""
    gpu = _gpu_name() if machine.visible_gpus() else "cpu"
    versions = " ".join(f"{package} {_version(package)}" for package in PACKAGES)
    return f"{socket.gethostname()} | {gpu} | python {platform.python_version()} {versions}"


def stored() -> Calibration | None:
    """What `calibrate` measured on this machine, None before it did."""
    row = _read().get(machine_key())
    if row is None:
        return None
    return Calibration(**row | {name: ProcessBytes(**row[name]) for name in ("role", "engine")})


def calibrate(cfg: RunConfig) -> Calibration:
    """Measure this machine with the processes that a resolved `cfg` starts, and keep it. About a minute; Ray is started and ended.

    A role is two ranks with a tiny model, an engine is one with the profile's tokenizer; what they hold on purpose is taken off. Raises
    `HybridError` when Ray or vLLM does not start.
    """
    from hybrid.planning.probes import measure_processes

    with tempfile.TemporaryDirectory(prefix="hybrid-calibration-") as folder:
        role, engine = measure_processes(cfg, Path(folder), TIMEOUT_S)
    leave, come = tier_speed(cfg)
    found = Calibration(cfg.cluster.device, cfg.memory.tier, role, engine, leave, come)
    _write(_read() | {machine_key(): asdict(found)})
    return found


def tier_speed(cfg: RunConfig) -> tuple[float, float]:
    """Bytes per second out of the device and back, through the tier of `cfg`. On CPU as many processes as a node has GPUs move at once,
    as in a run, and it is their sum; on CUDA one does."""
    processes = min(cfg.cluster.gpus_per_node, machine.cpu_cores()) if cfg.cluster.device == "cpu" else 1
    moved = processes * PROBE_TENSORS * PROBE_BYTES
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(processes), context.SimpleQueue()
    with tempfile.TemporaryDirectory(dir=nearest_there(swap_folder(cfg)), prefix="hybrid-calibration-") as folder:
        args = (cfg.memory.tier, folder, cfg.cluster.device, together, answers)
        movers = [context.Process(target=_move, args=args, daemon=True) for _ in range(processes)]
        for mover in movers:
            mover.start()
        for mover in movers:
            mover.join(TIER_TIMEOUT_S)
        if any(mover.exitcode != 0 for mover in movers):
            for mover in movers:
                mover.kill()
            raise HybridError(
                f"Timing the {cfg.memory.tier} tier failed, or took longer than {TIER_TIMEOUT_S:.0f} s: look at what was printed above, "
                f"and whether {swap_folder(cfg)} has room for {moved / 2**20:.0f} MiB."
            )
        seconds = [answers.get() for _ in movers]
    return moved / max(left for left, _ in seconds), moved / max(came for _, came in seconds)


def _move(tier: str, folder: str, device: str, together: Any, answers: Any) -> None:
    """Answer with the median seconds of leaving and of coming, the first round left out."""
    import torch

    from hybrid.memory.probe import release_free_memory
    from hybrid.memory.swap import StorageSwap
    from hybrid.memory.tiers import make_tier

    swap = StorageSwap(make_tier(tier, Path(folder) / str(os.getpid())), device)
    tensors = [torch.ones(PROBE_BYTES, dtype=torch.uint8, device=device) for _ in range(PROBE_TENSORS)]
    named = [(f"probe {number}", tensor.untyped_storage()) for number, tensor in enumerate(tensors)]
    rounds = []
    for _ in range(PROBE_ROUNDS + 1):
        together.wait(TIER_TIMEOUT_S)
        started = time.perf_counter()
        swap.leave("probe", named)
        left = time.perf_counter()
        release_free_memory(device)  # as a run does: what comes finds no pages of its own
        together.wait(TIER_TIMEOUT_S)
        begun = time.perf_counter()
        swap.come("probe")
        rounds.append((left - started, time.perf_counter() - begun))
    leave, come = zip(*rounds[1:], strict=True)
    answers.put((median(leave), median(come)))


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _read() -> dict[str, Any]:
    file = calibration_file()
    return json.loads(file.read_text()) if file.is_file() else {}


def _write(rows: dict[str, Any]) -> None:
    write_atomic(calibration_file(), json.dumps(rows, indent=2))
