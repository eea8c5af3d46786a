"""What this machine's processes take and how fast its slow tier is, measured once and kept.

Kept as JSON in `$XDG_CACHE_HOME/hybrid/calibration.json` (default ~/.cache), by host, GPU and versions: another torch is another machine.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hybrid.config import RunConfig, machine, swap_folder
from hybrid.config.load import check_report
from hybrid.config.start_rules import wrong_build
from hybrid.files import nearest_there, write_atomic
from hybrid.planning.facts import ProcessBytes

PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "ray")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Calibration:
    """Bytes of processes (see `ProcessBytes`), and bytes per second with the tier that was measured, while all GPUs of a node move: of
    all of them with files, of each with pinned memory."""

    device: str
    tier: str
    role: ProcessBytes
    engine: ProcessBytes
    leave_bytes_per_s: float
    come_bytes_per_s: float
    communicator: int = 0
    """Bytes of a process group that spans several GPUs; 0 where there was one."""
    graphs: int = 0
    """Bytes of an engine's CUDA graphs, of a model with as many layers as the profile's; 0 where it was not measured."""

    def of(self, device: str, cfg: RunConfig) -> dict[str, Any]:
        """Fields of `MachineFacts` that this replaces in a plan for `device`. GPUs of a node share its disk."""
        if device != self.device:
            return {"source": "stated"}
        found: dict[str, Any] = {"role": self.role, "engine": self.engine, "source": "measured"}
        found |= {name: size for name in ("communicator", "graphs") if (size := getattr(self, name))}
        if self.tier == cfg.memory.tier:
            found["leave_bytes_per_s"] = self.leave_bytes_per_s / _sharing(cfg)
            found["come_bytes_per_s"] = self.come_bytes_per_s / _sharing(cfg)
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
    """Measure this machine with the processes that a resolved `cfg` starts, and keep it. Some minutes; Ray is started and ended.

    A role is a rank on each GPU with a tiny model, an engine is one with the profile's tokenizer; what they hold on purpose is taken off.
    On CUDA a second engine captures graphs.
    The ranks then move memory to the slow tier and back, where the run would. Raises `HybridError` when Ray or vLLM does not start.
    """
    check_report(cfg, wrong_build(cfg))
    from hybrid.planning.probes import measure_processes

    with tempfile.TemporaryDirectory(dir=nearest_there(swap_folder(cfg)), prefix="hybrid-calibration-") as folder:
        measured = measure_processes(cfg, Path(folder), TIMEOUT_S)
    rates = {name: getattr(measured, name) * _sharing(cfg) for name in ("leave_bytes_per_s", "come_bytes_per_s")}
    found = Calibration(cfg.cluster.device, cfg.memory.tier, **measured._asdict() | rates)
    _write(_read() | {machine_key(): asdict(found)})
    return found


def _sharing(cfg: RunConfig) -> int:
    """GPUs of a node that share one slow tier."""
    return cfg.cluster.gpus_per_node if cfg.memory.tier == "file" else 1


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
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _write(rows: dict[str, Any]) -> None:
    write_atomic(calibration_file(), json.dumps(rows, indent=2))
