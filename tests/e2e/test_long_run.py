"""Two hundred steps of a tiny model that swaps: nothing grows, and what is learnt is what a resident run learns. About ten minutes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hybrid.memory.probe import process_bytes
from launch.tiny_models import make_tiny_llama
from tests.integration.runs import profile, run

STEPS, SETTLED, WINDOW = 200, 20, 15
SHARE, BYTES = 0.02, 20 * 2**20
EXACT = ("reward/mean", "loss/policy", "grad_norm/actor", "kl/sampler", "response/length_mean")


class Watch:
    """Private memory of every process of a run at the end of steps, and the driver's own."""

    def __init__(self, run_dir: Path):
        self.run_dir, self.sizes, self.ended = run_dir, {}, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.thread.join()

    def _look(self) -> None:
        while not self.ended.wait(0.2):
            metrics = self.run_dir / "metrics.jsonl"
            step = metrics.read_text().count("\n") if metrics.exists() else 0
            if step not in self.sizes and step:
                self.sizes[step] = self._now()

    def _now(self) -> dict[str, int]:
        logs = {log.stem: log.read_text().split("\n", 1)[0] for log in self.run_dir.glob("logs/*.log")}
        pids = {name: int(first.removeprefix("pid ")) for name, first in logs.items() if first.startswith("pid ")}
        found = {"driver": process_bytes().private}
        for name, pid in pids.items():
            try:
                found[name] = process_bytes(pid, children=True).private
            except ProcessLookupError:
                continue
        return found


def lowest(sizes: dict[int, dict[str, int]], start: int) -> dict[str, int]:
    """Each process's least in some steps from `start` on: a step ends while a KV cache leaves, comes, or is away."""
    seen = [found for step, found in sizes.items() if start <= step < start + WINDOW]
    return {name: min(found[name] for found in seen) for name in set.intersection(*map(set, seen))}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    model = make_tiny_llama(folder / "model", hidden_size=256, intermediate_size=768, num_hidden_layers=4)
    path = profile(folder, model, train={"steps": STEPS}, checkpoint={"export": False}, actor={"learning_rate": 1e-4})
    lines = {"resident": run(path, folder / "resident", "memory.policy=resident")}
    with Watch(folder / "swap_all") as watch:
        lines["swap_all"] = run(path, folder / "swap_all", "memory.policy=swap_all")
    return lines, watch.sizes


def test_no_process_grows(runs):
    _, sizes = runs
    early, late = lowest(sizes, SETTLED), lowest(sizes, STEPS - WINDOW)
    assert {"driver", "actor-0", "actor-1", "rollout-0", "rollout-1"} <= set(late)
    for name, size in late.items():
        assert size - early[name] <= max(SHARE * early[name], BYTES), f"{name}: {early[name]} to {size} bytes"


def test_swapping_changes_no_result(runs):
    lines, _ = runs
    resident, swapped = ([{key: line[key] for key in EXACT} for line in lines[p]] for p in ("resident", "swap_all"))
    assert len(resident) == STEPS and resident == swapped
