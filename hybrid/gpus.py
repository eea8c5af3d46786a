"""How CUDA names the GPUs of a node, and the order of ranks on them. Starts neither CUDA nor Ray."""

from __future__ import annotations

from collections.abc import Sequence


def rank_order(nodes: Sequence[str], gpu_ids: Sequence[str], first: str) -> list[int]:
    """Slots in the order of their ranks. `nodes` and `gpu_ids` are given by slot; `first` is the node whose ranks come first.

    A GPU id is a number, or a UUID where the node lists its GPUs by UUIDs.
    """

    def place(slot: int) -> tuple[bool, str, bool, int, str]:
        gpu = gpu_ids[slot]
        number = int(gpu) if gpu.isdecimal() else -1
        return nodes[slot] != first, nodes[slot], number < 0, number, gpu

    return sorted(range(len(nodes)), key=place)
