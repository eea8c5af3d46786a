"""Masters and moments in host memory, stepped by the CPU: the same training, on every stage that has shards."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from tests.integration.ranks import run_ranks
from tests.integration.test_zero import CUTS, LEARNING_RATE, _model, _share_of_loss, _weights

STAGES = (1, 2, 3)
ROUNDINGS = 4
"""Units in the last place by which two AdamW kernels may differ after one step. They round in another order."""


def _masters(model):
    """All fp32 master weights, flat. bf16 weights would turn a difference of one rounding into one of 2**-8."""
    from deepspeed.utils import safe_get_full_fp32_param

    return torch.cat([safe_get_full_fp32_param(p).flatten().clone() for p in model.module.parameters()]).numpy()


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
            norms, masters = [], []
            for _ in range(3):
                losses = [_share_of_loss(rows) for rows in CUTS["uneven"][rank]]
                norms.append(model.step(losses, LEARNING_RATE, lambda: None).grad_norm)
                masters.append(_masters(model))
            trained = _weights(model)
            poison = [lambda engine: _share_of_loss([0])(engine) * (float("nan") if rank == 1 else 1.0)]
            skipped = model.step(poison, LEARNING_RATE, lambda: None).applied
            results[stage, on_cpu] = (norms, masters, skipped, bool((_weights(model) == trained).all()))
    return results


@pytest.fixture(scope="module")
def both():
    return run_ranks(_both)


@pytest.mark.parametrize("stage", STAGES)
def test_the_cpu_takes_the_same_steps_and_skips_the_same(both, stage):
    for rank in both:
        (norms, masters, *_), (cpu_norms, cpu_masters, skipped, unchanged) = rank[stage, False], rank[stage, True]
        # The first step starts from equal weights and equal gradients.
        assert cpu_norms[0] == pytest.approx(norms[0], rel=1e-5)
        largest = np.maximum(abs(masters[0]), LEARNING_RATE)
        assert (abs(cpu_masters[0] - masters[0]) <= ROUNDINGS * np.spacing(largest)).all()
        # Later ones start from weights whose bf16 copies may differ by a rounding, and so do their gradients.
        moved = np.linalg.norm(masters[2] - masters[0])
        assert np.linalg.norm(cpu_masters[2] - masters[2]) < 0.05 * moved
        assert skipped is False and unchanged
