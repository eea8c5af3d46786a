"""One copy per node of what all its ranks hold alike: eight pinned copies of the weights of an 8B model are 122 GB."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from hybrid.errors import MemoryScheduleError
from hybrid.files import write_atomic
from hybrid.memory.tenants import NamedStorage
from hybrid.memory.tiers import Tier, total_bytes

SUFFIX = ".node-copy"


class NodeTier:
    """A tier whose `replicated` parts have one copy per node: the writer's, which the node's other ranks read.

    Processes find the copy by a small file in `folder`, the same for all ranks of a role on a node: the writer's process id and file
    descriptor, which Linux lets others open. Ranks must leave together and come together, as the scheduler has them do: a reader must
    not come before the writer's `write` has returned, nor the writer leave again before all readers have come.
    """

    def __init__(self, own: Tier, folder: str | Path, is_writer: bool):
        self.own, self.folder, self.is_writer = own, Path(folder), is_writer
        self.replicated: Collection[str] = ()
        self._places: dict[str, str] = {}

    def reserve(self, part: str, nbytes: int) -> None:
        if part not in self.replicated:
            self.own.reserve(part, nbytes)

    def write(self, part: str, storages: Sequence[NamedStorage]) -> int:
        """Bytes that this process copied: none where another one's copy will serve."""
        if part not in self.replicated:
            return self.own.write(part, storages)
        if not self.is_writer:
            return 0
        fd = self.own.share(part, total_bytes(storages))
        written = self.own.write(part, storages)
        if part not in self._places:
            self._places[part] = f"{os.getpid()} {fd}"
            write_atomic(self._note(part), self._places[part])
        return written

    def read(self, part: str, storages: Sequence[NamedStorage]) -> None:
        """Raises `MemoryScheduleError` when the writer's copy is gone."""
        if part in self.replicated and not self.is_writer and part not in self._places:
            self._places[part] = place = self._find(part)
            pid, fd = place.split()
            self.own.adopt(part, os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))
        self.own.read(part, storages)

    def release(self, part: str) -> None:
        """A node's copy stays where it is for the next time."""
        if part not in self.replicated:
            self.own.release(part)

    def _find(self, part: str) -> str:
        try:
            return self._note(part).read_text(encoding="utf-8")
        except OSError as error:
            raise MemoryScheduleError(f"{part}: no rank of this node left a copy ({error}).") from error

    def _note(self, part: str) -> Path:
        return self.folder / f"{part}{SUFFIX}"
