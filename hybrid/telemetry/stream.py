"""Writing to a terminal or pipe that may go away: the run goes on, and says nothing more."""

from __future__ import annotations

import os
import sys
from typing import TextIO


class QuietStream:
    """`stream`, which may be None, closed, a broken pipe or unable to show a character: writing to this never raises.

    A run of many hours must not end because `head` closed its pipe or a terminal was disconnected.
    """

    def __init__(self, stream: TextIO | None):
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self.write(text.encode(self.encoding, errors="backslashreplace").decode(self.encoding))
            except (OSError, ValueError):  # ValueError: it was closed.
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:
            return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("no stream")
        return self._stream.fileno()

    def _give_up(self) -> None:
        """Python flushes stdout and stderr once more at exit and would complain: give them a place to go."""
        stream, self._stream = self._stream, None
        if stream in (sys.__stdout__, sys.__stderr__) and not stream.closed:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)
