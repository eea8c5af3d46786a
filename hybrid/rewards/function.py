"""A reward function called under a deadline, in a thread and an event loop that last as long as it does."""

from __future__ import annotations

import asyncio
import inspect
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

GRACE_S = 0.5
"""An awaitable is cancelled by the loop at its deadline; so much later the thread itself counts as stuck."""

Batch = dict[str, list]
"""Arguments by name, one item per sample: prompts, responses, labels and the data's columns."""


class Hung(Exception):
    """A call passed its deadline; the message says where it was."""


class BadSample(Exception):
    """Raised by the verifiers: sample `index` of the batch cannot be scored."""

    def __init__(self, index: int, message: str):
        super().__init__(message)
        self.index = index


class RewardFunction:
    """A function `(prompts, responses, labels, **columns) -> list[float]`, sync or async, and its deadline.

    Of a batch it is given, by name, what it has parameters for; everything where it has `**kwargs`.
    """

    def __init__(self, function: Callable[..., Any], name: str, timeout_s: float, by_group: bool = False):
        """`by_group`: its scores of a prompt's samples do not depend on other prompts', so that a batch may be cut between prompts."""
        self.function = function
        self.name = name
        self.timeout_s = timeout_s
        self.by_group = by_group
        self._parameters = inspect.signature(function).parameters.values()
        self._worker = _Worker()

    def __call__(self, batch: Batch, timeout_s: float | None = None) -> Any:
        """What the function returns for `batch`, unchecked: `hybrid.rewards.score` is the checked way.

        Raises what the function raises, and `Hung` after `timeout_s` (the function's own deadline if None).
        """
        if self._worker.stuck:
            self._worker = _Worker()
        arguments = {name: values for name, values in batch.items() if self.accepts(name)}
        return self._worker.call(self.function, arguments, timeout_s or self.timeout_s)

    def accepts(self, name: str) -> bool:
        """Whether the function takes an argument called `name`."""
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return any(p.kind is p.VAR_KEYWORD or (p.name == name and p.kind in by_name) for p in self._parameters)

    def missing(self, batch: Batch) -> list[str]:
        """Parameters that the function needs and `batch` does not have."""
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [p for p in self._parameters if p.default is p.empty and p.kind not in kinds]
        return [p.name for p in required if p.name not in batch]


class _Worker:
    """One thread with one event loop. A daemon: a function that hangs cannot be killed, and must not keep the run from ending."""

    def __init__(self) -> None:
        self.stuck = False
        jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._jobs = jobs
        self._thread = threading.Thread(target=_serve, args=(jobs,), name="hybrid-reward", daemon=True)
        self._thread.start()
        weakref.finalize(self, jobs.put, None)

    def call(self, function: Callable[..., Any], kwargs: Batch, timeout_s: float) -> Any:
        future: Future = Future()
        self._jobs.put((function, kwargs, timeout_s, future))
        wait([future], timeout_s + GRACE_S)
        if not future.done():
            self.stuck = True
            raise Hung(self._where_it_is())
        return future.result()

    def _where_it_is(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame else []
        outside = [f for f in stack if Path(f.filename) != Path(__file__) and "threading.py" not in f.filename]
        return f"it is in {_place(outside[0])}, {_place(outside[-1])}" if outside else "it did not say where"


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} ({frame.name})"


def _serve(jobs: queue.SimpleQueue) -> None:
    loop = asyncio.new_event_loop()
    while (job := jobs.get()) is not None:
        function, kwargs, timeout_s, future = job
        try:
            # Called outside the loop, so that a sync function may start a loop of its own.
            result = function(**kwargs)
            if inspect.isawaitable(result):
                result = loop.run_until_complete(_awaited(result, timeout_s))
            future.set_result(result)
        except BaseException as error:  # sys.exit() in a reward function is a failed reward, too.
            future.set_exception(error)
        del job, function, kwargs, future
        result = None
    loop.close()


async def _awaited(awaitable: Any, timeout_s: float) -> Any:
    task = asyncio.ensure_future(awaitable)
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if done:
        return task.result()
    frames = task.get_stack(limit=1)
    task.cancel()
    where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno} ({frames[0].f_code.co_name})" if frames else "unknown"
    raise Hung(f"it waits at {where}")
