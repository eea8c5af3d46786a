"""Tensor storages as things that can be emptied and filled again while every tensor on them keeps its identity."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

from hybrid.errors import MemoryScheduleError
from hybrid.memory.tenants import NamedStorage

SMALLEST_MOVED = {"cpu": 64 * 2**10, "cuda": 2**20}
"""Smaller storages stay. On CUDA they share 2 MiB segments, so freeing them gives nothing back."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_DONTNEED, _MADV_HUGEPAGE = 4, 14
_PAGE, _HUGE_PAGE = 4096, 2 * 2**20


def movable_storages(part: str, named: Iterable[tuple[str, torch.UntypedStorage]], device: str) -> list[NamedStorage]:
    """The storages of `part` worth moving off `device` ("cpu" or "cuda"), each once, in the order given.

    Left out: the small ones, and those elsewhere (host state of a CUDA role, meta tensors). Raises `MemoryScheduleError` naming storages
    that cannot be emptied (not resizable, shared between processes) or that are two objects over the same memory: freeing one would
    leave the other dangling.
    """
    found: dict[int, NamedStorage] = {}
    owner_of_address: dict[int, NamedStorage] = {}
    for name, storage in named:
        if storage.device.type != device or storage._cdata in found or storage.nbytes() < SMALLEST_MOVED[device]:
            continue
        entry = NamedStorage(name, storage)
        _refuse_unmovable(part, entry)
        other = owner_of_address.setdefault(storage.data_ptr(), entry)
        if other is not entry:
            raise MemoryScheduleError(
                f"{part}: storages {other.name} and {name} are two objects over the same memory: own it once."
            )
        found[storage._cdata] = entry
    return list(found.values())


def _refuse_unmovable(part: str, entry: NamedStorage) -> None:
    size = f"{entry.storage.nbytes()} bytes on {entry.storage.device}"
    if not entry.storage.resizable():
        raise MemoryScheduleError(
            f"{part}: storage {entry.name} ({size}) is not resizable, so it cannot leave. It came from numpy, dlpack, a mapped file or "
            "another process: clone the tensor when the model is built."
        )
    if entry.storage.device.type == "cpu" and entry.storage.is_shared():
        raise MemoryScheduleError(
            f"{part}: storage {entry.name} ({size}) is in memory shared between processes, where emptying it frees nothing: "
            "clone the tensor when the model is built."
        )


def free(storage: torch.UntypedStorage) -> None:
    """Give the storage's memory back: to the system on CPU, to torch's caching allocator on CUDA. No work may still use it."""
    if storage.device.type == "cpu":
        # Whatever the allocator (glibc's heap, a preloaded tcmalloc), the pages go back now: it may keep the addresses.
        _advise(storage, _PAGE, _MADV_DONTNEED)
        storage.resize_(0)
        return
    with torch.cuda.device(storage.device):
        storage.resize_(0)


def allocate(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give the storage `nbytes` uninitialised bytes. On CUDA they belong to the current stream: call it under the main one."""
    if storage.device.type == "cpu":
        storage.resize_(nbytes)
        # Filling fresh memory is bound by page faults: huge pages double its speed. Where they are off this does nothing.
        _advise(storage, _HUGE_PAGE, _MADV_HUGEPAGE)
        return
    with torch.cuda.device(storage.device):
        storage.resize_(nbytes)


def _advise(storage: torch.UntypedStorage, page: int, advice: int) -> None:
    """madvise on the pages that lie wholly inside the storage."""
    start = -(-storage.data_ptr() // page) * page
    end = (storage.data_ptr() + storage.nbytes()) // page * page
    if end > start:
        _LIBC.madvise(start, end - start, advice)


def host_bytes(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a CPU storage, without a copy. Valid until the storage is freed."""
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage as a uint8 tensor on its device, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
