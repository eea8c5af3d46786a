"""Gradients of many bf16 micro-batches add up in fp32 on every ZeRO stage: `micro_batch_tokens` changes no result."""

from __future__ import annotations

import os

import pytest
import torch

from tests.integration.ranks import run_ranks
from tests.integration.test_zero import _model

SETTINGS = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
"""(ZeRO stage, masters and moments on the CPU)."""
MICRO_BATCHES = 64
BOUND = 2e-3
"""Of the L2 distance, as a share of the gradient's norm. Sums in bf16 give about 8e-3; one rounding to bf16 gives 1.7e-3."""


def _rows(rank: int, number: int) -> torch.Tensor:
    """1 x 16 token ids, others for each rank and micro-batch."""
    return torch.randint(0, 512, (1, 16), generator=torch.Generator().manual_seed(1000 * rank + number))


def _loss(model, rank: int, number: int) -> torch.Tensor:
    rows = _rows(rank, number)
    return model(input_ids=rows, labels=rows).loss / (2 * MICRO_BATCHES)


def _expected() -> torch.Tensor:
    """The flat gradient: each micro-batch's in bf16, their sum over micro-batches and ranks in fp32."""
    model = _model(torch.bfloat16).train()
    total = None
    for rank in (0, 1):
        for number in range(MICRO_BATCHES):
            model.zero_grad()
            _loss(model, rank, number).backward()
            flat = torch.cat(
                [(torch.zeros_like(p) if p.grad is None else p.grad).float().flatten() for p in model.parameters()]
            )
            total = flat if total is None else total + flat
    return total


def _found(model) -> torch.Tensor:
    """The flat gradient of the only step: with a first decay rate of 0, AdamW's first moment."""
    from deepspeed.utils import safe_get_full_optimizer_state

    parameters = list(model.module.parameters())
    if model.stage == 0:
        moments = [model.optimizer.state[p]["exp_avg"] for group in model.optimizer.fp32_groups for p in group]
    else:
        moments = [safe_get_full_optimizer_state(p, "exp_avg") for p in parameters]
    return torch.cat([m.flatten() for m in moments])


def _distances(rank, world, port):
    import torch.distributed as dist

    from hybrid.roles.zero import TrainedModel, ZeroOptions, load_partitioned

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["DS_ACCELERATOR"] = "cpu"
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}")
    expected, dtype, results = _expected(), torch.bfloat16, {}
    for stage, on_cpu in SETTINGS:
        options = ZeroOptions(stage, dtype, (0.0, 0.95), 1e-8, 0.0, 1e9, on_cpu)
        model = TrainedModel(load_partitioned(stage, dtype, lambda: _model(dtype)), options)
        losses = [lambda engine, number=number: _loss(engine, rank, number) for number in range(MICRO_BATCHES)]
        step = model.step(losses, 1e-6, lambda: None)
        distance = float((_found(model) - expected).norm() / expected.norm())
        results[stage, on_cpu] = distance, step.grad_norm / float(expected.norm())
    return results


@pytest.fixture(scope="module")
def distances():
    return run_ranks(_distances)


@pytest.mark.parametrize(("stage", "on_cpu"), SETTINGS)
def test_the_gradient_of_many_micro_batches_is_their_fp32_sum(distances, stage, on_cpu):
    for rank in distances:
        distance, norm = rank[stage, on_cpu]
        assert distance < BOUND
        assert norm == pytest.approx(1.0, rel=BOUND)
