"""What the plan says that moving takes, against what it took: `python tests/benchmarks/movement.py` from the repository's root, with it on
PYTHONPATH; three minutes on two cores.

A run at half-way between the largest phase and the sum of all tenants, planned with this disk's speed as measured just before.
Seconds are those of the slowest rank, checks included: the median of the steps from the second on. Last line: `ratio`, measured over
predicted; at most 1.2.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path

from hybrid.config import load_run, resolve
from hybrid.memory.ledger import read_ledger
from hybrid.planning.calibration import calibrate
from hybrid.planning.footprint import peak
from hybrid.planning.machine import predictor
from hybrid.planning.plan import Plan, make_plan
from launch.tiny_models import make_tiny_llama
from tests.integration.runs import profile, run

STEPS, RANKS = 8, 2
BOUND = 1.2


def plan(path: Path, *overrides: str) -> Plan:
    cfg = resolve(load_run(path, list(overrides)))
    return make_plan(cfg, *predictor(cfg))


def largest(made: Plan) -> int:
    """Bytes of the fullest phase."""
    return max(peak(made.prediction, made.residency, phase)[0] for pair in made.walk for phase in pair)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_llama(folder / "model", hidden_size=768, intermediate_size=2048, num_hidden_layers=12)
        sections = {
            "algorithm": {"kl_coef": 0.05},
            "actor": {"learning_rate": 1e-6},
            "train": {"steps": STEPS, "prompts_per_update": 2, "micro_batch_tokens": 160},
            "rollout": {"kv_cache": "16MiB"},
        }
        path = profile(folder, model, **sections, checkpoint={"export": False})
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        measured = calibrate(resolve(load_run(path, [])))
        most, least = (largest(plan(path, f"memory.policy={policy}")) for policy in ("resident", "swap_all"))
        limit = f"memory.device_bytes={(most + least) // 2}"
        made = plan(path, limit)
        run(path, folder / "run", limit)
        rows = [row for row in read_ledger(folder / "run" / "memory.jsonl") if row["step"] > 1]
    moves = [row for row in rows if row["kind"] in ("leave", "come")]
    took = statistics.median(
        sum(
            row["leave_seconds"] + row["come_seconds"]
            for row in rows
            if (row["kind"], row["step"]) == ("transition", step)
        )
        for step in range(2, STEPS + 1)
    )
    copied = sum(row["copied_bytes"] for row in moves) / RANKS / (STEPS - 1)
    print(
        f"tier: {measured.leave_bytes_per_s / 1e9:.2f} GB/s out, {measured.come_bytes_per_s / 1e9:.2f} GB/s in, both ranks together"
    )
    print(
        f"a step copies {copied / 2**20:.0f} MiB on each rank; planned {made.seconds_per_step:.3f} s, took {took:.3f} s"
    )
    if not made.seconds_per_step:
        print("nothing has to move at this capacity: no ratio")
        return 1
    ratio = took / made.seconds_per_step
    print(f"ratio {ratio:.2f}")
    return int(ratio > BOUND)


if __name__ == "__main__":
    sys.exit(main())
