"""What every worker of the pool is: a class of ours in a Ray actor, with a log of its own."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from hybrid.telemetry.spans import Spans
from hybrid.telemetry.timeline import ProcessTrace


def as_process(cls: type):
    """`cls` as a Ray actor class whose output goes to a file of the run, that can say where it lives and record what it does.

    `cls` may have `start_ops` and `stop_ops -> list[OpTrace]`, around which it records its operations.
    """

    class Process(cls):
        def __init__(self, log_file: str, *args, **kwargs):
            _redirect_output(log_file)
            self.spans = Spans()
            super().__init__(*args, **kwargs)

        def where(self) -> dict[str, Any]:
            context = ray.get_runtime_context()
            return {
                "pid": os.getpid(),
                "node_id": context.get_node_id(),
                "gpu_ids": context.get_accelerator_ids()["GPU"],
            }

        def ping(self) -> None:
            """Answers when the process is alive and idle."""

        def start_trace(self) -> None:
            """Record from now on."""
            _, self._trace_problem = _attempt(self, "start_ops")
            self.spans.start()

        def stop_trace(self) -> ProcessTrace:
            """What was recorded since `start_trace`; never raises."""
            spans = self.spans.take()
            ops, problem = _attempt(self, "stop_ops") if self._trace_problem is None else (None, self._trace_problem)
            return ProcessTrace(os.getpid(), spans, ops or [], problem)

    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_"):
            setattr(Process, name, _in_span(name, method))
    Process.__name__ = Process.__qualname__ = cls.__name__
    return ray.remote(Process)


def _in_span(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.isgeneratorfunction(method):  # Ray streams what a generator yields, and looks at the function to know

        @functools.wraps(method)
        def items(self, *args, **kwargs):
            with self.spans.span(name):
                yield from method(self, *args, **kwargs)

        return items

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        with self.spans.span(name):
            return method(self, *args, **kwargs)

    return call


def _attempt(process: Any, name: str) -> tuple[Any, str | None]:
    """Result of a method that the process may lack, and what it raised."""
    try:
        return getattr(process, name, lambda: None)(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _redirect_output(log_file: str) -> None:
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)
    print(f"pid {os.getpid()}", flush=True)
