"""`hybrid plan` as a user meets it: tables, JSON, exit codes, and suggestions that hold."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from hybrid.cli import app
from hybrid.config import load_run, resolve
from hybrid.config.resolve import GPU_SHARE
from hybrid.planning.calibration import stored
from hybrid.planning.facts import ProcessBytes
from hybrid.planning.machine import predictor
from hybrid.planning.probes import _measure_role
from launch.tiny_models import make_tiny_llama
from tests.integration.runs import profile

MIB = 2**20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    model = make_tiny_llama(folder / "model", hidden_size=512, intermediate_size=1536, num_hidden_layers=6)
    return profile(folder, model, train={"micro_batch_tokens": 4096, "steps": 5, "prompts_per_step": 256})


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def plan(path, *args) -> Done:
    """The command in this process, where torch is imported already."""
    result = CliRunner().invoke(app, ["plan", str(path), *args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Done(result.exit_code, result.stdout, result.stderr)


def plan_alone(path, *args) -> Done:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "hybrid.cli", "plan", str(path), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return Done(done.returncode, done.stdout, done.stderr)


def test_tables_and_the_verdict(path):
    done = plan_alone(path)
    assert done.returncode == 0, done.stderr
    for word in ("actor/optimizer", "train_actor", "headroom", "Nothing moves", "slow tier", "never moving", "fits:"):
        assert word in done.stdout, word
    assert "Transitions" in plan(path, "memory.policy=swap_all").stdout


def test_what_does_not_fit_ends_with_2_and_its_suggestions_fit(path):
    least = json.loads(plan(path, "--json", "memory.policy=swap_all").stdout)
    capacity = next(p["peak_bytes"] for p in least["phases"] if p["phase"] == "train_actor") - 64 * 2**20
    limit = f"memory.device_bytes={capacity}"
    done = plan(path, "--json", limit)
    told = json.loads(done.stdout)
    assert done.returncode == 2 and told["fits"] is False
    assert [s["where"] for s in told["shortages"]] == ["train_actor"]
    ways = [way["overrides"] for way in told["suggestions"]]
    tokens = next(way for way in ways if way[0].startswith("train.micro_batch_tokens="))
    again = json.loads(plan(path, "--json", limit, *tokens).stdout)
    assert again["fits"] is True
    assert max(phase["peak_bytes"] for phase in again["phases"]) <= again["capacity_bytes"] == capacity


def test_a_gpu_that_is_not_here_is_planned_for_by_name(path):
    done = plan(path, "--json", "--gpu", "H100-SXM", "--gpus-per-node", "4")
    told = json.loads(done.stdout)
    assert (done.returncode, told["gpus_per_node"], told["capacity_bytes"]) == (0, 4, int(GPU_SHARE * 81080 * 2**20))
    assert told["tier_bytes"] is None
    assert "CUDA contexts" in told["phases"][0]["overhead"]
    unknown = plan(path, "--gpu", "Z1000")
    assert unknown.returncode == 2 and "H100-SXM" in unknown.stderr


def test_a_calibration_is_kept_and_planned_with(path, tmp_path, monkeypatch):
    """Processes and the tier as they are here, the tier where a run would put it; nothing is left there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    swap_dir = f"memory.swap_dir={tmp_path / 'none' / 'yet'}"
    done = plan(path, "--calibrate", swap_dir)
    assert done.returncode == 0, done.stderr
    cfg, found = resolve(load_run(path, [swap_dir])), stored()
    assert all(1e8 < rate < 1e11 for rate in (found.leave_bytes_per_s, found.come_bytes_per_s))
    assert all(100 * MIB < process.private < 2000 * MIB for process in (found.role, found.engine))
    predict, speeds = predictor(cfg)
    assert speeds.come_bytes_per_s == found.come_bytes_per_s / 2  # two ranks share the files
    assert predict(cfg).overhead["engine processes"] == found.engine.private
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


def test_each_rank_is_measured_from_what_its_own_gpu_held_before(tmp_path):
    """Of three GPUs others use 5, 900 and 20 MiB; a rank takes 700, its communicator of 200 among them."""
    before, loads = [5 * MIB, 900 * MIB, 20 * MIB], []

    class Group:
        def load(self, *args):
            loads.append(args)

        def call(self, method, *args):
            if method == "device_used":
                assert not loads, "asked before anything is loaded"
                return before
            return {"logprobs": [None] * 3, "communicator": [190 * MIB, 200 * MIB, 200 * MIB]}[method]

        def call_sharded(self, method, shards, *args):
            return [{"private": used + 700 * MIB - was, "shared": 0} for used, was in zip(before, shards, strict=True)]

    cfg = SimpleNamespace(model=SimpleNamespace(dtype="bfloat16", attention="sdpa"))
    assert _measure_role(Group(), tmp_path, cfg) == (ProcessBytes(500 * MIB, 0), 200 * MIB)
