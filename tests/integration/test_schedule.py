"""The scheduler carries out the cheapest plan that fits: fewer bytes than swapping all, within the capacity, and nothing learnt changes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hybrid.config import load_run, resolve
from hybrid.errors import ConfigError
from hybrid.memory.ledger import read_ledger
from hybrid.memory.probe import process_bytes
from hybrid.planning.footprint import peak
from hybrid.planning.machine import predictor
from hybrid.planning.plan import make_plan
from hybrid.preparation import prepared
from launch.tiny_models import make_tiny_llama
from tests.integration.runs import profile, run

EXACT = ("reward/mean", "loss/policy", "grad_norm/actor", "kl/sampler", "kl/reference", "response/length_mean")
SECTIONS = {
    "cluster": {"gpus_per_node": 1},  # moves on two: test_run.py
    "algorithm": {"kl_coef": 0.05},
    "rollout": {"kv_cache": "16MiB"},
    "train": {"prompts_per_update": 2, "micro_batch_tokens": 160},
    "checkpoint": {"export": False},
}
WORKING = 0.05
"""Share of the capacity by which processes may be larger than predicted."""


@dataclass
class Runs:
    folder: Path
    path: Path
    capacity: int
    lines: dict[str, list[dict]] = field(default_factory=dict)
    highest: dict[str, int] = field(default_factory=dict)

    def ledger(self, policy: str) -> list[dict]:
        return read_ledger(self.folder / policy / "memory.jsonl")

    def moved(self, policy: str) -> int:
        """Bytes copied by rank 0 of each role in the steps after the first."""
        rows = [row for row in self.ledger(policy) if row["kind"] in ("leave", "come") and row["step"] > 1]
        return sum(row["copied_bytes"] for row in rows if row["rank"] == 0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedule")
    model = make_tiny_llama(folder / "model", hidden_size=640, intermediate_size=1920, num_hidden_layers=8)
    path = profile(folder, model, **SECTIONS)
    most, least = (peak_of(path, policy) for policy in ("resident", "swap_all"))
    made = Runs(folder, path, (most + least) // 2)
    for policy in ("resident", "swap_all", "auto"):
        size = [] if policy != "auto" else [f"memory.device_bytes={made.capacity}"]
        with Watch(folder / policy) as watch:
            made.lines[policy] = run(path, folder / policy, f"memory.policy={policy}", *size)
        made.highest[policy] = watch.highest
    return made


def peak_of(path: Path, policy: str, *overrides: str) -> int:
    cfg = resolve(load_run(path, [f"memory.policy={policy}", *overrides]))
    plan = make_plan(cfg, *predictor(cfg))
    return max(peak(plan.prediction, plan.residency, phase)[0] for pair in plan.walk for phase in pair)


class Watch:
    """Highest PSS of all processes of rank 0 together, once training has begun, looked at from outside ten times a second."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.highest, self.ended = run_dir, 0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.ended.wait(0.1):
            metrics = self.run_dir / "metrics.jsonl"
            if not metrics.exists() or not metrics.stat().st_size:
                continue
            try:
                logs = [log.read_text().split("\n", 1)[0] for log in self.run_dir.glob("logs/*-0.log")]
                sizes = [process_bytes(int(first.removeprefix("pid ")), children=True).pss for first in logs]
            except ProcessLookupError:
                continue
            self.highest = max(self.highest, sum(sizes))


def test_auto_moves_fewer_bytes_than_swapping_all(runs):
    assert runs.moved("resident") == 0
    assert 0 < runs.moved("auto") <= 0.6 * runs.moved("swap_all")


def test_what_is_learnt_is_the_same_to_the_last_bit(runs):
    resident, swapped, auto = ([{k: line[k] for k in EXACT} for line in runs.lines[p]] for p in runs.lines)
    assert resident == swapped == auto


def test_the_capacity_is_never_exceeded(runs):
    row = next(row for row in runs.ledger("auto") if row["kind"] == "plan")
    assert row["capacity_bytes"] == runs.capacity
    assert all(phase["peak_bytes"] <= runs.capacity for phase in row["phases"])
    assert runs.highest["auto"] <= runs.capacity * (1 + WORKING)
    assert runs.highest["auto"] < runs.highest["resident"]


def test_the_ledger_has_what_was_planned_and_it_was_done(runs):
    """In each phase that was entered, what moved is what the plan said for the way into it."""
    plan = next(row for row in runs.ledger("auto") if row["kind"] == "plan")
    planned = {(t["from"], t["to"]): {(m["kind"], m["tenant"]) for m in t["moves"]} for t in plan["transitions"]}
    moved: set[tuple[str, str]] = set()
    seen = 0
    at = "init"
    for row in runs.ledger("auto"):
        if row["kind"] in ("leave", "come"):
            moved.add((row["kind"], f"{row['role']}/{row['part']}"))
        if row["kind"] == "transition" and row["phase"] != "init":
            if (at, row["phase"]) in planned:
                assert moved == planned[at, row["phase"]], (at, row["phase"])
                seen += 1
            at = row["phase"] if any(row["phase"] in pair for pair in planned) else at
            moved = set()
        elif row["kind"] == "transition":
            moved = set()
    assert seen > 8
    assert plan["seconds_per_step"] > 0


def test_a_run_that_does_not_fit_is_refused_before_gpus_are_asked_for(runs):
    cfg = resolve(load_run(runs.path, ["memory.device_bytes=1GiB"]), runs.folder / "refused")
    with pytest.raises(ConfigError, match=r"train_actor is short by .* per GPU"), prepared(cfg):
        pass
    assert not (runs.folder / "refused").exists()


def test_doing_what_is_suggested_makes_it_run(runs):
    large = [
        "train.prompts_per_step=64",
        "train.prompts_per_update=64",
        "train.micro_batch_tokens=4096",
        "train.steps=1",
    ]
    limit = peak_of(runs.path, "swap_all", *large) - 64 * 2**20
    given = [f"memory.device_bytes={limit}", *large]
    with pytest.raises(ConfigError, match="does not fit") as refusal:
        run(runs.path, runs.folder / "too-large", *given)
    advice = next(word for word in str(refusal.value).split() if word.startswith("train.micro_batch_tokens="))
    with Watch(runs.folder / "suggested") as watch:
        lines = run(runs.path, runs.folder / "suggested", *given, advice)
    assert len(lines) == 1
    assert watch.highest <= limit * (1 + WORKING)
