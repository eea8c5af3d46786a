"""Torch's record of the operations of a process, cut down to what a timeline of many processes can hold."""

from __future__ import annotations

import gzip
import heapq
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_OPS = 100_000
"""Operations kept of a process, the longest: those that hold others are among them."""
HOST = "cpu_op"
"""Torch's category of operations on the CPU; kernels and copies have others, and the device's number in place of the pid."""


@dataclass(frozen=True)
class Op:
    start_ns: int
    """Nanoseconds since the epoch."""
    duration_us: float
    name: str
    category: str
    thread: str


@dataclass(frozen=True)
class OpTrace:
    """Operations of the process `pid`, in the order of their starts."""

    pid: int
    ops: list[Op] = field(default_factory=list)
    left_out: int = 0
    """Operations beyond `MAX_OPS`, none longer than any that is kept."""


class TorchRecorder:
    """torch.profiler around what this thread does between `start` and `stop`: operations of the CPU and, on `cuda`, of the GPU.

    Without shapes, stacks and memory, which would slow what is measured.
    """

    def __init__(self, device: str):
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
        self._profile = profile(activities=activities)
        self._profile.start()

    def stop(self) -> OpTrace:
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            return read_torch_trace(file)


def read_torch_trace(file: Path, most: int = MAX_OPS) -> OpTrace:
    """A Chrome trace as torch.profiler exports it, its name ending in `.gz` where it is compressed.

    Kept are events with a duration, without their arguments. Arrows between events are left out.
    """
    raw = file.read_bytes()
    trace = json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)
    events = trace["traceEvents"]
    timed = [e for e in events if e["ph"] == "X" and isinstance(e["pid"], int)]  # named ones span the whole record
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    pid = next((e["pid"] for e in timed if e.get("cat") == HOST), 0)
    kept = heapq.nlargest(most, timed, key=lambda e: e["dur"])
    base_ns = trace.get("baseTimeNanoseconds", 0)
    ops = [_op(e, base_ns, names.get((e["pid"], e["tid"]), f"thread {e['tid']}"), pid) for e in kept]
    return OpTrace(pid, sorted(ops, key=lambda op: op.start_ns), len(timed) - len(kept))


def _op(event: dict[str, Any], base_ns: int, thread: str, pid: int) -> Op:
    thread = thread.strip() if event["pid"] == pid else f"GPU {event['pid']} {thread.strip()}"
    return Op(base_ns + round(event["ts"] * 1000), event["dur"], event["name"], event.get("cat", ""), thread)
