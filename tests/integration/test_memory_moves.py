"""Memory seen from outside the processes: what leaves is gone, and nothing grows over many cycles."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid import phases
from hybrid.config import load_run, resolve
from hybrid.memory.probe import process_bytes
from hybrid.preparation import prepared
from hybrid.session import open_session
from hybrid.trainer import Progress, train_step
from launch.tiny_models import make_tiny_llama
from tests.integration.runs import profile

CYCLES, SETTLED = 30, 5


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moves")
    model = make_tiny_llama(folder / "model", hidden_size=512, intermediate_size=1536, num_hidden_layers=6)
    path = profile(folder, model, rollout={"kv_cache": "128MiB"}, data={"max_prompt_tokens": 64})
    run_dir = folder / "run"
    run_dir.mkdir()
    cfg = resolve(load_run(path, ["memory.policy=swap_all"]), run_dir)
    with prepared(cfg) as ready, open_session(ready, run_dir) as s:
        yield s


def pss(run_dir: Path) -> dict[str, int]:
    """PSS of every worker, children included, by the name of its log."""
    pids = {log.stem: int(log.read_text().split("\n", 1)[0].removeprefix("pid ")) for log in run_dir.glob("logs/*.log")}
    return {name: process_bytes(pid, children=True).pss for name, pid in pids.items()}


def test_what_leaves_is_gone_and_nothing_grows(session):
    s, progress = session, Progress(step=1)
    phases.sync(s, progress)
    train_step(s, progress)
    movable = {(t.role, t.part) for mover in (s.actor, s.engines) for t in mover.tenants() if t.movable}
    everything = [("rollout", ["kv_cache"]), ("actor", ["weights", "gradients", "optimizer"])]
    movers = {"rollout": s.engines, "actor": s.actor}
    for role, parts in everything:
        movers[role].come([p for p in parts if (role, p) not in s.scheduler.resident], 60)
    awake = pss(s.run_dir)
    rows = {role: movers[role].leave(parts, 60) for role, parts in everything}
    asleep = pss(s.run_dir)
    for name, before in awake.items():
        role, rank = name.rsplit("-", 1)
        counted = sum(row.counted_bytes for row in rows[role] if row.rank == int(rank))
        assert counted > 100 * 2**20
        assert before - asleep[name] == pytest.approx(counted, rel=0.10), name
    assert movable == {(role, part) for role, parts in everything for part in parts}

    s.scheduler.resident -= movable
    sizes = []
    for cycle in range(1, CYCLES + 1):
        progress.step = cycle
        s.engine_version = None  # send the weights each time, whether they changed or not
        phases.sync(s, progress)
        with s.phase("generate"):
            s.engines.generate(
                s.prompts.take(4), phases.sampling_options(s.cfg), step=cycle, version=progress.weight_version
            )
        sizes.append(pss(s.run_dir))
    for name in sizes[0]:
        grown = sizes[-1][name] / sizes[SETTLED - 1][name] - 1
        assert grown < 0.03, f"{name} grew by {grown:.1%} over {CYCLES - SETTLED} cycles"
