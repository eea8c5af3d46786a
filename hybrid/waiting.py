"""Waits that say that they last, and that end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybrid.errors import HybridError

TELL_EVERY_S = 20.0
"""A silent terminal looks like a hang."""
GRACE_S = 15.0
"""For a call to come back after it was interrupted; calls into C++ may not."""


class Ticker:
    """Calls `say` with how long something has lasted, in seconds, every `every_s` until `stop`."""

    def __init__(self, say: Callable[[float], None], every_s: float = TELL_EVERY_S):
        self._say, self._every_s = say, every_s
        self._ended = threading.Event()
        self._since = time.monotonic()
        threading.Thread(target=self._run, name="ticker", daemon=True).start()

    def stop(self) -> None:
        """Say nothing any more. May be called twice."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self._say(time.monotonic() - self._since)


@contextmanager
def told(what: str, every_s: float = TELL_EVERY_S) -> Iterator[None]:
    """Print "`what` ... N s" to stderr now and then while the body lasts; stdout may be read by a program."""
    ticker = Ticker(lambda seconds: print(f"{what} ... {seconds:.0f} s", file=sys.stderr, flush=True), every_s)
    try:
        yield
    finally:
        ticker.stop()


class _Late(BaseException):
    """Ends a body that lasts too long."""


@contextmanager
def bounded(seconds: float, error: HybridError, grace_s: float = GRACE_S) -> Iterator[None]:
    """Raise `error` when the body lasts longer than `seconds`. A body that cannot be interrupted ends the process `grace_s` later, with
    the same message and status 1. In the main thread only; elsewhere nothing bounds the body."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over, main = threading.Event(), threading.main_thread().ident

    def interrupt(*_: object) -> None:
        raise _Late

    def watch() -> None:
        if over.wait(seconds):
            return
        signal.pthread_kill(main, signal.SIGALRM)
        if not over.wait(grace_s):
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    before = signal.signal(signal.SIGALRM, interrupt)
    threading.Thread(target=watch, name="bound", daemon=True).start()
    try:
        yield
    except _Late:
        raise error from None
    finally:
        over.set()
        signal.signal(signal.SIGALRM, before)
