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

CUDA_CONTEXT = 700 * 2**20
"""Published are 0.41 to 0.67 GiB on A100 and 0.6 to 0.74 on H100: it grows as kernels are loaded. With cuBLAS's workspaces."""
LEAST_BYTES = 2**20
"""A number below it has lost its unit."""


@dataclass(frozen=True)
class Gpu:
    """Memory in bytes that programs get; bytes per second of PCIe and NVLink in one direction, as the line has them (NVLink 0: none).
    `context_bytes`: CUDA's context of a process with its kernels."""

    name: str
    nbytes: int
    pcie_bytes_per_s: float
    nvlink_bytes_per_s: float
    has_bf16: bool = True
    context_bytes: int = CUDA_CONTEXT


@cache
def known_gpus() -> dict[str, Gpu]:
    rows = yaml.safe_load((Path(__file__).parent / "gpus.yaml").read_text(encoding="utf-8"))
    return {
        name: Gpu(
            name,
            row["memory_mib"] * 2**20,
            row["pcie"] * 1e9,
            row["nvlink"] * 1e9,
            row.get("bf16", True),
            row["context_mib"] * 2**20 if "context_mib" in row else CUDA_CONTEXT,
        )
        for name, row in rows.items()
    }


def find_gpu(text: str) -> Gpu:
    """The GPU that `text` names, however written ("h100", "4090", "NVIDIA A100-SXM4-40GB"), the larger of several; or one of that many
    bytes ("80GiB") on PCIe 4.

    Words that name no memory ("Tesla", "SXM4", "HBM3") are passed over. Raises `ConfigError` with the names that are known, also where the
    memory is none that the GPU comes with.
    """
    words = re.findall(r"[a-z0-9.]+", re.sub(r"(\d)\s+(?=gi?b\b)", r"\1", text.lower().replace("rtx", "rtx ")))
    sizes = [float(size[1]) for word in words if (size := re.fullmatch(r"(\d+)gi?b", word))]
    scores = {
        name: len(_words(name) & set(words))
        for name, gpu in known_gpus().items()
        if _model(name) in words and all(_is_about(gpu, size) for size in sizes)
    }
    if scores:
        return known_gpus()[[name for name, score in scores.items() if score == max(scores.values())][-1]]
    try:
        size = int(parse_bytes(text))
    except PydanticCustomError as error:
        raise ConfigError(
            f"--gpu {text}: neither a size such as 80GiB nor one of {', '.join(known_gpus())}."
        ) from error
    if size < LEAST_BYTES:
        raise ConfigError(
            f"--gpu {text}: {size} bytes are no GPU's memory. Write the unit, such as 80GiB, or a name: {', '.join(known_gpus())}."
        )
    return Gpu(text, size, 32e9, 0.0)


def _words(name: str) -> set[str]:
    return set(name.lower().replace("-", " ").split())


def _model(name: str) -> str:
    """The word of `name` that tells it from other makes: "RTX 4090" -> "4090"."""
    return next(word for word in re.split(r"[ -]", name.lower()) if word != "rtx")


def _is_about(gpu: Gpu, gigabytes: float) -> bool:
    """Vendors say 80 GB of 79.2 GiB, 24 GB of 22.1 GiB, and 141 GB of 139.8 GiB."""
    return abs(gpu.nbytes / 2**30 - gigabytes) < 0.1 * gigabytes
