"""GPUs to plan for without having them, and how fast tenants move there until somebody has measured it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybrid.config import RunConfig
from hybrid.config.base import parse_bytes
from hybrid.errors import ConfigError
from hybrid.planning.footprint import Speeds

LINE_RATE = {3: 16e9, 4: 32e9, 5: 64e9}
"""Bytes per second of PCIe x16 in one direction, by generation."""
SHARE_OF_LINE_RATE = 0.6
"""What copies to pinned memory are planned with, all GPUs of a node copying, until measured."""
FILE_BYTES_PER_S = 1e9
"""What the file tier is planned with until measured, all processes of a node together."""


@dataclass(frozen=True)
class Gpu:
    """Memory as the driver reports it, and the generation of its PCIe link."""

    nbytes: int
    pcie: int


GPUS = {
    name: Gpu(mib * 2**20, pcie)
    for name, mib, pcie in (
        ("T4", 15360, 3),
        ("V100-16GB", 16384, 3),
        ("V100-32GB", 32768, 3),
        ("RTX3090", 24576, 4),
        ("RTX4090", 24564, 4),
        ("RTX5090", 32607, 5),
        ("L4", 23034, 4),
        ("A10G", 23028, 4),
        ("L40S", 46068, 4),
        ("A100-40GB", 40960, 4),
        ("A100-80GB", 81920, 4),
        ("H100-80GB", 81559, 5),
        ("H200", 143771, 5),
        ("B200", 183359, 5),
    )
}


def find_gpu(text: str) -> Gpu:
    """A name of `GPUS`, however written (h100, "A100 40GB"), or bytes ("80GiB"). Raises `ConfigError` with the names."""
    plain = _plain(text)
    matches = [name for name in GPUS if _plain(name).startswith(plain)]
    if plain and matches and not plain.isdigit():
        return GPUS[matches[-1]]
    try:
        return Gpu(int(parse_bytes(text)), 4)
    except ValueError as error:
        raise ConfigError(f"--gpu {text}: neither a size such as 80GiB nor one of {', '.join(GPUS)}.") from error


def default_speeds(cfg: RunConfig, gpu: Gpu | None = None) -> Speeds:
    """Speeds of one GPU of a resolved config; PCIe 4 where the GPU is not known."""
    if cfg.memory.tier == "file":
        rate = FILE_BYTES_PER_S / cfg.cluster.gpus_per_node
    else:
        rate = SHARE_OF_LINE_RATE * LINE_RATE[gpu.pcie if gpu else 4]
    return Speeds(rate, rate)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia", "", text.lower())
