"""Find and remove the files of a run in temporary folders and in shared memory.

Processes of a run that are killed cannot remove what they made. So each has a temporary folder of the run (`TMPDIR`), and what it mapped
of /dev/shm is noted while it lives and removed when nobody maps it any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from hybrid.surroundings import SHARED_FOLDER, temp_folder

GRACE_S, END_S = 1.0, 5.0
"""For processes to be gone after Ray has killed those at the top, and after all have been killed."""
LOG_LINES = 8
LOG_BYTES = 16 * 2**20
"""A larger log of Ray is not copied."""
OWNER = "hybrid-owner"
"""A file in each folder of a run that its driver keeps locked while it lives; the kernel ends the lock however the driver ends."""
FAILED_LOGS = ("raylet.err", "gcs_server.err", "raylet.out", "gcs_server.out", "dashboard.err")

_owned: dict[Path, int] = {}
"""Folders that this process has marked, and the descriptors that hold their locks."""


def make_temp_folder() -> Path:
    """A new folder for the processes of a run: below Ray's, whose path is short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="hybrid-", dir=existing(temp_folder()[1])))
    own(folder)
    return folder


def own(folder: Path) -> None:
    """Mark `folder` as this process's, until it ends or `folder` is removed: `clear_abandoned` of others leaves it alone."""
    with suppress(OSError):
        fd, aside = tempfile.mkstemp(dir=folder)  # locked before it has the name by which it is found
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.rename(aside, folder / OWNER)
        _owned[folder] = fd


def disown(folder: Path) -> None:
    """Let go of the mark of a folder that is being removed."""
    if (fd := _owned.pop(folder, None)) is not None:
        os.close(fd)


def clear_abandoned() -> list[Path]:
    """Remove the folders of this user's runs whose drivers were killed, and of the Rays that these had started; returns them."""
    parent = Path(existing(temp_folder()[1]))
    removed = []
    for mark in [*parent.glob(f"hybrid-*/{OWNER}"), *parent.glob(f"ray/session_*/{OWNER}")]:
        folder = mark.parent
        if folder.is_symlink() or not _is_abandoned(mark):
            continue
        if folder.parent == parent:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            clear_session(folder, None)
        removed.append(folder)
    return removed


def _is_abandoned(mark: Path) -> bool:
    """Whether nobody holds the lock of `mark`, which is this user's."""
    try:
        with mark.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return mark.parent.stat().st_uid == os.getuid()
    except OSError:
        return False


def existing(folder: str) -> str:
    """`folder`, or /tmp where that is not a writable folder, which matters only when Ray itself runs elsewhere."""
    return folder if os.path.isabs(folder) and os.access(folder, os.W_OK) else "/tmp"


def use_temp_folder(folder: str) -> None:
    """Let this process and its children keep their temporary files in `folder`, on a node where that can be made."""
    with suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = folder
        tempfile.tempdir = None  # it remembers the first answer


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Processes that start meanwhile keep their temporary files in `folder`. Ray's own folder stays where it would be.

    Ray kills its dashboard, which then leaves the folder of a socket.
    """
    tempfile.gettempdir()  # this process remembers its own from here on
    before = {name: os.environ.get(name) for name in ("TMPDIR", "RAY_TMPDIR")}
    os.environ |= {"TMPDIR": str(folder), "RAY_TMPDIR": temp_folder()[1]}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def keep_caches() -> None:
    """Let torch keep compiled code where other caches are: when it is imported it makes a folder, else in the temporary one.

    It compiles its own header into the temporary folder whatever it is told. Each run has a new one, and each process would spend six
    seconds of a core on it, also where the cache has all kernels: so that is turned off.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "hybrid" / "torchinductor"
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
        os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")


def family(log_files: Iterable[Path]) -> list[psutil.Process]:
    """The processes of this node whose number is the first line of a log, as `hybrid.process` writes it, and all below them."""
    found = []
    for file in log_files:
        with suppress(OSError, ValueError), file.open(encoding="utf-8") as lines:
            found += tree(int(lines.readline().removeprefix("pid ")))
    return found


def tree(pid: int) -> list[psutil.Process]:
    """Process `pid` and all below it; empty when it is gone."""
    with suppress(psutil.Error, OverflowError):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def shared_files(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files of /dev/shm that any of `processes` maps, and that have a name still."""
    found = set()
    for process in processes:
        with suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines():
                _, here, name = line.partition(f"{SHARED_FOLDER}/")
                if here and not name.endswith(" (deleted)"):
                    found.add(SHARED_FOLDER / name)
    return found


def remove(processes: list[psutil.Process], files: set[Path], folder: Path | None) -> None:
    """End `processes`, whose roots have been killed, then remove `folder` and those of their shared `files` that nobody maps. Ray ends what
    its workers started only some time after them."""
    _, alive = psutil.wait_procs(processes, timeout=GRACE_S)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=END_S)
    there = {file for file in files if file.exists()}
    if there:
        for file in there - shared_files(psutil.process_iter()):
            with suppress(OSError):
                file.unlink()
    if folder is not None:
        disown(folder)
        shutil.rmtree(folder, ignore_errors=True)


def clear_folder(folder: Path) -> None:
    """Remove a folder of ours whose last processes may still write to it."""
    disown(folder)
    deadline = time.monotonic() + END_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1 if folder.exists() else 0)


def clear_session(session: Path, logs: Path | None) -> None:
    """Remove the folder of a Ray that has ended, and the links to it. Its logs are copied to `logs`/ray first, where that is given."""
    if logs is not None:
        with suppress(OSError, shutil.Error):
            shutil.copytree(session / "logs", logs / "ray", ignore=_too_large, dirs_exist_ok=True)
    clear_folder(session)
    with suppress(OSError):
        for link in session.parent.iterdir():  # session_latest, and the dashboard's list of addresses for Prometheus
            if link.is_symlink() and not link.exists():
                link.unlink(missing_ok=True)
        session.parent.rmdir()  # only an empty one goes


def _too_large(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if _size(Path(folder) / name) > LOG_BYTES]


def _size(file: Path) -> int:
    try:
        return 0 if file.is_dir() else file.stat().st_size
    except OSError:
        return LOG_BYTES + 1


def failed_start(folder: Path, began: float) -> list[str]:
    """Remove sessions that a start of Ray by this process left in `folder` since `began` (seconds of the clock); returns what they logged
    last."""
    said: list[str] = []
    for session in folder.glob(f"session_*_{os.getpid()}"):
        with suppress(OSError):
            if session.stat().st_ctime >= began - 1:
                said += _last_words(session / "logs")
                clear_session(session, None)
    return said


def _last_words(logs: Path) -> list[str]:
    for name in FAILED_LOGS:
        with suppress(OSError):
            lines = [
                line
                for line in (logs / name).read_text(encoding="utf-8", errors="replace").splitlines()
                if line.strip()
            ]
            worst = [line for line in lines if " E " in line or " C " in line or "rror" in line] or lines
            if name.endswith(".out") and worst is lines:
                continue
            if worst:
                return [f"Last lines of Ray's {name}:", *(f"  {line[:300]}" for line in worst[-LOG_LINES:])]
    return []
