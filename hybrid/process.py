"""What every worker of the pool is: a class of ours in a Ray actor, with a log of its own."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from hybrid.environment import Place, process_environment
from hybrid.garbage import pause_gc
from hybrid.leftovers import use_temp_folder
from hybrid.package import Package, check_same, look, take_over_path
from hybrid.telemetry.spans import Spans
from hybrid.telemetry.timeline import ProcessTrace
from hybrid.text import log_in_utf8


def as_process(cls: type):
    """`cls` as a Ray actor class whose output goes to a file of the run, that has variables of its own, can say where it lives and record
    what it does.

    `cls` may have `start_ops` and `stop_ops -> list[OpTrace]`, around which it records its operations. The actor is not of class `cls` but
    holds one: Ray would import the module of `cls`, seconds of torch and DeepSpeed, before any line of ours runs. Variables come before
    that import, so OpenMP and CUDA read them, and Ray need not start a process for each set of them.
    """
    module, name = cls.__module__, cls.__qualname__

    class Process:
        def __init__(
            self, log_file: str, env: dict[str, str], place: Place, temp: str, package: Package, *args, **kwargs
        ):
            _redirect_output(log_file)
            address = ray.util.get_node_ip_address()
            os.environ.update(env)
            os.environ.update(process_environment(place, os.environ, address))
            check_same(package, look(), f"node {address}")
            take_over_path(package)
            if place.beside_gpu:
                from hybrid.numa import bind_to_gpu

                print(bind_to_gpu(place.gpu_id), flush=True)
            use_temp_folder(temp)
            pause_gc()
            self.spans = Spans()
            self.inner = getattr(importlib.import_module(module), name)(*args, **kwargs)

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
            _, self._trace_problem = _attempt(self.inner, "start_ops")
            self.spans.start()

        def stop_trace(self) -> ProcessTrace:
            """What was recorded since `start_trace`; never raises."""
            spans, (ops, problem) = self.spans.take(), (None, self._trace_problem)
            if problem is None:
                ops, problem = _attempt(self.inner, "stop_ops")
            return ProcessTrace(os.getpid(), spans, ops or [], problem)

    for method in dir(cls):
        function = getattr(cls, method)
        if not method.startswith("_") and callable(function):
            setattr(Process, method, _pass_on(method, inspect.isgeneratorfunction(function)))
    Process.__name__ = Process.__qualname__ = cls.__name__
    return ray.remote(Process)


def _pass_on(method: str, streams: bool) -> Callable:
    """Calls `method` of what the process holds, in a span; holds no function of its class, which would be imported with it."""

    def call(self, *args, **kwargs):
        with self.spans.span(method):
            return getattr(self.inner, method)(*args, **kwargs)

    def items(self, *args, **kwargs):  # Ray streams what a generator yields, and looks at the function to know
        with self.spans.span(method):
            yield from getattr(self.inner, method)(*args, **kwargs)

    passed = items if streams else call
    passed.__name__ = passed.__qualname__ = method
    return passed


def _attempt(inner: Any, name: str) -> tuple[Any, str | None]:
    """Result of a method that `inner` may lack, and what it raised."""
    try:
        return getattr(inner, name, lambda: None)(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _redirect_output(log_file: str) -> None:
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)
    log_in_utf8()
    print(f"pid {os.getpid()}", flush=True)
