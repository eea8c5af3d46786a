"""Which copy of this package runs: the workers of a run must run the driver's.

Ray puts the working directory of the driver first on the path of its workers, where a folder `hybrid/` would hide the package that the
command belongs to. So workers import the package before that (`hybrid.cluster.NODE_ENV`), take over the driver's path, and compare.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hybrid
from hybrid.errors import PlacementError


@dataclass(frozen=True)
class Package:
    """A copy of this package: its folder, what its files hold, and the path on which it and all else was found."""

    folder: str
    digest: str
    path: tuple[str, ...] = ()


def _look() -> Callable[[], tuple[str, str]]:
    def look() -> tuple[str, str]:
        """(folder, digest of all Python files) of the package `hybrid` that this process has, or would import; empty without one. Needs
        nothing of hybrid: Ray sends a nested function whole, and where it runs another copy may be in the way."""
        import hashlib
        from importlib.util import find_spec
        from pathlib import Path

        spec = find_spec("hybrid")
        if spec is None or not spec.submodule_search_locations:
            return "", ""
        folder = Path(next(iter(spec.submodule_search_locations))).resolve()
        content = hashlib.sha256()
        for file in sorted(folder.rglob("*.py")):
            content.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
        return str(folder), content.hexdigest()

    return look


look = _look()


def own_package() -> Package:
    """The copy that this process runs."""
    return Package(*look(), tuple(os.path.abspath(entry) for entry in sys.path))


def check_same(driver: Package, found: tuple[str, str], where: str) -> None:
    """Raise `PlacementError` unless what `look` found `where` is the driver's copy, or one with the same content."""
    folder, digest = found
    if driver.digest == digest:
        return
    held = f"import another copy of hybrid, {folder}" if folder else "find no package hybrid"
    raise PlacementError(
        f"hybrid: the processes on {where} {held}; this command runs {driver.folder}. Start the command from another working directory, "
        "install the same version on every node, and start Ray there with `bash launch/ray_node.sh`."
    )


def take_over_path(driver: Package) -> None:
    """Order this process's path as the driver's. Entries that only this process has come after it, but for the working directory, which Ray
    added."""
    entries = [entry for entry in driver.path if os.path.exists(entry)]
    sys.path[:] = merged_path(entries, sys.path, os.getcwd())


def merged_path(driver: Sequence[str], own: Sequence[str], added: str) -> list[str]:
    """`driver`, then what is in `own` besides; `added` only where the driver has it."""
    return list(dict.fromkeys([*driver, *(entry for entry in own if entry and entry != added)]))


@contextmanager
def own_package_found() -> Iterator[None]:
    """Processes started inside find this copy first, also where it is in no folder for installed packages."""
    root, before = str(Path(hybrid.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    if root not in installed:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before
