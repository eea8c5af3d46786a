"""Files of one JSON object per line that can be read at any moment, and after any crash."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid.errors import DataError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class JsonLines:
    """Appends whole lines to `path`; each is with the system when `append` returns. A line that a crash cut is removed first.

    While the disk is full, lines wait in memory and go with the next one: a record must not end the run that it is a record of.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(self._file, _whole_bytes(self._file))
        self.waiting = b""
        """What the disk has not taken yet."""

    def append(self, text: str) -> None:
        """Write one line; `text` is JSON without line breaks. Raises `OSError` for what is not a full disk.

        A lone surrogate, which UTF-8 has no bytes for, is written as JSON's escape of it.
        """
        self.waiting += text.encode(errors="backslashreplace") + b"\n"
        self._write()

    def close(self) -> None:
        try:
            self._write()
        finally:
            os.close(self._file)

    def _write(self) -> None:
        try:
            while self.waiting:
                self.waiting = self.waiting[os.write(self._file, self.waiting) :]
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise


def read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line; a last line that a crash cut is left out.

    Raises `DataError` with file and line for any other line that is not a JSON object, and for a file that cannot be read.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # Empty after a last line break; else a crash cut it.
                return
            raise DataError(
                f"{path}:{number} is not JSON: {error}. Remove the line, or make the file again."
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} must be a JSON object, not {type(row).__name__}.")
        yield number, row


def _whole_bytes(file: int, block: int = 1 << 16) -> int:
    """Size of the file up to and with its last line break."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - block)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
