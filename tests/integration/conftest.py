"""What holds for all integration tests: nothing that they start leaves a file behind (N5)."""

from __future__ import annotations

import gc
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import psutil
import pytest

from hybrid.leftovers import shared_files

LOOK_EVERY_S = 5.0
SHOWN = 12
"""Files of a folder that was left which the message lists."""


@pytest.fixture(scope="session", autouse=True)
def temp_folder() -> Iterator[Path]:
    """The session's own temporary folder, as others may use the machine too. Its path is short, because Ray's sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own folders stay where it keeps them
        patched.setenv("TMPDIR", str(folder))
        patched.setattr(tempfile, "tempdir", None)
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(temp_folder: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails after a module that leaves a new file in the temporary folder, or one of /dev/shm that a process under this one had mapped.
    Module fixtures of the tests have ended by then, as this one begins before them."""
    before, seen = set(temp_folder.iterdir()), set[Path]()
    with _watching(seen):
        yield
    gc.collect()
    # Helper processes of tests that are killed leave multiprocessing's folder of sockets.
    new = [file for file in temp_folder.iterdir() if file not in before and not file.name.startswith("pymp-")]
    left = sorted([*new, *(file for file in seen if file.exists())])
    shown = "\n".join(f"  {file}" for each in left for file in (each, *islice(each.rglob("*"), SHOWN)))
    assert not left, f"{request.path.name} left behind:\n{shown}"


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
