"""How busy the GPUs of this node are, sampled in a thread through NVML. Nothing at all where there is no NVIDIA driver."""

from __future__ import annotations

import threading
from typing import Any

import pynvml

from hybrid.gpus import visible_devices


class GpuUtilization:
    """Mean utilisation of the visible GPUs of this node, between calls of `take`. A context manager.

    `interval_s`: seconds between samples; NVML itself averages over 1/6 to 1 s.
    """

    def __init__(self, interval_s: float = 0.5):
        self.interval_s = interval_s
        self._sum, self._count = 0.0, 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> GpuUtilization:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to sample; does nothing where there is no NVIDIA driver or no GPU is visible."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        try:
            self._handles = _visible_handles()
        except pynvml.NVMLError:
            self._handles = []
        if not self._handles:
            pynvml.nvmlShutdown()
            return
        self._thread = threading.Thread(target=self._sample, name="gpu-utilization", daemon=True)
        self._thread.start()

    def take(self) -> float | None:
        """Mean of all GPUs since the last call, 0 to 1; None without GPUs, or when no sample was taken since."""
        with self._lock:
            mean = self._sum / self._count if self._count else None
            self._sum, self._count = 0.0, 0
        return mean

    def stop(self) -> None:
        """End the thread. May be called twice."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        pynvml.nvmlShutdown()

    def _sample(self) -> None:
        while not self._ended.wait(self.interval_s):
            try:
                busy = [pynvml.nvmlDeviceGetUtilizationRates(handle).gpu for handle in self._handles]
            except (
                pynvml.NVMLError
            ):  # A slice of a GPU (MIG) has no utilisation; a lost GPU is for the trainer to report.
                continue
            with self._lock:
                self._sum += sum(busy) / len(busy) / 100
                self._count += 1


def _visible_handles() -> list[Any]:
    """NVML handles of the GPUs in CUDA_VISIBLE_DEVICES (numbers or UUIDs), of all when it is not set."""
    names = visible_devices()
    if names is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return [pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else _by_uuid(name) for name in names]


def _by_uuid(name: str) -> Any:
    """The GPU whose UUID begins with `name`: CUDA takes as much of it as tells the GPUs apart, NVML the whole."""
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    found = [handle for handle in handles if pynvml.nvmlDeviceGetUUID(handle).startswith(name)]
    return found[0] if len(found) == 1 else pynvml.nvmlDeviceGetHandleByUUID(name)  # a slice, which has no number
