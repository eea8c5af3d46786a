"""What holds for all integration tests: nothing that they start leaves a file behind (N5)."""

from __future__ import annotations

import gc
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


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fails at the end of the session when a new file lies in the temporary folder, or one of /dev/shm that a process under this one had
    mapped. The folder is this session's own, as others may run on the machine too; its path is short, because Ray's sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))
    seen: set[Path] = set()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own folders stay where it keeps them
        patched.setenv("TMPDIR", str(folder))
        patched.setattr(tempfile, "tempdir", None)
        with _watching(seen):
            yield
    gc.collect()
    # Helper processes of tests that are killed leave multiprocessing's folder of sockets.
    files = [file for file in folder.iterdir() if not file.name.startswith("pymp-")]
    left = [*files, *(file for file in seen if file.exists())]
    shutil.rmtree(folder)
    assert not left, f"left behind: {', '.join(sorted(map(str, left)))}"


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
