"""Pack what `python -m hybrid.doctor core` needs beside Python and torch, for a machine that reaches no package index.

    python launch/make_bundle.py hybrid-doctor.tar.gz --python 3.12

There: mkdir doctor && tar xzf hybrid-doctor.tar.gz -C doctor && PYTHONPATH=doctor python -m hybrid.doctor core
DeepSpeed and hybrid are taken from this environment, as both are of Python alone; the rest is fetched by pip for that Python.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

NEEDED = (
    "annotated-types", "einops", "hjson", "msgpack", "numpy", "packaging", "psutil", "py-cpuinfo", "pydantic", "pydantic-core",
    "pyyaml", "tqdm", "typing-extensions", "typing-inspection",
)  # fmt: skip
"""What DeepSpeed and hybrid import, where torch brings it not."""
MOST_BYTES = 64 * 2**20
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "tests", "csrc")


def make_bundle(file: Path, python: str, pip: tuple[str, ...] = (sys.executable, "-m", "pip")) -> int:
    """Write the archive whole and return its bytes. Raises `SystemExit` with the reason where pip fails or the archive is too large."""
    with tempfile.TemporaryDirectory(prefix="hybrid-bundle-") as scratch:
        folder = Path(scratch) / "bundle"
        pinned = [f"{name}=={metadata.version(name)}" for name in NEEDED]
        options = ("--no-deps", "--only-binary=:all:", "--python-version", python, "--no-compile", "--quiet")
        done = subprocess.run(
            [*pip, "install", "--target", str(folder), *options, *pinned],
            capture_output=True,
            text=True,
            encoding="utf-8",
        )
        if done.returncode != 0:
            sys.exit(f"make_bundle: pip failed: {done.stderr.strip().splitlines()[-1]}. Correct it and call again.")
        for name in ("hybrid", "deepspeed"):
            _copy_package(name, folder)
        aside = Path(scratch) / "bundle.tar.gz"
        with tarfile.open(aside, "w:gz") as archive:
            for entry in sorted(folder.iterdir()):
                archive.add(entry, arcname=entry.name)
        size = aside.stat().st_size
        if size > MOST_BYTES:
            sys.exit(
                f"make_bundle: the archive has {size / 2**20:.0f} MiB, {MOST_BYTES / 2**20:.0f} are allowed. Pack less."
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(aside, file.with_name(f".{file.name}"))
        file.with_name(f".{file.name}").replace(file)
    return size


def package_folder(name: str) -> Path:
    return Path(find_spec(name).origin).parent


def _copy_package(name: str, folder: Path) -> None:
    """A package of this environment without what only its tests or builds need; and its metadata, where it is installed from a file."""
    source = package_folder(name)
    shutil.copytree(source, folder / name, ignore=LEFT_OUT)
    info = source.parent / f"{name}-{metadata.version(name)}.dist-info"
    if info.is_dir():
        shutil.copytree(info, folder / info.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="version there")
    given = parser.parse_args()
    size = make_bundle(given.file, given.python)
    print(f"{given.file}: {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
