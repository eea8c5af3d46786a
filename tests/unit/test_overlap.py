"""`train.overlap_comm`: what DeepSpeed is told, what the plan counts for it, and what a role asks of DeepSpeed's extensions."""

from __future__ import annotations

import pytest
import torch

from hybrid.config import load_run, resolve
from hybrid.planning.model_state import partition
from hybrid.planning.shapes import ModelShapes
from hybrid.planning.training import train_parts
from hybrid.planning.working_set import MOMENTS, Trace
from hybrid.roles.zero import deepspeed_config

MIB = 2**20
MODEL = ModelShapes(tuple((f"w{i}", (8192, 4096)) for i in range(8)), 0, 8, 4096, 8192)


@pytest.mark.parametrize(("device", "gpus", "overlaps"), [("cuda", 2, True), ("cuda", 1, False), ("cpu", 2, False)])
def test_auto_overlaps_where_there_is_something_to_overlap(profile, device, gpus, overlaps):
    wanted = [f"cluster.device={device}", f"cluster.gpus_per_node={gpus}", "model.dtype=bfloat16"]
    assert resolve(load_run(profile, wanted)).train.overlap_comm is overlaps
    for given in (True, False):
        assert (
            resolve(load_run(profile, [*wanted, f"train.overlap_comm={str(given).lower()}"])).train.overlap_comm
            is given
        )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_deepspeed_overlaps_where_gradients_go_during_the_pass(stage, overlap):
    told = deepspeed_config(stage, torch.bfloat16, overlap_comm=overlap)["zero_optimization"]
    assert told["overlap_comm"] is (overlap and stage >= 2)


def parts(stage, overlap, activations=4096 * MIB):
    trace = Trace(dict.fromkeys(MOMENTS, activations), dict.fromkeys(MOMENTS, activations), activations)
    cut = partition(MODEL, 8, stage, False)
    return train_parts(trace, MODEL, cut, 2, 2, "cuda", overlap_comm=overlap)


def test_the_plan_counts_the_second_bucket_and_the_copies_on_their_way():
    """Eight matrices of 32 Mi elements in bf16; a bucket holds 50 million elements. The pass is at its fullest when its first gradient
    comes, and no copy is made then unless one may be on its way."""
    alone, overlapped = parts(2, False), parts(2, True)
    assert overlapped["gradients"] - alone["gradients"] == 50_000_000 * 2
    assert (
        overlapped["reduction"] == 50_000_000 * 2 + 8192 * 4096 * 4
        and overlapped["activations"] >= alone["activations"] * 0.99
    )
    in_stage_3 = parts(3, True)
    assert "reduction" not in parts(3, False)
    assert in_stage_3["reduction"] == 50_000_000 * (2 + 4 / 8) and "gradients" not in in_stage_3


@pytest.mark.parametrize("stage", [0, 1])
def test_the_plan_of_the_other_stages_stays(stage):
    assert parts(stage, True) == parts(stage, False)
