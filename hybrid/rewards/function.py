"""A reward function as the scoring sees it: what it takes, and its replies to batches, whatever happens in it.

A user's function runs in processes of its own (user.py); hybrid's own run in a thread here.
"""

from __future__ import annotations

import inspect
import queue
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hybrid.rewards import plain

GRACE_S = 0.5
"""Seconds after its deadline at which a thread counts as stuck."""
OURS = (str(Path(__file__).parent), "concurrent/futures")

Batch = dict[str, list]
"""Arguments by name, one item per sample: prompts, responses, labels, token_ids and the data's columns."""

Reply = dict[str, Any]
"""One of these. `scores`: a list of floats, with texts in the places of values that are not finite numbers. `returned`: shows a value
that is not a list.
`raised`: as `plain.raised` tells. `bad`: the number of a sample that cannot be scored, and why. `hung` and `ended`: where and how."""


class Parameter(NamedTuple):
    """A parameter of a function; `kind` is a name of `inspect`'s kinds."""

    name: str
    kind: str
    required: bool


class BadSample(Exception):
    """Raised by the verifiers: sample `index` of the batch cannot be scored."""

    def __init__(self, index: int, message: str):
        super().__init__(message)
        self.index = index


@runtime_checkable
class Caller(Protocol):
    """Calls a function, once for each number at a time."""

    parameters: Sequence[Parameter]
    count: int
    """How many calls may be under way."""

    def ask(self, number: int, positional: list, keywords: Batch, count: int, timeout_s: float) -> Callable[[], Reply]:
        """Start call `number` for `count` responses. The result waits for the reply. Neither raises."""

    def close(self) -> None:
        """End what calls the function."""


class RewardFunction:
    """A function `(prompts, responses, labels, **columns) -> list[float]` and the deadline of its calls.

    Of a batch it is given, by name, what it has parameters for; everything where it has `**kwargs`.
    """

    def __init__(self, function: Callable[..., Any] | Caller, name: str, timeout_s: float, by_group: bool = False):
        """`function`: sync, called in a thread here, or what calls it elsewhere.

        `by_group`: its scores of a prompt's samples do not depend on other prompts', so that a batch may be cut between prompts.
        """
        self.name = name
        self.timeout_s = timeout_s
        self.by_group = by_group
        self._caller = function if isinstance(function, Caller) else InThread(function)

    @property
    def processes(self) -> int:
        """In how many parts a batch is scored at the same time."""
        return self._caller.count

    def ask(self, batches: Sequence[Batch], timeout_s: float | None = None, first: int = 0) -> list[Reply]:
        """The reply to each of `batches`, at most `processes` of them, which are scored at the same time, from process `first` on.

        Each has `timeout_s` (the function's own deadline if None).
        """
        seconds = timeout_s or self.timeout_s
        waits = [
            self._caller.ask(first + i, *self._arguments(batch), len(batch["responses"]), seconds)
            for i, batch in enumerate(batches)
        ]
        return [reply() for reply in waits]

    def missing(self, batch: Sequence[str] | Batch) -> list[str]:
        """Parameters that the function needs and that are not among the names of `batch`."""
        return missing(self._caller.parameters, batch)

    def close(self) -> None:
        """End its processes."""
        self._caller.close()

    def _arguments(self, batch: Batch) -> tuple[list, Batch]:
        """Positional arguments, and those by name."""
        positional = [p.name for p in self._caller.parameters if p.kind == "POSITIONAL_ONLY" and p.name in batch]
        named = {k: v for k, v in batch.items() if k not in positional and accepts(self._caller.parameters, k)}
        return [batch[name] for name in positional], named


def accepts(parameters: Sequence[Parameter], name: str) -> bool:
    """Whether a function with these parameters takes an argument called `name`."""
    by_name = ("POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY", "POSITIONAL_ONLY")
    return any(p.kind == "VAR_KEYWORD" or (p.name == name and p.kind in by_name) for p in parameters)


def missing(parameters: Sequence[Parameter], names: Sequence[str] | Batch) -> list[str]:
    """Parameters that a call needs and that are not among `names`."""
    variable = ("VAR_POSITIONAL", "VAR_KEYWORD")
    return [p.name for p in parameters if p.required and p.kind not in variable and p.name not in names]


class InThread:
    """Calls a function of ours, which is sync, in a thread that lasts as long as this does."""

    count = 1

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        found = inspect.signature(function).parameters.values()
        self.parameters = [Parameter(p.name, p.kind.name, p.default is p.empty) for p in found]
        self._worker = _Worker()

    def ask(self, number: int, positional: list, keywords: Batch, count: int, timeout_s: float) -> Callable[[], Reply]:
        if self._worker.stuck:
            self._worker = _Worker()
        worker, function = self._worker, self.function
        future = worker.start(lambda: _reply(function, positional, keywords, count))
        return lambda: worker.wait(future, timeout_s)

    def close(self) -> None:
        """The thread ends with the object."""


def _reply(function: Callable[..., Any], positional: list, keywords: Batch, count: int) -> Reply:
    try:
        result = function(*positional, **keywords)
        values = plain.listed(result, count)
        if values is None:
            return {"returned": plain.shown(result)}
        return {"scores": [plain.number(value) for value in values]}
    except BadSample as bad:
        return {"bad": (bad.index, str(bad))}
    except BaseException as error:
        return {"raised": plain.raised(error, OURS)}


class _Worker:
    """One thread. A daemon: a function that hangs cannot be killed, and must not keep the run from ending."""

    def __init__(self) -> None:
        self.stuck = False
        jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._jobs = jobs
        self._thread = threading.Thread(target=_serve, args=(jobs,), name="hybrid-reward", daemon=True)
        self._thread.start()
        weakref.finalize(self, jobs.put, None)

    def start(self, job: Callable[[], Reply]) -> Future:
        future: Future = Future()
        self._jobs.put((job, future))
        return future

    def wait(self, future: Future, timeout_s: float) -> Reply:
        wait([future], timeout_s + GRACE_S)
        if not future.done():
            self.stuck = True
            return {"hung": self._where_it_is()}
        return future.result()

    def _where_it_is(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = traceback.extract_stack(frame) if frame else []
        outside = [f for f in stack if Path(f.filename) != Path(__file__) and "threading.py" not in f.filename]
        return f"it is in {_place(outside[0])}, {_place(outside[-1])}" if outside else "it did not say where"


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} ({frame.name})"


def _serve(jobs: queue.SimpleQueue) -> None:
    while (waiting := jobs.get()) is not None:
        job, future = waiting
        future.set_result(job())
        del job, future, waiting
