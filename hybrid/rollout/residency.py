"""Which parts of an engine are on the device, and which moves are legal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hybrid.errors import MemoryScheduleError

PARTS = ("weights", "kv_cache")
MOVABLE = {"cpu": ("kv_cache",), "cuda": PARTS}
"""On CPU vLLM packs weights into buffers of its kernels, which cannot be taken away and given back."""


def check_leave(parts: list[str], resident: set[str], device: str) -> None:
    """Raise `MemoryScheduleError` unless `parts` may leave. vLLM's deep sleep takes both parts, so weights never leave KV cache behind."""
    _check_movable(parts, device, "leave")
    absent = [p for p in parts if p not in resident]
    if absent:
        raise MemoryScheduleError(
            f"rollout/{absent[0]} cannot leave: it is not on the device. Resident: {sorted(resident)}."
        )
    if "weights" in parts and "kv_cache" in resident - set(parts):
        raise MemoryScheduleError(
            "rollout/weights cannot leave alone: kv_cache is resident. Let both leave, or kv_cache first."
        )


def check_come(parts: list[str], resident: set[str], device: str) -> None:
    """Raise `MemoryScheduleError` unless `parts` may come. vLLM would ignore a wake of parts of which one is awake."""
    _check_movable(parts, device, "come")
    there = [p for p in parts if p in resident]
    if there:
        raise MemoryScheduleError(
            f"rollout/{there[0]} cannot come: it is on the device already. Resident: {sorted(resident)}."
        )


def _check_movable(parts: list[str], device: str, verb: str) -> None:
    wrong = [p for p in parts if p not in MOVABLE[device]]
    if wrong or not parts or len(set(parts)) != len(parts):
        raise MemoryScheduleError(
            f"rollout parts {parts} cannot {verb}: on {device} each of {list(MOVABLE[device])} may, once per call."
        )


def moved_rows(
    parts: list[str], counted: dict[str, int], seconds: float, before: int, after: int
) -> list[dict[str, Any]]:
    """A row per part with its `counted` bytes. The measured change belongs to the parts together: the first row spans it, the others are
    flat."""
    return [
        {
            "part": part,
            "counted_bytes": counted[part],
            "copied_bytes": 0,
            "seconds": seconds if i == 0 else 0.0,
            "before_bytes": before if i == 0 else after,
            "after_bytes": after,
        }
        for i, part in enumerate(parts)
    ]


def held_bytes(reserved: int, segments: Iterable[dict[str, Any]], allocations: Iterable[Any]) -> int:
    """Bytes of the GPU that a worker of vLLM holds, from its own books: other processes take and free memory of the device meanwhile.

    `reserved`: what torch's allocator counts, which includes the pools of sleep mode, asleep or not, and what vLLM has trimmed of them.
    `segments`: torch's snapshots of those pools. `allocations`: vLLM's records of what it mapped for them (`handle[1]` is bytes).
    """
    in_pools = sum(segment["total_size"] for segment in segments)
    awake = sum(each.handle[1] for each in allocations if not each.is_asleep)
    return reserved - in_pools + awake


def peak_bytes(held: int, reserved: int, highest: int) -> int:
    """Highest bytes of the GPU that a worker of vLLM held, of which `held` are left: what torch's allocator has given back since it counted
    `highest` bytes, for it counts `reserved` now. Sleeping pools count as before and cancel out."""
    return held + max(0, highest - reserved)
