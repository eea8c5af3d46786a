"""Over which process groups DeepSpeed sends a role's tensors: on CUDA each of them has an NCCL communicator, which plans count."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from launch.tiny_models import make_tiny_llama
from tests.integration.ranks import run_ranks

STAGES = (0, 1, 2, 3)
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "reduce")


def _groups(rank, world, port, path):
    """By role: "default" for the group of all ranks, "other" for what DeepSpeed made of it."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from hybrid.roles.models import ModelOptions, load_critic
    from hybrid.roles.packing import Row, pack
    from hybrid.roles.zero import FrozenModel, TrainedModel, ZeroOptions, load_partitioned

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    used = _record()
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}")
    dtype, ids = torch.bfloat16, torch.arange(16)[None]
    batch, found = pack([Row(0, [1] * 8, [2] * 8)], True), {}

    def policy():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    def critic():
        return load_critic(ModelOptions(path, dtype, "sdpa"))

    def train(name, load, stage, loss):
        used.clear()
        options = ZeroOptions(stage, dtype, (0.9, 0.95), 1e-8, 0.0, 1.0)
        model = TrainedModel(load_partitioned(stage, dtype, load), options)
        for _ in range(2):
            assert model.step([loss] * 2, 1e-3, lambda: None).applied
        found[name] = set(used)

    for stage in STAGES:
        train(f"actor {stage}", policy, stage, lambda model: model(input_ids=ids).logits.float().mean())
    train("critic 3", critic, 3, lambda model: model(batch).mean())
    for stage in (0, 3):
        used.clear()
        FrozenModel(load_partitioned(stage, dtype, policy), stage, dtype).forward(input_ids=ids)
        found[f"reference {stage}"] = set(used)
    return found


def _record():
    """A set that from now on names the groups over which DeepSpeed sends tensors."""
    import torch.distributed as dist

    used = set()

    def recorded(original):
        def call(*args, **kwargs):
            if sys._getframe(1).f_globals["__name__"].startswith("deepspeed"):
                given = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
                used.add("default" if given in ([], [dist.group.WORLD]) else "other")
            return original(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, recorded(getattr(dist, name)))
    return used


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    make_tiny_llama(path)
    return run_ranks(_groups, path)[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_trained_role_sends_over_one_group(groups, stage):
    assert groups[f"actor {stage}"] == {"default" if stage == 3 else "other"}


def test_a_new_head_needs_no_group_of_its_own(groups):
    assert groups["critic 3"] == {"default"}


def test_a_frozen_role_sends_only_what_zero_3_gathers(groups):
    assert (groups["reference 0"], groups["reference 3"]) == (set(), {"default"})
