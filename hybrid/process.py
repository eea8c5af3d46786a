"""What every worker of the pool is: a class of ours in a Ray actor, with a log of its own."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from hybrid.garbage import pause_gc


def as_process(cls: type):
    """`cls` as a Ray actor class whose output goes to a file of the run, that has variables of its own and can say where it lives.

    The actor is not of class `cls` but holds one: Ray would import the module of `cls`, seconds of torch and DeepSpeed, before any line
    of ours runs. Variables come before that import, so OpenMP and CUDA read them, and Ray need not start a process for each set of them.
    """
    module, name = cls.__module__, cls.__qualname__

    class Process:
        def __init__(self, log_file: str, env: dict[str, str], *args, **kwargs):
            _redirect_output(log_file)
            os.environ.update(env)
            pause_gc()
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

    for method in dir(cls):
        if not method.startswith("_") and callable(getattr(cls, method)):
            setattr(Process, method, _pass_on(method))
    Process.__name__ = Process.__qualname__ = cls.__name__
    return ray.remote(Process)


def _pass_on(method: str) -> Callable:
    def call(self, *args, **kwargs):
        return getattr(self.inner, method)(*args, **kwargs)

    call.__name__ = call.__qualname__ = method
    return call


def _redirect_output(log_file: str) -> None:
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)
    print(f"pid {os.getpid()}", flush=True)
