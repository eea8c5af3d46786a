"""C43, C44, C47: what keeps Ray from starting is named with its cure, before Ray is imported."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from hybrid import surroundings
from hybrid.config import machine
from hybrid.errors import ConfigError, SurroundingsError
from hybrid.rollout.requests import EngineOptions
from hybrid.rollout.vllm_setup import environment, foreign_variables
from hybrid.surroundings import check_surroundings, ray_cores, temp_folder

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.fixture
def short():
    """A folder whose path leaves room for Ray's sockets; pytest's own may not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def problem(short, monkeypatch):
    """What is said of these variables in a home that Ray can use, with room everywhere."""
    monkeypatch.setenv("HOME", str(short))
    room(monkeypatch)

    def check(address: str | None = None, **environ: str) -> str:
        try:
            check_surroundings(address, {"PATH": os.environ["PATH"], **environ})
        except SurroundingsError as error:
            return str(error)
        return ""

    return check


def room(monkeypatch, free: int = 100 * GIB, shared: int = 100 * GIB) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage(0, 0, shared if str(path).startswith("/dev/shm") else free)
    )


def test_sound_surroundings_are_let_through(problem, short):
    assert problem() == ""
    assert problem(TMPDIR=str(short)) == ""
    assert problem(TMPDIR=f"{short}/with blank/not there") == ""
    assert problem(TMPDIR="/" + "x" * 90, RAY_TMPDIR=str(short)) == "", "RAY_TMPDIR counts before TMPDIR"
    assert problem(RAY_RUNTIME_ENV_HOOK="os.path.join") == ""


def test_c44_a_long_tmpdir_is_too_long(problem):
    for name in ("TMPDIR", "RAY_TMPDIR"):
        said = problem(**{name: "/tmp/" + "x" * 85})
        assert said.startswith(f"{name} is too long: set RAY_TMPDIR to a short path")
        assert "90 bytes" in said and "cores" not in said


def test_c44_length_is_counted_in_bytes_up_to_the_last_that_fits(problem, short):
    most = surroundings.SOCKET_BYTES - len(surroundings.SESSION.format(pid=os.getpid()))
    fits = str(short).ljust(most, "x") if len(str(short)) < most else str(short)
    assert problem(TMPDIR=fits) == ""
    assert "too long" in problem(TMPDIR=fits + "x")
    assert "too long" in problem(TMPDIR="/tmp/" + "ü" * (most // 2))


@pytest.mark.parametrize("name", ["ümläut", "日本", "it's", 'a"b', "a\\b", "new\nline"])
def test_c44_names_that_ray_cannot_use(problem, name):
    said = problem(TMPDIR=f"/tmp/{name}")
    assert said.startswith(f"TMPDIR=/tmp/{name} is invalid") and "Set RAY_TMPDIR to a plain path" in said


@pytest.mark.parametrize("folder", ["", "relative", "./x"])
def test_c44_a_folder_must_be_absolute(problem, folder):
    assert f"TMPDIR={folder} is invalid: Ray needs an absolute path" in problem(TMPDIR=folder)


def test_c44_a_folder_that_cannot_be_written_is_named_with_the_reason(problem, short):
    (short / "file").write_text("")
    assert f"{short}/file is a file" in problem(TMPDIR=f"{short}/file")
    assert "TMPDIR=/proc/none is invalid: Ray cannot write" in problem(TMPDIR="/proc/none")


@pytest.mark.skipif(os.getuid() == 0 and shutil.which("setpriv") is None, reason="root may write anywhere")
def test_c44_a_ray_folder_of_somebody_else(short):
    (short / "ray").mkdir()
    (short / "ray").chmod(0o555)
    short.chmod(0o755)
    other = ["setpriv", "--reuid", "12345", "--clear-groups", "--inh-caps=-all"] if os.getuid() == 0 else []
    code = "from hybrid.surroundings import check_surroundings; check_surroundings(None)"
    environ = {"RAY_TMPDIR": str(short), "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT), "HOME": "/"}
    done = subprocess.run([*other, sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    if "No module named" in done.stderr or "can't open" in done.stderr or "setpriv" in done.stderr:
        pytest.skip("another user cannot run Python here")
    assert f"RAY_TMPDIR={short} is invalid: Ray cannot write to {short}/ray" in done.stderr
    assert os.getuid() != 0 or "belongs to root" in done.stderr


def test_c47_a_home_that_cannot_be_written_is_named(problem, monkeypatch, short):
    monkeypatch.setenv("HOME", "/proc/none")
    assert problem().startswith("HOME=/proc/none is invalid") and "Set HOME to a folder" in problem()
    assert problem(RAY_AUTH_TOKEN="a" * 64) == "", "no token has to be kept"
    assert problem(RAY_AUTH_MODE="disabled") == ""
    assert "RAY_AUTH_TOKEN_PATH=/nope is invalid" in problem(RAY_AUTH_TOKEN_PATH="/nope")
    monkeypatch.setenv("HOME", str(short))
    (short / ".ray").write_text("a file")
    assert "HOME=" in problem() and "is a file" in problem()


def test_c44_full_disks_are_named_with_what_is_needed(problem, monkeypatch):
    room(monkeypatch, free=0)
    assert "TMPDIR=/tmp has 0 MiB free: Ray needs 64 MiB there" in problem(TMPDIR="/tmp")
    assert "/tmp has 0 MiB free" in problem()
    room(monkeypatch, free=GIB // 4, shared=GIB // 4)
    assert "Ray needs 576 MiB" in problem(), "the object store lies there where /dev/shm is small"
    room(monkeypatch, shared=0)
    assert problem().startswith("/dev/shm has 0 MiB free") and "--shm-size" in problem()
    room(monkeypatch, shared=64 * 2**20)
    assert problem() == "", "a container's usual size is enough"


@pytest.mark.parametrize("hook", ["no.such", "nothing", "os.no_such", ".", "os."])
def test_c47_hooks_that_cannot_be_imported(problem, hook):
    said = problem(RAY_RUNTIME_ENV_HOOK=hook)
    assert said.startswith(f"RAY_RUNTIME_ENV_HOOK={hook} is invalid") and "unset RAY_RUNTIME_ENV_HOOK" in said
    assert problem("10.0.0.1:6379", RAY_RUNTIME_ENV_HOOK=hook) == said, "joining a cluster calls it too"
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR=abc is invalid" in problem(RAY_JOB_CONFIG_JSON_ENV_VAR="abc")


def test_c47_a_setting_that_ray_cannot_read_is_found_among_others(problem, monkeypatch):
    tried = []

    def imports(environ: dict[str, str]) -> bool:
        tried.append(environ)
        return environ.get("RAY_num_workers_soft_limit") != "abc"

    monkeypatch.setattr(surroundings, "_imports", imports)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    said = problem(RAY_num_workers_soft_limit="abc", RAY_other_setting="1", RAY_ADDRESS="x:1")
    assert said.startswith("RAY_num_workers_soft_limit=abc is invalid") and "other" not in said
    assert all("PATH" in environ and "RAY_ADDRESS" in environ for environ in tried)
    tried.clear()
    assert problem(RAY_TMPDIR="/tmp") == "" and tried == [], "no process is started for nothing"


def test_a_cluster_elsewhere_needs_no_folder_here(problem, monkeypatch):
    monkeypatch.setenv("HOME", "/proc/none")
    assert problem("10.0.0.1:6379", TMPDIR="/" + "x" * 90) == ""


def test_several_problems_are_told_at_once(problem):
    said = problem(TMPDIR="relative", RAY_RUNTIME_ENV_HOOK="no.such")
    assert len(said.splitlines()) == 2
    assert issubclass(SurroundingsError, ConfigError), "exit code 2"


def test_ray_tmpdir_counts_before_tmpdir():
    assert temp_folder({}) == (None, "/tmp")
    assert temp_folder({"TMPDIR": "/a"}) == ("TMPDIR", "/a")
    assert temp_folder({"TMPDIR": "/a", "RAY_TMPDIR": "/b"}) == ("RAY_TMPDIR", "/b")


@pytest.mark.parametrize(("gpus", "processes", "cores", "told"), [(2, 3, 256, 6), (2, 3, 4, 4), (8, 5, 2, 8), (1, 1, 1, 1)])  # fmt: skip
def test_c43_ray_is_told_the_cores_that_the_run_uses(gpus, processes, cores, told):
    assert ray_cores(gpus, processes, cores) == told


def test_c43_a_low_limit_of_files_is_raised(monkeypatch):
    limits = {"is": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["is"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    surroundings.raise_file_limit()
    assert limits.pop("now") == (4096, 4096)
    for enough in ((4096, 4096), (65536, 2**20), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)):
        limits["is"] = enough
        surroundings.raise_file_limit()
        assert "now" not in limits
    limits["is"] = 1024, resource.RLIM_INFINITY
    surroundings.raise_file_limit()
    assert limits["now"] == (65536, resource.RLIM_INFINITY)


def test_c44_the_command_says_so_and_ends_with_2(profile, hybrid_command, monkeypatch, tmp_path):
    (tmp_path / "models/tiny/model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors
    monkeypatch.setenv("TMPDIR", "/tmp/" + "x" * 85)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    done = hybrid_command("train", profile)
    assert done.exit_code == 2, done.output
    assert "TMPDIR is too long: set RAY_TMPDIR to a short path" in done.stderr
    assert not list(tmp_path.glob("**/runs/*")), "nothing was started"


def test_variables_of_vllm_are_named_where_it_refuses_to_start():
    options = EngineOptions("model", "float32", "cpu", 2**20, 64)
    ours = environment(options) | {"VLLM_RPC_BASE_PATH": "/tmp/hybrid-1", "PATH": "/bin"}
    assert foreign_variables(options, ours) == ""
    said = foreign_variables(options, ours | {"VLLM_ATTENTION_BACKEND": "NOPE"})
    assert "VLLM_ATTENTION_BACKEND=NOPE" in said and "unset VLLM_ATTENTION_BACKEND" in said


def test_gpus_that_a_variable_hides(profile, hybrid_command, monkeypatch):
    monkeypatch.setattr(machine, "visible_gpus", lambda: 0)
    overrides = "cluster.device=cuda", "cluster.gpus_per_node=auto"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE" not in hybrid_command("train", profile, *overrides).stderr
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = hybrid_command("train", profile, *overrides)
    assert done.exit_code == 2 and "CUDA_VISIBLE_DEVICES= may hide them: unset it." in done.stderr
