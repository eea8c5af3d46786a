"""What `hybrid plan --calibrate` measures on GPUs, against what others published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybrid.config import RunConfig, resolve
from hybrid.planning.calibration import calibrate
from hybrid.planning.facts import stated_facts
from launch.tiny_models import make_tiny_llama

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), pytest.mark.timeout(900)]

MIB = 2**20
TASKS = [{"prompt": "1 + 1 =", "label": "2"}, {"prompt": "1 + 2 =", "label": "3"}]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("calibration")
    make_tiny_llama(folder / "model")
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    sections = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "tasks.jsonl")},
        "reward": {"function": "math_verify"},
        "rollout": {"samples_per_prompt": 2, "max_new_tokens": 16},
        "train": {"steps": 1, "prompts_per_step": 2},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        cfg = resolve(RunConfig.model_validate(sections))
        return cfg, calibrate(cfg)


def test_processes_take_what_is_planned(found):
    """Proves that contexts are counted on each rank's own GPU. A failure means that plans are wrong by as much for each process."""
    cfg, measured = found
    planned = stated_facts(cfg)
    for name in ("role", "engine"):
        size = getattr(measured, name).private
        assert 150 * MIB < size < 1.3 * getattr(planned, name).private, f"{name}: {size / MIB:.0f} MiB"


def test_graphs_and_communicators_take_what_is_planned(found):
    """Proves that both can be told from the rest of a process. A failure means that plans for engines or several GPUs are wrong by it."""
    cfg, measured = found
    planned = stated_facts(cfg)
    assert 0 < measured.graphs < 2 * planned.graphs, f"graphs: {measured.graphs / MIB:.0f} MiB"
    assert measured.communicator < 1.5 * planned.communicator
    assert (measured.communicator > 0) == (cfg.cluster.gpus_per_node > 1)
