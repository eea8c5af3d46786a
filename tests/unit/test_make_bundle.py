"""The archive for machines that reach no package index."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest

from launch import make_bundle

PIP = """
import pathlib, sys
assert sys.argv[1] == "install" and sys.argv[sys.argv.index("--python-version") + 1] == "3.12" and "--no-deps" in sys.argv
folder = pathlib.Path(sys.argv[sys.argv.index("--target") + 1])
folder.mkdir(parents=True)
(folder / "packages").write_text("\\n".join(sys.argv[-14:]))
"""


@pytest.fixture
def packages(tmp_path, monkeypatch) -> Path:
    """Small stand-ins for the two packages that are copied."""
    for name in ("hybrid", "deepspeed"):
        (tmp_path / "site" / name / "__pycache__").mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("")
        (tmp_path / "site" / name / "__pycache__" / "x.pyc").write_text("")
    monkeypatch.setattr(make_bundle, "package_folder", lambda name: tmp_path / "site" / name)
    return tmp_path


def pip(folder: Path, program: str) -> tuple[str, ...]:
    (folder / "pip.py").write_text(program)
    return sys.executable, str(folder / "pip.py")


def test_it_holds_both_packages_and_what_pip_brings(packages):
    file = packages / "out" / "bundle.tar.gz"
    size = make_bundle.make_bundle(file, "3.12", pip(packages, PIP))
    assert size == file.stat().st_size and [path.name for path in file.parent.iterdir()] == [file.name]
    with tarfile.open(file) as archive:
        names = archive.getnames()
        brought = archive.extractfile("packages").read().decode().splitlines()
    assert {"hybrid/__init__.py", "deepspeed/__init__.py", "packages"} <= set(names)
    assert not any("__pycache__" in name for name in names)
    assert [each.partition("==")[0] for each in brought] == list(make_bundle.NEEDED)


def test_what_keeps_it_from_being_made_is_named(packages, monkeypatch):
    file = packages / "bundle.tar.gz"
    with pytest.raises(SystemExit, match="pip failed: no wheel of numpy"):
        make_bundle.make_bundle(file, "3.12", pip(packages, "import sys; sys.exit('no wheel of numpy')"))
    monkeypatch.setattr(make_bundle, "MOST_BYTES", 10)
    with pytest.raises(SystemExit, match="the archive has"):
        make_bundle.make_bundle(file, "3.12", pip(packages, PIP))
    assert not file.exists()


def test_packages_of_this_environment_are_found():
    assert (make_bundle.package_folder("hybrid") / "doctor" / "__main__.py").is_file()
    assert (make_bundle.package_folder("deepspeed") / "runtime").is_dir()
