"""C49: workers run the driver's copy of the package, or the run is refused."""

from __future__ import annotations

import marshal
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hybrid
from hybrid.errors import PlacementError
from hybrid.package import Package, check_same, look, merged_path, own_package, own_package_found

FOLDER = Path(hybrid.__file__).resolve().parent


def copy(folder: Path, change: bool) -> Path:
    made = folder / "hybrid"
    shutil.copytree(FOLDER, made, ignore=shutil.ignore_patterns("__pycache__"))
    if change:
        (made / "process.py").write_text("raise SystemExit('the copy ran')\n")
    return made


def test_c49_a_changed_copy_is_refused_with_both_paths(tmp_path):
    made = copy(tmp_path, change=True)
    found = looked_from(tmp_path)
    assert found[0] == str(made)
    with pytest.raises(PlacementError) as error:
        check_same(own_package(), found, "node 10.0.0.1")
    assert str(made) in str(error.value) and str(FOLDER) in str(error.value) and "10.0.0.1" in str(error.value)


def test_c49_the_same_content_elsewhere_is_the_same_package(tmp_path):
    copy(tmp_path, change=False)
    found = looked_from(tmp_path)
    assert found[0] != str(FOLDER)
    check_same(own_package(), found, "another node")


def test_c49_a_node_without_the_package_is_refused():
    with pytest.raises(PlacementError, match="find no package hybrid"):
        check_same(own_package(), ("", ""), "node 10.0.0.1")


def looked_from(folder: Path) -> tuple[str, str]:
    """What `look`, sent as its code alone, finds in a process whose path begins with `folder`: as a task of Ray."""
    code = (
        "import marshal, sys, types; code = marshal.loads(sys.stdin.buffer.read()); "
        "print(*types.FunctionType(code, {'__builtins__': __builtins__})(), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=marshal.dumps(look.__code__), capture_output=True, cwd=folder, check=True
    )
    found, digest = done.stdout.decode().split("\n")[:2]
    return found, digest


def test_c49_the_working_directory_comes_only_where_the_driver_has_it():
    ours, theirs = ["/bin", "/site"], ["/work", "/bin", "/ray/thirdparty", "/site", ""]
    assert merged_path(ours, theirs, "/work") == ["/bin", "/site", "/ray/thirdparty"]
    assert merged_path(["/work", *ours], theirs, "/work") == ["/work", "/bin", "/site", "/ray/thirdparty"]


def test_c49_processes_started_by_ray_find_this_copy(tmp_path, monkeypatch):
    copy(tmp_path, change=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with own_package_found():
        done = subprocess.run(
            [sys.executable, "-c", "import hybrid; print(hybrid.__file__)"],
            capture_output=True, text=True, cwd="/",
        )  # fmt: skip
    assert Path(done.stdout.strip()).resolve() == FOLDER / "__init__.py", done.stderr
    assert os.environ["PYTHONPATH"] == str(tmp_path)


def test_a_package_goes_to_workers_whole():
    package = own_package()
    assert package.folder == str(FOLDER) and len(package.digest) == 64
    assert all(os.path.isabs(entry) for entry in package.path)
    assert pickle.loads(pickle.dumps(package)) == package
    assert look() == (package.folder, package.digest)
    assert Package("", "").path == ()
