"""Everything that the processes of a run did in one step, on one clock: a Chrome trace for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid.telemetry.spans import Span
from hybrid.telemetry.torch_trace import OpTrace

FILE = "trace.json.gz"
"""Name of the trace in the run's folder."""
COMPRESSION = 6


@dataclass(frozen=True)
class ProcessTrace:
    """What one process recorded: the calls it answered, and torch's operations of it and of its worker processes."""

    pid: int
    spans: list[Span]
    ops: list[OpTrace] = field(default_factory=list)
    problem: str | None = None
    """Why there are no operations, where that went wrong."""


def chrome_trace(processes: Sequence[tuple[str, ProcessTrace]], start_ns: int) -> bytes:
    """The trace, gzip of JSON: a lane per process, in the given order, named "<name> (pid <pid>)"; worker processes of one follow it.

    Times are microseconds since `start_ns`, nanoseconds of the epoch. Processes of different nodes agree as well as their clocks do.
    """
    events: list[dict[str, Any]] = []
    lanes = 0
    for name, trace in processes:
        own = [ops for ops in trace.ops if ops.pid == trace.pid]
        workers = [ops for ops in trace.ops if ops.pid != trace.pid]
        events += _lane(lanes := lanes + 1, f"{name} (pid {trace.pid})", trace.spans, own, start_ns)
        for number, ops in enumerate(workers):
            title = f"{name} worker {number} (pid {ops.pid})"
            events += _lane(lanes := lanes + 1, title, [], [ops], start_ns)
    whole = {"displayTimeUnit": "ms", "baseTimeNanoseconds": start_ns, "traceEvents": events}
    return gzip.compress(json.dumps(whole, separators=(",", ":")).encode(), COMPRESSION, mtime=0)


def _lane(lane: int, title: str, spans: list[Span], recorded: list[OpTrace], start_ns: int) -> list[dict[str, Any]]:
    """Events of one process: its spans first, a row per thread, and below them torch's threads and streams."""
    rows: dict[str, int] = {}

    def event(name: str, category: str, thread: str, began_ns: int, duration_us: float) -> dict[str, Any]:
        row = rows.setdefault(thread, len(rows) + 1)
        at = (began_ns - start_ns) / 1000
        return {"ph": "X", "name": name, "cat": category, "pid": lane, "tid": row, "ts": at, "dur": duration_us}

    timed = [event(s.name, "span", f"calls, {s.thread}", s.start_ns, s.duration_ns / 1000) for s in spans]
    timed += [event(o.name, o.category, o.thread, o.start_ns, o.duration_us) for ops in recorded for o in ops.ops]
    left_out = sum(ops.left_out for ops in recorded)
    about = [("process_name", 0, {"name": title}), ("process_sort_index", 0, {"sort_index": lane})]
    if left_out:
        about.append(("process_labels", 0, {"labels": f"{left_out} shorter operations left out"}))
    about += [("thread_name", row, {"name": thread}) for thread, row in rows.items()]
    about += [("thread_sort_index", row, {"sort_index": row}) for row in rows.values()]
    return [{"ph": "M", "name": name, "pid": lane, "tid": tid, "args": args} for name, tid, args in about] + timed
