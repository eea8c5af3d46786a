"""Named stretches of time in one process, for the timeline of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """`start_ns`: nanoseconds since the epoch, the clock that processes share. `thread`: the thread's name."""

    name: str
    start_ns: int
    duration_ns: int
    thread: str


class Spans:
    """Keeps what goes through `span` between `start` and `take`; costs next to nothing outside."""

    def __init__(self) -> None:
        self._done: list[Span] | None = None

    def start(self) -> None:
        """Keep spans from now on."""
        self._done = []

    def take(self) -> list[Span]:
        """Spans that ended since `start`, in the order in which they did; none are kept from now on."""
        done, self._done = self._done or [], None
        return done

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Keep the time that the body takes, also when it raises."""
        if self._done is None:
            yield
            return
        start_ns, since = time.time_ns(), time.perf_counter_ns()
        try:
            yield
        finally:
            if self._done is not None:
                took = time.perf_counter_ns() - since
                self._done.append(Span(name, start_ns, took, threading.current_thread().name))
