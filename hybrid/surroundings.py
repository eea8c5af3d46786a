"""What Ray needs of the machine and of the environment's variables, checked before it starts and without importing it.

Ray reports most of what is wrong here by ending without a word, or by giving up after half a minute.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hybrid.cuda_machine import SHARED_FOLDER, cuda_problems
from hybrid.environment import allocator_problems
from hybrid.errors import SurroundingsError
from hybrid.files import nearest_there

GIVEN = tuple(name for name in os.environ if name.startswith("RAY_"))
"""Variables of Ray that the user has set. Ray, once imported, sets some itself."""
SOCKET_BYTES = 107
"""Longest path of a socket; see unix(7)."""
SESSION = "/ray/session_2000-01-01_00-00-00_000000_{pid}/sockets/plasma_store.1"
"""Longest socket that Ray makes below its temporary folder."""
UNUSABLE = "'\"\\"
"""Ray puts the folder into command lines, and does not quote these."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Ray's store, if started here; on a laptop the default (30 % of RAM) is not free. The largest call of a step sends an id and four floats
a token, 20 bytes: 26 million tokens fit, such as 6500 samples of 4096. Of more, Ray writes to its temporary folder what has no room: the
call is slower, its numbers are the same."""
TEMP_BYTES = 64 * 2**20
"""Ray's logs of a long run."""
SHARED_BYTES = 32 * 2**20
"""What engines of several processes need of /dev/shm. A container often has 64 MiB."""
FILES = 65536
"""Open files of a process, as many as Ray asks for."""
IMPORT_TIMEOUT_S = 60
SETTING = re.compile(r"RAY_[a-z]\w*")
"""Settings of Ray's C++ part: a value of a wrong type ends the process that imports Ray, without a word."""


def check_surroundings(address: str | None, environ: Mapping[str, str] = os.environ, device: str = "cpu") -> None:
    """Raise `SurroundingsError` with all that keeps Ray from starting here or, with an `address`, from being joined; and, where it would
    start here on the `device` "cuda", with what CUDA lacks."""
    found = [*_hooks(environ), *_settings(environ), *(allocator_problems(environ) if device == "cuda" else ())]
    if address is None:
        folder = [*_temp_folder(environ)]
        found += [*folder, *_token(environ)]
        found += [] if folder else _room(environ)
        found += cuda_problems(environ) if device == "cuda" else _shared_memory()
    if found:
        raise SurroundingsError("\n".join(dict.fromkeys(found)))


def ray_cores(gpus: int, processes: int, cores: int) -> int:
    """What Ray is told of `cores`: it starts a process for each at once, so no more than the run has, and one for each bundle."""
    return max(gpus, min(cores, gpus * processes))


def raise_file_limit() -> None:
    """Processes started from here may open as many files as the hard limit allows; each of Ray's has connections to all others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def temp_folder(environ: Mapping[str, str] = os.environ) -> tuple[str | None, str]:
    """(variable that names it, folder) in which Ray makes its own; the variable is None where none is set."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        if name in environ:
            return name, environ[name]
    return None, "/tmp"


def _temp_folder(environ: Mapping[str, str]) -> Iterator[str]:
    name, folder = temp_folder(environ)
    said = f"{name}={folder}" if name else folder
    size, most = len(os.fsencode(folder)), SOCKET_BYTES - len(SESSION.format(pid=os.getpid()))
    if not os.path.isabs(folder):
        yield f"{said} is invalid: Ray needs an absolute path. Set {name} to one, or unset it (`unset {name}`)."
    elif size > most:
        yield (
            f"{name} is too long: set RAY_TMPDIR to a short path, such as /tmp. {said} has {size} bytes; Ray's sockets lie below it, "
            f"and their paths may have {SOCKET_BYTES}, which leaves {most}."
        )
    elif not folder.isascii() or any(c in UNUSABLE or not c.isprintable() for c in folder):
        yield (
            f"{said} is invalid: Ray cannot use a folder whose name has quotes or letters outside of ASCII. Set RAY_TMPDIR to a plain "
            "path, such as /tmp."
        )
    elif problem := _unwritable(Path(folder) / "ray"):
        yield (
            f"{said} is invalid: Ray cannot write to {folder}/ray ({problem}). Set RAY_TMPDIR to a folder that you may write to, with a "
            "short path."
        )


def _unwritable(folder: Path) -> str | None:
    """Why no file can be made in `folder`, or in a folder made there; None when it can. Tried, since rights do not tell all."""
    try:
        there = nearest_there(folder)
        if not there.is_dir():
            return f"{there} is a file"
        with tempfile.TemporaryDirectory(dir=there):
            return None
    except OSError as error:
        owner = _owner(there)
        return f"{error.strerror}{owner}"


def _owner(folder: Path) -> str:
    try:
        return "" if folder.stat().st_uid == os.getuid() else f"; {folder} belongs to {folder.owner()}"
    except (OSError, KeyError):
        return ""


def _token(environ: Mapping[str, str]) -> Iterator[str]:
    """Ray keeps the token of its clusters in the home folder, and makes one where there is none."""
    if environ.get("RAY_AUTH_MODE") == "disabled" or environ.get("RAY_AUTH_TOKEN"):
        return
    if file := environ.get("RAY_AUTH_TOKEN_PATH"):
        if not _has_text(Path(file)):
            yield (
                f"RAY_AUTH_TOKEN_PATH={file} is invalid: there is no token to read. Unset the variable, or write the token of the "
                "cluster there."
            )
        return
    try:
        home = Path.home()
    except RuntimeError:
        yield "HOME is not set, and this user has no home folder. Set HOME to a folder that you may write to."
        return
    if not _has_text(home / ".ray/auth_token") and (problem := _unwritable(home / ".ray")):
        yield (
            f"HOME={home} is invalid: Ray keeps its token in {home}/.ray and cannot write there ({problem}). Set HOME to a folder that "
            "you may write to."
        )


def _has_text(file: Path) -> bool:
    try:
        return bool(file.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):
        return False


def _shared_memory() -> Iterator[str]:
    free = _free_bytes(SHARED_FOLDER)
    if free < SHARED_BYTES:
        yield (
            f"{SHARED_FOLDER} has {free / 2**20:.0f} MiB free: processes need {SHARED_BYTES / 2**20:.0f} MiB to share. Remove what is "
            "left there, or give the container more (`docker run --shm-size=8g`)."
        )


def _room(environ: Mapping[str, str]) -> Iterator[str]:
    """Ray's object store lies in /dev/shm, or in the temporary folder where that is too small."""
    name, folder = temp_folder(environ)
    in_shared_memory = _free_bytes(SHARED_FOLDER) > OBJECT_STORE_BYTES
    needed = TEMP_BYTES + (0 if in_shared_memory else OBJECT_STORE_BYTES)
    free = _free_bytes(Path(folder))
    if free < needed:
        said = f"{name}={folder}" if name else folder
        yield (
            f"{said} has {free / 2**20:.0f} MiB free: Ray needs {needed / 2**20:.0f} MiB there. Make room, or set RAY_TMPDIR to a folder "
            "on another disk, with a short path."
        )


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(nearest_there(folder)).free
    except OSError:
        return 0


def _hooks(environ: Mapping[str, str]) -> Iterator[str]:
    if hook := environ.get("RAY_RUNTIME_ENV_HOOK"):
        module, _, name = hook.rpartition(".")
        try:
            getattr(importlib.import_module(module), name)
        except Exception as error:  # whatever a module raises when it is imported
            yield _unset("RAY_RUNTIME_ENV_HOOK", hook, f"it names no function that can be imported ({error})")
    if job := environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        try:
            json.loads(job)
        except ValueError as error:
            yield _unset("RAY_JOB_CONFIG_JSON_ENV_VAR", job, f"it is not JSON ({error})")


def _settings(environ: Mapping[str, str]) -> Iterator[str]:
    """Only a process that imports Ray can tell whether it takes a setting, so one is asked for each that is set."""
    if "ray" in sys.modules:
        return  # it took them
    names = [name for name in environ if SETTING.fullmatch(name)]
    others = {name: value for name, value in environ.items() if name not in names}
    if not names or _imports(dict(environ)):
        return
    refused = [name for name in names if not _imports(others | {name: environ[name]})]
    for name in refused:
        yield _unset(name, environ[name], "Ray cannot read it as a value of this setting")


def _imports(environ: dict[str, str]) -> bool:
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import ray"], env=environ, capture_output=True, timeout=IMPORT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return True  # a slow machine says nothing about the setting
    return done.returncode == 0


def _unset(name: str, value: str, why: str) -> str:
    return f"{name}={value} is invalid: {why}. Unset it (`unset {name}`), or correct it."
