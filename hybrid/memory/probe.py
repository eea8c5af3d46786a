"""What processes and devices really hold, in bytes, measured from the system and not from our own counting.

On CPU a process's bytes are its PSS: pages that it shares are divided among those who share them, so the processes of a node add up.
Page cache of swap files is nobody's. On CUDA they are what torch's allocator has reserved in this process, and the device's use is NVML's.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

SAMPLE_EVERY_S = 0.02
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LIBC = ctypes.CDLL(None)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP_FREED = {_M_TRIM_THRESHOLD: -1, _M_MMAP_THRESHOLD: 32 * 2**20}
"""For mallopt(3): the end of the heap stays where it is. Blocks beyond 32 MiB, the most that glibc takes, keep mappings of their own: in
the heap they would save a tenth of the time again, and fragment it by as much."""


@dataclass(frozen=True)
class ProcessBytes:
    """Bytes of one process, or of it and its children. `private` is what would come free if it ended; `peak_rss` since start or reset."""

    rss: int
    pss: int
    private: int
    peak_rss: int


def process_bytes(pid: int | None = None, children: bool = False) -> ProcessBytes:
    """Memory of process `pid` (default: this one), with `children` of it and all its descendants added up.

    RSS added up counts shared pages several times, PSS does not. Costs about 10 ms per GiB of small pages: not for inner loops.
    Raises `ProcessLookupError` when there is no such process.
    """
    pids = [pid or os.getpid()]
    if children:
        pids += _descendants(pids[0])
    rows = [_one_process(pids[0])]
    for child in pids[1:]:
        try:
            rows.append(_one_process(child))
        except ProcessLookupError:
            continue  # It ended meanwhile.
    return ProcessBytes(*(sum(column) for column in zip(*rows, strict=True)))


def _descendants(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(f"no process {pid}") from error


def _one_process(pid: int) -> tuple[int, int, int, int]:
    try:
        rollup = _kib_fields(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8"))
        status = _kib_fields(Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(f"no process {pid}") from error
    private = rollup["Private_Clean"] + rollup["Private_Dirty"]
    return rollup["Rss"], rollup["Pss"], private, status.get("VmHWM", rollup["Rss"])


def _kib_fields(text: str) -> dict[str, int]:
    """The "Name:  123 kB" lines of a /proc file, in bytes."""
    words = (line.split() for line in text.splitlines())
    return {w[0].rstrip(":"): int(w[1]) * 1024 for w in words if len(w) == 3 and w[2] == "kB"}


def measured_bytes(device: str | torch.device) -> int:
    """Bytes that this process holds on `device`: PSS on "cpu", reserved by torch's allocator on "cuda" (free cached blocks included)."""
    return process_bytes().pss if torch.device(device).type == "cpu" else torch.cuda.memory_reserved()


def held_and_shared(device: str, children: bool = False) -> tuple[int, int]:
    """(`measured_bytes`, what RSS counts beyond it because other processes have it too); with `children` on "cpu" of all descendants."""
    if device == "cuda":
        return measured_bytes(device), 0
    held = process_bytes(children=children)
    return held.pss, held.rss - held.pss


def device_used_bytes(index: int = 0) -> int:
    """Bytes in use on CUDA device `index` of this process by anybody, as NVML sees it (driver's own included).

    Found by UUID, because NVML's numbering ignores CUDA_VISIBLE_DEVICES. NVML's and CUDA's totals differ: compare only among themselves.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        return pynvml.nvmlDeviceGetMemoryInfo(handle).used
    finally:
        pynvml.nvmlShutdown()


def device_bytes(device: str, index: int = 0) -> tuple[int, int]:
    """(used, total) bytes of the memory that processes share: of the CUDA device, or of this machine on "cpu"."""
    if device == "cpu":
        memory = psutil.virtual_memory()
        return memory.total - memory.available, memory.total
    free, total = torch.cuda.mem_get_info(index)
    return total - free, total


def release_free_memory(device: str | torch.device, collect: bool = True) -> None:
    """Hand memory that nobody uses back to the system ("cpu") or the driver ("cuda"). `collect` first drops garbage cycles (0.1 s)."""
    if collect:
        gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()  # empty_cache cannot return what another stream still holds.
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        return
    if hasattr(_LIBC, "malloc_trim"):  # glibc; musl has nothing to trim.
        _LIBC.malloc_trim(0)


def keep_free_memory() -> None:
    """Let this process keep in its heap what it frees, from now on, until `release_free_memory`: on CPU a page that is touched for the
    first time costs more than the arithmetic on it."""
    if hasattr(_LIBC, "mallopt"):  # glibc
        for option, value in _KEEP_FREED.items():
            _LIBC.mallopt(option, value)


class PeakSampler:
    """Highest memory of this process, and with `children` its descendants, since the start or the last `take`.

    CPU: the kernel's own high-water mark of RSS, set back by writing to /proc/<pid>/clear_refs: exact and free. Where that is refused
    (some containers mount /proc read-only) a thread samples RSS every 20 ms, which can miss short peaks; `exact` says which.
    CUDA: the peak of torch's allocator (`max_memory_reserved`), this process only.
    """

    def __init__(self, device: str | torch.device, children: bool = False):
        self.device = torch.device(device).type
        self.children = children
        self.exact = self.device == "cuda" or _reset_high_water(os.getpid())
        self._sampler = None if self.exact else _RssThread(children)

    def __enter__(self) -> PeakSampler:
        self.take()
        return self

    def __exit__(self, *_error) -> None:
        self.peak_bytes = self.take()
        self.close()

    def take(self) -> int:
        """The peak in bytes since the last `take`, which starts the next span."""
        if self.device == "cuda":
            peak = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
            return peak
        if self._sampler is not None:
            return self._sampler.take()
        pids = [os.getpid(), *(_descendants(os.getpid()) if self.children else [])]
        return sum(_take_high_water(pid) for pid in pids)

    def close(self) -> None:
        """End the sampling thread, if there is one."""
        if self._sampler is not None:
            self._sampler.stop()


def _reset_high_water(pid: int) -> bool:
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def _take_high_water(pid: int) -> int:
    try:
        peak = _kib_fields(Path(f"/proc/{pid}/status").read_text(encoding="utf-8")).get("VmHWM", 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    _reset_high_water(pid)
    return peak


class _RssThread:
    """Samples RSS in a daemon thread until stopped."""

    def __init__(self, children: bool):
        self._pids = lambda: [os.getpid(), *(_descendants(os.getpid()) if children else [])]
        self._lock = threading.Lock()
        self._peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-sampler", daemon=True)
        self._thread.start()

    def take(self) -> int:
        now = self._now()
        with self._lock:
            peak, self._peak = max(self._peak, now), now
        return peak

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            now = self._now()
            with self._lock:
                self._peak = max(self._peak, now)

    def _now(self) -> int:
        return sum(_rss(pid) for pid in self._pids())


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):
        return 0
