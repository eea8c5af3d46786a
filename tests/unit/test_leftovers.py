"""N5: nothing stays in temporary folders or in shared memory, whoever was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from hybrid import leftovers
from hybrid.leftovers import (
    clear_abandoned,
    clear_session,
    failed_start,
    family,
    keep_caches,
    make_temp_folder,
    own,
    remove,
    shared_files,
    temporary_files_in,
    use_temp_folder,
)
from hybrid.surroundings import temp_folder

SHARES = """
import os, sys, time
from multiprocessing import resource_tracker, shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(block._name, "shared_memory")  # as where the tracker is killed too
block.buf[0] = 1
print(block.name, flush=True)
time.sleep(100)
"""


@pytest.fixture
def sharing(tmp_path):
    """A process with a block of shared memory, its log, and the block's file."""
    child = subprocess.Popen([sys.executable, "-c", SHARES], stdout=subprocess.PIPE, text=True)
    file = Path("/dev/shm") / child.stdout.readline().strip()
    log = tmp_path / "rollout-0.log"
    log.write_text(f"pid {child.pid}\nmore\n")
    yield child, log, file
    child.kill()
    child.wait()
    file.unlink(missing_ok=True)


def test_n5_shared_memory_of_a_killed_process_goes(sharing, tmp_path):
    child, log, file = sharing
    temp = tmp_path / "temp"
    (temp / "below").mkdir(parents=True)
    (temp / "vllm_dist_1").write_text("")
    processes = family([log, tmp_path / "none.log"])
    assert processes[0].pid == child.pid, "Python's tracker of its shared memory comes after it"
    files = shared_files(processes)
    assert files == {file}
    remove(processes, files, temp)
    assert not file.exists() and not temp.exists()
    remove(processes, files, temp)  # twice is no error


def test_n5_what_somebody_else_maps_stays(sharing):
    _, _, file = sharing
    remove([], {file}, None)
    assert file.exists()


def test_files_without_a_name_are_nobodys(sharing):
    _, log, file = sharing
    file.unlink()
    assert shared_files(family([log])) == set()
    assert shared_files([psutil.Process()]) == set()


@pytest.mark.parametrize("first", ["", "pid\n", "pid x\n", "pid 999999999\n"])
def test_a_log_that_names_no_process_is_passed_over(tmp_path, first):
    (tmp_path / "a.log").write_text(first)
    assert family([tmp_path / "a.log"]) == []


def test_n5_processes_keep_temporary_files_in_the_runs_folder(tmp_path, monkeypatch):
    for name in ("TMPDIR", "VLLM_RPC_BASE_PATH"):
        monkeypatch.setenv(name, "/before")
    monkeypatch.setattr(tempfile, "tempdir", "/before")
    use_temp_folder(str(tmp_path / "not" / "there"))
    assert tempfile.gettempdir() == os.environ["VLLM_RPC_BASE_PATH"] == str(tmp_path / "not" / "there")
    use_temp_folder("/proc/none")
    assert os.environ["TMPDIR"] == str(tmp_path / "not" / "there"), "what cannot be made is not used"


def test_n5_torch_keeps_its_cache_out_of_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/as/the/user/said")
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "1")
    keep_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/as/the/user/said"
    assert os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "1"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS")
    keep_caches()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "hybrid/torchinductor")
    assert os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0", (
        "that cache is always in the temporary folder"
    )
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    keep_caches()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_the_runs_folder_is_where_rays_is(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    made = [make_temp_folder()]
    monkeypatch.setenv("RAY_TMPDIR", "/proc/none")
    made.append(make_temp_folder())
    for folder in made:
        remove([], set(), folder)
    assert [folder.parent for folder in made] == [tmp_path, Path("/tmp")]


def session(folder: Path, name: str = "session_1") -> Path:
    made = folder / "ray" / name
    (made / "logs").mkdir(parents=True)
    (made / "logs/raylet.out").write_text("[2026 I 1] fine\n[2026 E 1] raylet.cc: broken\n")
    (made / "logs/raylet.err").write_text("")
    for link, target in (("session_latest", made), ("prom_metrics_service_discovery.json", made / "addresses.json")):
        (folder / "ray" / link).unlink(missing_ok=True)
        (folder / "ray" / link).symlink_to(target)
    (made / "addresses.json").write_text("[]")
    return made


def test_n5_the_folder_of_our_ray_goes_and_its_logs_stay_where_a_run_failed(tmp_path):
    clear_session(session(tmp_path), None)
    assert list(tmp_path.iterdir()) == []
    made = session(tmp_path)
    (made / "logs/large.log").write_bytes(b"x" * (leftovers.LOG_BYTES + 1))
    clear_session(made, tmp_path / "run/logs")
    assert not (tmp_path / "ray").exists()
    assert sorted(f.name for f in (tmp_path / "run/logs/ray").iterdir()) == ["raylet.err", "raylet.out"]


def test_n5_sessions_of_others_stay(tmp_path):
    other, ours = session(tmp_path, "session_other"), session(tmp_path)
    clear_session(ours, None)
    assert other.exists() and not (tmp_path / "ray/session_latest").is_symlink()


def test_a_failed_start_says_what_ray_logged_last(tmp_path):
    made = session(tmp_path, f"session_2026-12-01_01-22-34_222248_{os.getpid()}")
    other = session(tmp_path, f"session_2026-12-01_01-22-34_222248_{os.getpid()}0")
    assert failed_start(tmp_path / "ray", made.stat().st_ctime + 100) == [], "an earlier one of this process number"
    said = failed_start(tmp_path / "ray", made.stat().st_ctime)
    assert said == ["Last lines of Ray's raylet.out:", "  [2026 E 1] raylet.cc: broken"]
    assert not made.exists() and other.exists()
    assert failed_start(tmp_path / "none", 0.0) == []


OWNS = """
import sys, time
from pathlib import Path
from hybrid.leftovers import make_temp_folder, own
own(Path(sys.argv[1]))
print(make_temp_folder(), flush=True)
time.sleep(100)
"""


def test_n5_the_next_start_removes_the_folders_of_a_killed_run_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    sessions = [tmp_path / "ray" / f"session_2026_{name}" for name in ("killed", "ours", "theirs")]
    for session in sessions:
        (session / "logs").mkdir(parents=True)
    (tmp_path / "hybrid-of-somebody").mkdir()
    own(sessions[1])
    ours = make_temp_folder()
    run = subprocess.Popen([sys.executable, "-c", OWNS, str(sessions[0])], stdout=subprocess.PIPE, text=True)
    folder = Path(run.stdout.readline().strip())
    assert clear_abandoned() == [], "it lives"
    run.kill()
    run.wait()
    assert sorted(clear_abandoned()) == sorted([folder, sessions[0]])
    assert not folder.exists() and not sessions[0].exists()
    assert (
        ours.exists() and sessions[1].exists() and sessions[2].exists() and (tmp_path / "hybrid-of-somebody").exists()
    )
    remove([], set(), ours)
    clear_session(sessions[1], None)
    assert not ours.exists() and not sessions[1].exists() and leftovers._owned == {}


@pytest.mark.parametrize("before", [{}, {"TMPDIR": "/dev/shm"}, {"RAY_TMPDIR": "/var/tmp", "TMPDIR": "/dev/shm"}])
def test_n5_processes_of_ray_have_a_temporary_folder_that_goes_and_ray_stays_where_it_was(
    monkeypatch, tmp_path, before
):
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    own, rays = tempfile.gettempdir(), temp_folder()[1]
    code = "import tempfile; print(tempfile.gettempdir())"
    with temporary_files_in(tmp_path):
        made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        assert (made, tempfile.gettempdir(), temp_folder()[1]) == (str(tmp_path), own, rays)
    assert {name: os.environ[name] for name in ("TMPDIR", "RAY_TMPDIR") if name in os.environ} == before
