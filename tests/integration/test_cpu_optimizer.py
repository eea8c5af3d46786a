"""Masters and moments in host memory, stepped by the CPU: the same training, on every stage that has shards."""

from __future__ import annotations

import os

import pytest
import torch

from tests.integration.ranks import run_ranks
from tests.integration.test_zero import LEARNING_RATE, _model, _share_of_loss, _train, _weights

STAGES = (1, 2, 3)


def _both(rank, world, port):
    import torch.distributed as dist

    from hybrid.roles.zero import TrainedModel, ZeroOptions, load_partitioned

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["DS_ACCELERATOR"] = "cpu"
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}")
    dtype, results = torch.bfloat16, {}
    for stage in STAGES:
        for on_cpu in (False, True):
            options = ZeroOptions(stage, dtype, (0.9, 0.95), 1e-8, 0.01, 1.0, on_cpu)
            model = TrainedModel(load_partitioned(stage, dtype, lambda: _model(dtype)), options)
            norms = _train(model, "uneven", rank)
            trained = _weights(model)
            poison = [lambda engine: _share_of_loss([0])(engine) * (float("nan") if rank == 1 else 1.0)]
            skipped = model.step(poison, LEARNING_RATE, lambda: None).applied
            results[stage, on_cpu] = (norms, trained.numpy(), skipped, bool((_weights(model) == trained).all()))
    return results


@pytest.fixture(scope="module")
def both():
    return run_ranks(_both)


@pytest.mark.parametrize("stage", STAGES)
def test_the_cpu_takes_the_same_steps_and_skips_the_same(both, stage):
    for rank in both:
        (norms, weights, *_), (cpu_norms, cpu_weights, skipped, unchanged) = rank[stage, False], rank[stage, True]
        assert cpu_norms == pytest.approx(norms, rel=1e-3)
        assert abs(cpu_weights - weights).max() < 1e-4
        assert skipped is False and unchanged
