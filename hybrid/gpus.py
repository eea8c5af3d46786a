"""How CUDA names the GPUs of a node, and the order of ranks on them. Starts neither CUDA nor Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

SLICE = "MIG-"
"""How the name of a part of a GPU begins (Multi-Instance GPU)."""

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""One of them exists where there is a CUDA driver: on Linux, and on Linux under Windows."""


def has_driver() -> bool:
    return any(Path(device).exists() for device in DRIVER_FILES)


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """Names in CUDA_VISIBLE_DEVICES, numbers or UUIDs, as CUDA reads them: to the first that is of another kind than the first of all,
    or empty, or negative. None when it is not set: all are visible."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return None
    names: list[str] = []
    for name in (each.strip() for each in given.split(",")):
        kind = next((prefix for prefix in ("GPU-", SLICE) if name.startswith(prefix)), "")
        if not (kind or name.isdecimal()) or (
            names and not (names[0].startswith(kind) if kind else names[0].isdecimal())
        ):
            break
        names.append(name)
    return names


def rank_order(nodes: Sequence[str], gpu_ids: Sequence[str], first: str) -> list[int]:
    """Slots in the order of their ranks. `nodes` and `gpu_ids` are given by slot; `first` is the node whose ranks come first.

    A GPU id is a number, or a UUID where the node lists its GPUs by UUIDs.
    """

    def place(slot: int) -> tuple[bool, str, bool, int, str]:
        gpu = gpu_ids[slot]
        number = int(gpu) if gpu.isdecimal() else -1
        return nodes[slot] != first, nodes[slot], number < 0, number, gpu

    return sorted(range(len(nodes)), key=place)
