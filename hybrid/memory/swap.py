"""Parts leave at the level of tensor storages: bytes go to a tier, the storage is emptied, later refilled.

Tensors, views and whoever holds them (DeepSpeed, optimizers) keep their identity and do not notice. Reading one while its part is away
is an error of the caller: on CPU torch raises or the process dies, on CUDA it is an illegal access.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hybrid.errors import MemoryScheduleError
from hybrid.memory.probe import measured_bytes, release_free_memory
from hybrid.memory.storages import allocate, as_tensor, free, movable_storages
from hybrid.memory.tenants import Moved, NamedStorage, RankMoved
from hybrid.memory.tiers import Tier, total_bytes


@dataclass(frozen=True)
class Part:
    """What a part consists of when it leaves. `keep_bytes=False`: no state, comes back as zeros. `read_only`: never written to."""

    storages: Sequence[tuple[str, torch.UntypedStorage]]
    keep_bytes: bool = True
    read_only: bool = False


@dataclass
class _Away:
    storages: list[NamedStorage]
    sizes: list[int]
    keep_bytes: bool
    read_only: bool


class StorageSwap:
    """Moves the parts of one process off `device` to `tier` and back. Not thread-safe."""

    def __init__(self, tier: Tier, device: str | torch.device = "cpu"):
        self.tier = tier
        self.device = torch.device(device).type
        self._away: dict[str, _Away] = {}
        self._written: dict[str, list[NamedStorage]] = {}

    @property
    def away(self) -> set[str]:
        """Parts that have left."""
        return set(self._away)

    def leave(
        self,
        part: str,
        storages: Iterable[tuple[str, torch.UntypedStorage]],
        keep_bytes: bool = True,
        read_only: bool = False,
    ) -> Moved:
        """Copy the storages of `part` to the tier and empty them.

        Storages under 64 KiB (1 MiB on CUDA) or on another device stay and are not counted. `keep_bytes=False` copies nothing: for
        buffers without state, which come back as zeros, as gradients are between steps. A `read_only` part is written the first time
        and leaves for free afterwards. Memory is back with the system after `release_free_memory`, to be called once at the end.

        Raises `MemoryScheduleError` when the part is away already, when a storage cannot move or has left with another part, when a
        read-only part has other storages than the first time, or when the tier has no room; nothing has been freed then.
        """
        if part in self._away:
            raise MemoryScheduleError(f"{part} has left already: it must come before it can leave again.")
        named = list(storages)
        self._refuse_taken(part, named)
        entries = movable_storages(part, named, self.device)
        must_write = keep_bytes and not (read_only and self._is_written(part, entries))
        if keep_bytes and not must_write:
            entries = self._written[part]  # In the order in which their bytes lie in the tier.
        start = time.perf_counter()
        if self.device == "cuda":
            torch.cuda.synchronize()  # Freeing waits for nothing, and DeepSpeed has streams of its own.
        sizes = [entry.storage.nbytes() for entry in entries]
        copied = self.tier.write(part, entries) if must_write else 0
        if read_only and keep_bytes:
            self._written[part] = entries
        for entry in entries:
            free(entry.storage)
        self._away[part] = _Away(entries, sizes, keep_bytes, read_only)
        return Moved(part, sum(sizes), copied, time.perf_counter() - start)

    def come(self, part: str) -> Moved:
        """Give the storages of `part` memory again and fill them. Raises `MemoryScheduleError` when the part is not away."""
        if part not in self._away:
            raise MemoryScheduleError(f"{part} is not away: it must leave before it can come.")
        start = time.perf_counter()
        away = self._away[part]
        for entry, size in zip(away.storages, away.sizes, strict=True):
            allocate(entry.storage, size)
        if away.keep_bytes:
            self.tier.read(part, away.storages)
        else:
            for entry in away.storages:
                as_tensor(entry.storage).zero_()
        if not away.read_only:
            self.tier.release(part)
        del self._away[part]
        total = total_bytes(away.storages)
        return Moved(part, total, total if away.keep_bytes else 0, time.perf_counter() - start)

    def _is_written(self, part: str, entries: list[NamedStorage]) -> bool:
        if part not in self._written:
            return False
        before, now = ({e.storage._cdata: e.name for e in group} for group in (self._written[part], entries))
        if before.keys() != now.keys():
            other = sorted({*before.values()} ^ {*now.values()}) or sorted(now.values())
            raise MemoryScheduleError(
                f"{part} is read-only but has other storages than when it first left: {', '.join(other[:5])}."
            )
        return True

    def _refuse_taken(self, part: str, named: list[tuple[str, torch.UntypedStorage]]) -> None:
        taken = {e.storage._cdata: other for other, away in self._away.items() for e in away.storages}
        for name, storage in named:
            if storage._cdata in taken:
                raise MemoryScheduleError(
                    f"{part}: storage {name} has left with {taken[storage._cdata]}: a storage belongs to one part."
                )


def leave_parts(swap: StorageSwap, parts: Mapping[str, Part], rank: int, node: str) -> list[RankMoved]:
    """Let `parts` of this process leave one after another, measuring it around each (`probe.measured_bytes`).

    Garbage is collected first, so that what falls is the part itself. Raises as `StorageSwap.leave`.
    """
    release_free_memory(swap.device)
    rows, before = [], measured_bytes(swap.device)
    for name, part in parts.items():
        moved = swap.leave(name, part.storages, part.keep_bytes, part.read_only)
        release_free_memory(swap.device, collect=False)
        after = measured_bytes(swap.device)
        rows.append(_row(moved, rank, node, before, after))
        before = after
    return rows


def come_parts(swap: StorageSwap, names: Sequence[str], rank: int, node: str) -> list[RankMoved]:
    """Let the parts `names` of this process come one after another, measured as in `leave_parts`. Raises as `StorageSwap.come`."""
    rows, before = [], measured_bytes(swap.device)
    for name in names:
        moved = swap.come(name)
        after = measured_bytes(swap.device)
        rows.append(_row(moved, rank, node, before, after))
        before = after
    return rows


def _row(moved: Moved, rank: int, node: str, before: int, after: int) -> RankMoved:
    return RankMoved(rank, node, moved.part, moved.counted_bytes, moved.copied_bytes, moved.seconds, before, after)
