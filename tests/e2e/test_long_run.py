"""Two hundred steps of a tiny model that swaps: nothing grows, and what is learnt is what a resident run learns. About ten minutes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hybrid.memory.ledger import read_ledger
from hybrid.memory.probe import process_bytes
from launch.tiny_models import make_tiny_llama
from tests.integration.runs import profile, run

STEPS, SETTLED, WINDOW = 200, 20, 5
SHARE, BYTES = 0.02, 20 * 2**20
EXACT = ("reward/mean", "loss/policy", "grad_norm/actor", "kl/sampler", "response/length_mean")


class Watch:
    """Private memory of this process, the driver, at the end of steps."""

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
            if step:
                self.sizes.setdefault(step, process_bytes().private)


def held(run_dir: Path) -> dict[str, dict[int, int]]:
    """By process and step: what it held when training ended, the engines' KV cache being away."""
    found: dict[str, dict[int, int]] = {}
    for row in read_ledger(run_dir / "memory.jsonl"):
        if (row["kind"], row["phase"]) == ("phase", "train_actor"):
            for peak in row["peaks"]:
                found.setdefault(f"{peak['role']}-{peak['rank']}", {})[row["step"]] = peak["held_bytes"]
    return found


def lowest(sizes: dict[int, int], start: int) -> int:
    """The least in some steps from `start` on: garbage comes and goes."""
    return min(size for step, size in sizes.items() if start <= step < start + WINDOW)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    model = make_tiny_llama(folder / "model", hidden_size=256, intermediate_size=768, num_hidden_layers=4)
    path = profile(folder, model, train={"steps": STEPS}, checkpoint={"export": False}, actor={"learning_rate": 1e-4})
    lines = {"resident": run(path, folder / "resident", "memory.policy=resident")}
    with Watch(folder / "swap_all") as watch:
        lines["swap_all"] = run(path, folder / "swap_all", "memory.policy=swap_all")
    return lines, held(folder / "swap_all") | {"driver": watch.sizes}


def test_no_process_grows(runs):
    _, sizes = runs
    assert {"driver", "actor-0", "actor-1", "rollout-0", "rollout-1"} <= set(sizes)
    for name, of_step in sizes.items():
        early, late = lowest(of_step, SETTLED), lowest(of_step, STEPS - WINDOW)
        print(f"{name}: {early / 2**20:.0f} to {late / 2**20:.0f} MiB")
        assert late - early <= max(SHARE * early, BYTES), f"{name}: {early} to {late} bytes"


def test_swapping_changes_no_result(runs):
    lines, _ = runs
    resident, swapped = ([{key: line[key] for key in EXACT} for line in lines[p]] for p in ("resident", "swap_all"))
    assert len(resident) == STEPS and resident == swapped
