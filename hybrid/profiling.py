"""The step that `logging.profile` names, recorded in every process and put on one timeline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hybrid.errors import WorkerDied
from hybrid.files import write_atomic
from hybrid.telemetry.timeline import FILE, ProcessTrace, chrome_trace

if TYPE_CHECKING:
    from hybrid.session import Session
    from hybrid.supervision import Worker

LANES = {"rollout": "engine"}
"""Names of lanes that are not the role's."""


@contextmanager
def profiled(s: Session, step: int) -> Iterator[None]:
    """Work of `step`; where the profile asks for its timeline, `trace.json.gz` in the run's folder.

    A timeline that cannot be made is a warning: the run is what counts. Raises `WorkerDied` only.
    """
    if step != s.cfg.logging.profile:
        yield
        return
    workers = [worker for worker in s.pool.workers if not worker.role.endswith("-holder")]
    start_ns = time.time_ns()
    recording = _tried(s, lambda: _start(s, workers))
    with s.report.spans.span(f"step {step}"):
        yield
    if recording:
        _tried(s, lambda: _write(s, workers, start_ns))


def _start(s: Session, workers: list[Worker]) -> None:
    """Record in every process; the driver last, so that its step is all it shows."""
    s.pool.wait([w.submit("start_trace") for w in workers], "starting the timeline", s.cfg.cluster.call_timeout_s)
    s.report.spans.start()


def _write(s: Session, workers: list[Worker], start_ns: int) -> None:
    spans = s.report.spans.take()
    start_ns = min((span.start_ns for span in spans), default=start_ns)
    calls = [w.submit("stop_trace") for w in workers]
    traces: list[ProcessTrace] = s.pool.wait(calls, "collecting the timeline", s.cfg.cluster.call_timeout_s)
    for worker, trace in zip(workers, traces, strict=True):
        if trace.problem:
            s.report.warn(f"the timeline lacks the operations of {worker}: {trace.problem}")
    named = [(f"{LANES.get(w.role, w.role)} {w.rank}", trace) for w, trace in zip(workers, traces, strict=True)]
    driver = ("driver", ProcessTrace(os.getpid(), spans))
    write_atomic(s.run_dir / FILE, chrome_trace([driver, *named], start_ns))


def _tried(s: Session, do: Callable[[], Any]) -> bool:
    try:
        do()
    except WorkerDied:
        raise
    except Exception as error:
        s.report.warn(f"no timeline of the step: {type(error).__name__}: {error}")
        return False
    return True
