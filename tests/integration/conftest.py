"""What holds for all integration tests: nothing that they start leaves a file behind (N5)."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hybrid.leftovers import shared_files

LOOK_EVERY_S = 5.0
OURS = ("pytest-of-",)
"""Beginnings of the names of what pytest itself keeps."""


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails at the end of the session when a new file lies in the temporary folder, or one of /dev/shm that a process under this one had
    mapped. The folder is this session's own, as others may run on the machine too; its path is short, because Ray's sockets lie in it."""
    before = os.environ.get("TMPDIR")
    folder = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    seen: set[Path] = set()
    try:
        with _watching(seen):
            yield
        gc.collect()
        left = [f for f in folder.iterdir() if not f.name.startswith(OURS)] + [f for f in seen if f.exists()]
        assert not left, f"left behind: {', '.join(sorted(map(str, left)))}"
    finally:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        if not any(folder.glob("pytest-of-*")):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _watching(seen: set[Path]) -> Iterator[None]:
    """Add to `seen` what processes under this one map of /dev/shm, now and then."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_EVERY_S):
            seen.update(shared_files(psutil.Process().children(recursive=True)))

    watcher = threading.Thread(target=look, name="leftovers", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
