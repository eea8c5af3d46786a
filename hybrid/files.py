"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def nearest_there(path: Path) -> Path:
    """`path`, or the nearest of its parents that exists: it lies on the disk on which `path` would be made."""
    return next(p for p in (path, *path.parents) if p.exists())


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Write `content` aside in the same folder, fsync, and rename over `path`; parents are made. Text is UTF-8; a lone surrogate, which
    UTF-8 has no bytes for, is escaped."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    fd, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
