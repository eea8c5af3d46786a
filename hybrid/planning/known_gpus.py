"""GPUs that a plan can be made for without having them (`gpus.yaml`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from pydantic_core import PydanticCustomError

from hybrid.config.base import parse_bytes
from hybrid.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """Memory in bytes; bytes per second of PCIe and NVLink in one direction, as the line has them (NVLink 0: none)."""

    name: str
    nbytes: int
    pcie_bytes_per_s: float
    nvlink_bytes_per_s: float


@cache
def known_gpus() -> dict[str, Gpu]:
    rows = yaml.safe_load((Path(__file__).parent / "gpus.yaml").read_text())
    return {
        name: Gpu(name, row["memory_mib"] * 2**20, row["pcie"] * 1e9, row["nvlink"] * 1e9) for name, row in rows.items()
    }


def find_gpu(text: str) -> Gpu:
    """The GPU that `text` names, however written (h100, "A100 40GB"), the larger of several; or one of that many bytes ("80GiB") on PCIe 4.

    Raises `ConfigError` with the names that are known.
    """
    wanted = _plain(text)
    if not any(_plain(name).startswith(wanted) for name in known_gpus()):
        wanted = re.sub(r"(?<=[a-z0-9]{2})\d{2,3}gb$", "", wanted)  # H100-80GB: it comes in one size
    names = [name for name in known_gpus() if wanted and _plain(name).startswith(wanted)]
    exact = [name for name in names if _plain(name) == wanted]
    if names and not wanted.isdigit():
        return known_gpus()[(exact or names)[-1]]
    try:
        return Gpu(text, int(parse_bytes(text)), 32e9, 0.0)
    except PydanticCustomError as error:
        raise ConfigError(
            f"--gpu {text}: neither a size such as 80GiB nor one of {', '.join(known_gpus())}."
        ) from error


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce", "", text.lower())
