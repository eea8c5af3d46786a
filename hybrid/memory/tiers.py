"""Where the bytes of parts that left are kept: a file (CPU, or CUDA when host memory is short) or pinned host memory (CUDA).

Both keep their room from step to step. A part's bytes lie in the order in which its storages are given, so `read` must be given the
storages that were written, in the same order, already allocated.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from hybrid.errors import MemoryScheduleError
from hybrid.memory.storages import as_tensor, host_bytes
from hybrid.memory.tenants import NamedStorage

_CHUNK = 8 * 2**20
"""Bytes per system call: large enough to be sequential for the disk, small enough to stay in the cache of the processor."""
_BOUNCE = 64 * 2**20
_MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}


class Tier(Protocol):
    """`write` returns, with the bytes it copied, when they are safe and the storages may be freed; `read` when they are back and usable
    on the current stream. `share` reserves for a part a place that other processes may `adopt` by its file descriptor."""

    def reserve(self, part: str, nbytes: int) -> None: ...

    def write(self, part: str, storages: Sequence[NamedStorage]) -> int: ...

    def read(self, part: str, storages: Sequence[NamedStorage]) -> None: ...

    def release(self, part: str) -> None: ...

    def share(self, part: str, nbytes: int) -> int: ...

    def adopt(self, part: str, fd: int) -> None: ...


def make_tier(kind: str, folder: str | Path) -> Tier:
    """The tier of a process: "file" in `folder`, which is this process's, or "pinned". Raises `MemoryScheduleError` as their classes."""
    return FileTier(folder) if kind == "file" else PinnedTier()


def total_bytes(storages: Sequence[NamedStorage]) -> int:
    return sum(entry.storage.nbytes() for entry in storages)


class FileTier:
    """One file per part in `folder`, without a name there: the disk gets its space back however the process ends.

    Nothing is fsynced: the bytes need not outlive the process. Overwriting the same pages each step is the fastest write there is.
    Raises `MemoryScheduleError` when `folder` lies in memory (tmpfs, ramfs): moving there would free nothing.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        kind = in_memory(self.folder)
        if kind is not None:
            raise MemoryScheduleError(
                f"memory.swap_dir={self.folder} is a {kind}: files there take the memory they should free. Name a folder on a disk."
            )
        self._files: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._bounce: torch.Tensor | None = None

    def reserve(self, part: str, nbytes: int) -> None:
        """Take the disk space for `nbytes` of `part` now. Raises `MemoryScheduleError` when the disk has it not."""
        if part not in self._files:
            fd, path = tempfile.mkstemp(dir=self.folder, prefix=f"{part}.")
            os.unlink(path)
            self._files[part], self._sizes[part] = fd, 0
        if nbytes > self._sizes[part]:
            try:
                os.posix_fallocate(self._files[part], 0, nbytes)
            except OSError as error:
                raise self._no_room(part, nbytes, error.strerror) from error
            self._sizes[part] = nbytes

    def share(self, part: str, nbytes: int) -> int:
        """`reserve`; the descriptor of the file of `part`."""
        self.reserve(part, nbytes)
        return self._files[part]

    def adopt(self, part: str, fd: int) -> None:
        """Read `part` from another process's file from now on."""
        self._files[part], self._sizes[part] = fd, os.fstat(fd).st_size

    def write(self, part: str, storages: Sequence[NamedStorage]) -> int:
        """Write the bytes of `storages` one after another. Raises `MemoryScheduleError` when the disk is full."""
        needed = total_bytes(storages)
        self.reserve(part, needed)
        at = 0
        for chunk in self._chunks_out(storages):
            try:
                written = os.pwrite(self._files[part], chunk, at)
            except OSError as error:
                raise self._no_room(part, needed, error.strerror) from error
            if written != len(chunk):
                raise self._no_room(part, needed, f"only {at + written} bytes were written")
            at += written
        return at

    def read(self, part: str, storages: Sequence[NamedStorage]) -> None:
        """Fill `storages` with the bytes that `write` took. Raises `MemoryScheduleError` when the file has become shorter."""
        fd, at = self._files[part], 0
        for entry in storages:
            if entry.storage.device.type == "cpu":
                target = host_bytes(entry.storage)
                for start in range(0, len(target), _CHUNK):
                    at += self._read_into(fd, part, target[start : start + _CHUNK], at)
                continue
            target, bounce = as_tensor(entry.storage), self._pinned_bounce()
            for start in range(0, target.numel(), _BOUNCE):
                piece = bounce[: min(_BOUNCE, target.numel() - start)]
                at += self._read_into(fd, part, memoryview(piece.numpy()), at)
                target[start : start + piece.numel()].copy_(piece)

    def release(self, part: str) -> None:
        """The file stays for the next time."""

    def close(self) -> None:
        """Give the disk space back. The bytes of parts that are away are lost."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def _chunks_out(self, storages: Sequence[NamedStorage]) -> Iterator[memoryview]:
        for entry in storages:
            if entry.storage.device.type == "cpu":
                source = host_bytes(entry.storage)
                yield from (source[start : start + _CHUNK] for start in range(0, len(source), _CHUNK))
                continue
            source, bounce = as_tensor(entry.storage), self._pinned_bounce()
            for start in range(0, source.numel(), _BOUNCE):
                piece = bounce[: min(_BOUNCE, source.numel() - start)]
                piece.copy_(source[start : start + piece.numel()])
                yield memoryview(piece.numpy())

    def _pinned_bounce(self) -> torch.Tensor:
        if self._bounce is None:
            self._bounce = torch.empty(_BOUNCE, dtype=torch.uint8, pin_memory=True)
        return self._bounce

    def _read_into(self, fd: int, part: str, target: memoryview, at: int) -> int:
        got = os.preadv(fd, [target], at)
        if got != len(target):
            raise MemoryScheduleError(
                f"{part}: its swap file in {self.folder} ended at byte {at + got}: somebody truncated it."
            )
        return got

    def _no_room(self, part: str, needed: int, reason: str) -> MemoryScheduleError:
        disk = os.statvfs(self.folder)
        return MemoryScheduleError(
            f"{part} needs {needed} bytes in {self.folder}, where {disk.f_bavail * disk.f_frsize} are free ({reason}). Nothing was freed. "
            "Free disk space, or name a folder on a larger disk with memory.swap_dir."
        )


def in_memory(folder: Path) -> str | None:
    """ "tmpfs" or "ramfs" when files in `folder` live in memory, else None."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(256)
    if libc.statfs(os.fsencode(folder), buffer) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    return _MEMORY_FILESYSTEMS.get(struct.unpack_from("l", buffer)[0] & 0xFFFFFFFF)


def extents(sizes: Sequence[int], slab_bytes: int) -> list[tuple[int, int, int, int, int]]:
    """How storages of `sizes` bytes, laid end to end, fall on slabs: rows (storage, offset in it, slab, offset in it, bytes)."""
    rows, at = [], 0
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            slab, inside = divmod(at, slab_bytes)
            count = min(size - start, slab_bytes - inside)
            rows.append((index, start, slab, inside, count))
            start, at = start + count, at + count
    return rows


class PinnedTier:
    """Pinned host slabs of `slab_bytes`, a power of two: torch rounds every pinned block up to one, so nothing is lost.

    Slabs are pinned when a part first leaves, which blocks the driver for seconds. From then on they go to whichever part is away.
    Copies run on a side stream. `write` waits for it, because freeing does not. `read` allocates nothing there, so that blocks stay with
    the main stream.
    """

    def __init__(self, slab_bytes: int = 256 * 2**20):
        if slab_bytes & (slab_bytes - 1):
            raise MemoryScheduleError(f"Pinned slabs of {slab_bytes} bytes: the size must be a power of two.")
        if not torch.cuda.is_available():
            raise MemoryScheduleError("memory.tier=pinned needs a CUDA device and there is none: set memory.tier=file.")
        self.slab_bytes = slab_bytes
        self.pinned_bytes = 0
        self._free: list[torch.Tensor] = []
        self._held: dict[str, list[torch.Tensor]] = {}
        self._shared: dict[str, tuple[int, mmap.mmap]] = {}

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        """Made by the first copy: a stream opens this process's context on the GPU, which is others' until then."""
        return torch.cuda.Stream()

    def reserve(self, part: str, nbytes: int) -> None:
        """Pin the slabs that `nbytes` of `part` take, and hold them for it until `release`."""
        held = self._held.setdefault(part, [])
        while len(held) * self.slab_bytes < nbytes:
            held.append(self._free.pop() if self._free else self._pin(part, nbytes))

    def share(self, part: str, nbytes: int) -> int:
        """Slabs for `part` in memory that other processes can map, once; the descriptor of that memory."""
        if part not in self._shared:
            fd = os.memfd_create(part)
            os.ftruncate(fd, -(-nbytes // self.slab_bytes) * self.slab_bytes)
            self.adopt(part, fd)
        return self._shared[part][0]

    def adopt(self, part: str, fd: int) -> None:
        """Map and pin the memory behind `fd` as the slabs of `part`."""
        memory = mmap.mmap(fd, 0)
        slabs = torch.frombuffer(memory, dtype=torch.uint8)
        error = torch.cuda.cudart().cudaHostRegister(slabs.data_ptr(), slabs.numel(), 0)
        if int(error) != 0:
            raise self._not_pinned(part, slabs.numel(), f"cudaHostRegister: {error}")
        self._shared[part] = fd, memory
        self._held[part] = list(slabs.split(self.slab_bytes))

    def write(self, part: str, storages: Sequence[NamedStorage]) -> int:
        """Copy the bytes of `storages` to the host; on return they are there. Raises `MemoryScheduleError` when no memory can be pinned."""
        self.reserve(part, total_bytes(storages))
        self._side.wait_stream(torch.cuda.current_stream())
        self._copy(part, storages, out=True)
        self._side.synchronize()
        return total_bytes(storages)

    def read(self, part: str, storages: Sequence[NamedStorage]) -> None:
        """Copy the bytes back; on return they are on the device."""
        self._side.wait_stream(torch.cuda.current_stream())
        self._copy(part, storages, out=False)
        torch.cuda.current_stream().wait_stream(self._side)
        self._side.synchronize()

    def release(self, part: str) -> None:
        """Give the part's slabs to whoever leaves next."""
        self._free += self._held.pop(part, [])

    def _copy(self, part: str, storages: Sequence[NamedStorage], out: bool) -> None:
        tensors = [as_tensor(entry.storage) for entry in storages]
        with torch.cuda.stream(self._side):
            for index, start, slab, inside, count in extents([t.numel() for t in tensors], self.slab_bytes):
                device, host = tensors[index][start : start + count], self._held[part][slab][inside : inside + count]
                (host if out else device).copy_(device if out else host, non_blocking=True)

    def _pin(self, part: str, nbytes: int) -> torch.Tensor:
        try:
            slab = torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise self._not_pinned(part, nbytes, str(error)) from error
        self.pinned_bytes += self.slab_bytes
        return slab

    def _not_pinned(self, part: str, nbytes: int, reason: str) -> MemoryScheduleError:
        return MemoryScheduleError(
            f"{part} needs {nbytes} bytes of pinned host memory and a slab of {self.slab_bytes} could not be pinned ({reason}). "
            "Raise the memlock limit (docker: --ulimit memlock=-1), free host memory, or set memory.tier=file."
        )
