"""Limits that control groups put on this process: memory and CPU time, of version 1 and 2, nested or not.

A limit of any group above counts too, so the smallest one holds. `/proc/self/cgroup` names this process's group in each hierarchy;
`/proc/self/mountinfo` says where the hierarchy is seen, and which of its groups is at that place (a container often sees its own group at
the top). Files that are missing, empty or of another form set no limit.
Source: https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
USUAL_PLACE = PurePosixPath("/sys/fs/cgroup")
NO_LIMIT = 2**60
"""Version 1 writes its largest number, about 2**63, where there is no limit."""
LEAST_BYTES = 2**20
"""A smaller limit is not one that this process lives under: the file holds something else."""


@dataclass(frozen=True)
class Mount:
    """A hierarchy of groups: where it is seen, which group is seen there, and its controllers (empty for version 2)."""

    place: PurePosixPath
    top: PurePosixPath
    controllers: frozenset[str]


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes of memory that this process's groups may hold; None without a limit. `root`: where /proc and /sys are."""
    limits = [_number(folder / name) for folder in _groups(root, None) for name in ("memory.max", "memory.high")]
    for folder in _groups(root, "memory"):
        limits.append(_number(folder / "memory.limit_in_bytes"))
        limits.append(_hierarchical(folder / "memory.stat"))
    return min((n for n in limits if n is not None and LEAST_BYTES <= n < NO_LIMIT), default=None)


def cpu_limit(root: Path = ROOT) -> float | None:
    """Cores' worth of time that this process's groups may use; None without a limit."""
    limits = [_share(_read(folder / "cpu.max").split()) for folder in _groups(root, None)]
    for folder in _groups(root, "cpu"):
        limits.append(_share([_read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]))
    return min((n for n in limits if n is not None), default=None)


def process_limit(root: Path = ROOT) -> int | None:
    """Processes and threads that this process's groups may have; None without a limit."""
    folders = [*_groups(root, None), *_groups(root, "pids")]
    return min((n for n in (_number(folder / "pids.max") for folder in folders) if n is not None), default=None)


def _groups(root: Path, controller: str | None) -> Iterator[Path]:
    """Folders of this process's group and of all above it that are seen here; `controller` None is version 2's hierarchy."""
    own = _own_group(root, controller)
    for mount in _mounts(root):
        if (controller is None) != (not mount.controllers) or (controller and controller not in mount.controllers):
            continue
        for group in _upwards(own, mount.top):
            yield root / mount.place.relative_to("/") / group


def _own_group(root: Path, controller: str | None) -> PurePosixPath:
    """Lines of /proc/self/cgroup are `number:controllers:group`, the controllers separated by commas and empty for version 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, found, group = rest.partition(":")
        if found and group.startswith("/") and (controller or "") in controllers.split(","):
            return PurePosixPath(group.removesuffix(" (deleted)"))
    return PurePosixPath("/")


def _upwards(own: PurePosixPath, top: PurePosixPath) -> Iterable[PurePosixPath]:
    """`own` and all above it, relative to what is seen at the mount's place. A group that lies outside of it, as container engines
    arrange, is taken to be the one at the place; and its own path is tried, since some see the whole hierarchy after all."""
    paths = [own.relative_to(top)] if own.is_relative_to(top) else []
    if own != PurePosixPath("/"):
        paths.append(own.relative_to("/"))
    clean = [path for path in paths if ".." not in path.parts]
    return dict.fromkeys(group for path in [*clean, PurePosixPath()] for group in (path, *path.parents))


def _mounts(root: Path) -> list[Mount]:
    found = list(_read_mounts(root))
    if found:
        return found
    version_1 = [Mount(USUAL_PLACE / name, PurePosixPath("/"), frozenset([name])) for name in ("memory", "cpu", "pids")]
    return [Mount(USUAL_PLACE, PurePosixPath("/"), frozenset()), *version_1]


def _read_mounts(root: Path) -> Iterator[Mount]:
    """Parts of a mountinfo line: `id parent device top place options ... - type source options`, with octal escapes; see proc(5)."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        top, place = (PurePosixPath(_unescaped(text)) for text in fields[3:5])
        if place.is_absolute() and top.is_absolute():
            controllers = frozenset() if kind[0] == "cgroup2" else frozenset(kind[2].split(","))
            yield Mount(place, top, controllers)


def _unescaped(text: str) -> str:
    octal: Callable[[re.Match], str] = lambda m: chr(int(m[1], 8))  # noqa: E731
    return re.sub(r"\\([0-7]{3})", octal, text)


def _hierarchical(stat: Path) -> int | None:
    """Version 1's own answer for all groups above, also of those that are not seen here."""
    for line in _read(stat).splitlines():
        name, _, value = line.partition(" ")
        if name == "hierarchical_memory_limit":
            return _whole(value)
    return None


def _share(quota_and_period: list[str]) -> float | None:
    numbers = [_whole(text) for text in quota_and_period]
    if len(numbers) != 2 or None in numbers or 0 in numbers:
        return None
    return numbers[0] / numbers[1]


def _number(file: Path) -> int | None:
    return _whole(_read(file))


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return ""
