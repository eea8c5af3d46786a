"""DeepSpeed, two ranks on gloo: every ZeRO stage takes the same steps, cut or whole, swapped or resident, and skips what is not finite."""

from __future__ import annotations

import gc
import os
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.integration.ranks import run_ranks

STAGES = (0, 1, 2, 3)
LEARNING_RATE = 1e-3
SMALL_BUCKET = 70_000
"""Elements; a tenth of the model, and more than its largest parameter."""
BIG = 20_000
"""Bytes from which an unlisted tensor counts as forgotten."""


def _model(dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.model.bias_of_router = torch.nn.Parameter(
        torch.zeros(3)
    )  # which no loss moves, as in some mixtures of experts
    return model.to(dtype)


DATA = torch.randint(0, 512, (8, 16), generator=torch.Generator().manual_seed(1))
CUTS = {
    "whole": ([[0, 1, 2, 3]], [[4, 5, 6, 7]]),
    # Rank 0 makes five micro-batches of its share, rank 1 two: the rest of its are empty.
    "uneven": ([[0], [1], [2], [3], [4]], [[5], [6, 7], [], [], []]),
}


def _share_of_loss(rows):
    def loss(engine):
        if not rows:
            return engine(input_ids=DATA[:1, :2]).logits.sum() * 0.0
        return engine(input_ids=DATA[rows], labels=DATA[rows]).loss * len(rows) / len(DATA)

    return loss


def _weights(model):
    from hybrid.roles.weights import WeightBuckets

    buckets = WeightBuckets(model.module, model.options.stage, 100_000)
    return torch.cat([t.float().flatten().clone() for bucket in buckets for _, t in bucket])


def _all_storages():
    """Every storage of CPU tensors that Python's garbage collector knows of."""
    found = {}
    for o in gc.get_objects():
        if isinstance(o, torch.Tensor) and o.device.type == "cpu":
            storage = o.untyped_storage()
            found[storage._cdata] = (tuple(o.shape), storage.nbytes())
    return found


def _start(stage, dtype, overlap_comm=False):
    from hybrid.roles.zero import TrainedModel, ZeroOptions, load_partitioned

    options = ZeroOptions(stage, dtype, (0.9, 0.95), 1e-8, 0.01, 1.0, overlap_comm=overlap_comm)
    return TrainedModel(load_partitioned(stage, dtype, lambda: _model(dtype)), options)


def _train(model, cut, rank, swap=None):
    from hybrid.memory.swap import Part, come_parts, leave_parts

    norms = []
    for _ in range(3):
        losses = [_share_of_loss(rows) for rows in CUTS[cut][rank]]
        norms.append(model.step(losses, LEARNING_RATE, lambda: None).grad_norm)
        if swap is not None:
            model.drop_caches()
            parts = {k: Part(v, keep_bytes=k != "gradients") for k, v in model.storages().items()}
            leave_parts(swap, parts, rank, "here")
            assert all(s.storage.nbytes() < 64 * 2**10 for v in model.storages().values() for s in v)
            come_parts(swap, list(parts), rank, "here")
    return norms


def _matrix(rank, world, port, dtype_name, folder):
    import torch.distributed as dist

    from hybrid.memory.swap import StorageSwap
    from hybrid.memory.tiers import FileTier

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ["DS_ACCELERATOR"] = "cpu"
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}")
    dtype = getattr(torch, dtype_name)
    results = {"probes": _count_probes()}
    for stage in STAGES:
        before = set(_all_storages())
        whole = _start(stage, dtype)
        result = {"norms": _train(whole, "whole", rank), "whole": _weights(whole)}
        listed = {s.storage._cdata for found in whole.storages().values() for s in found}
        unlisted = {c: v for c, v in _all_storages().items() if c not in before and c not in listed}
        result["forgotten"] = [v for c, v in unlisted.items() if v[1] >= BIG and v[0] != tuple(result["whole"].shape)]
        swapped = _start(stage, dtype)
        _train(swapped, "whole", rank, StorageSwap(FileTier(f"{folder}/{rank}-{stage}"), "cpu"))
        result["swapped"] = _weights(swapped)
        with patch("hybrid.roles.zero.LARGEST_BUCKET", SMALL_BUCKET):
            overlapped = _start(stage, dtype, overlap_comm=True)
        _train(overlapped, "whole", rank)
        result["overlapped"] = _weights(overlapped)
        uneven = _start(stage, dtype)
        _train(uneven, "uneven", rank)
        result["uneven"] = _weights(uneven)
        poison = [lambda engine: _share_of_loss([0])(engine) * (float("nan") if rank == 1 else 1.0)]
        result["poisoned"] = uneven.step(poison, LEARNING_RATE, lambda: None).applied
        result["after_poison"] = _weights(uneven)
        result["next_step"] = uneven.step([_share_of_loss([0])], LEARNING_RATE, lambda: None).applied
        results[stage] = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in result.items()}
    results["probes"] = len(results["probes"])
    return results


def _count_probes():
    """A list that grows by one whenever DeepSpeed probes the builders of its extensions."""
    import deepspeed

    probes = []
    deepspeed.ops.__dict__.pop("__compatible_ops__", None)
    deepspeed.ops._probe_compatible_ops = lambda: probes.append(1) or {}
    return probes


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def matrix(request, tmp_path_factory):
    ranks = run_ranks(_matrix, request.param, str(tmp_path_factory.mktemp("swap")))
    return request.param, ranks


@pytest.mark.parametrize("stage", STAGES)
def test_stages_take_the_same_steps(matrix, stage):
    dtype, (rank0, _) = matrix
    # Sums over ranks are taken in another order. Single weights may differ by more: AdamW divides by the gradient's size, bf16 rounds.
    start = torch.cat([p.detach().float().flatten() for p in _model(getattr(torch, dtype)).parameters()]).numpy()
    moved, apart = rank0[1]["whole"] - start, rank0[stage]["whole"] - rank0[1]["whole"]
    assert np.linalg.norm(apart) < (1e-2 if dtype == "float32" else 0.1) * np.linalg.norm(moved)
    assert rank0[stage]["norms"] == pytest.approx(rank0[1]["norms"], rel=1e-4 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("stage", STAGES)
def test_uneven_micro_batches_change_nothing(matrix, stage):
    dtype, (rank0, _) = matrix
    difference = abs(rank0[stage]["uneven"] - rank0[stage]["whole"])
    # Adam divides by the gradient's own size, so a bf16 rounding can flip a single tiny update.
    assert difference.mean() < (1e-6 if dtype == "float32" else 2e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_swapping_between_steps_is_bit_identical(matrix, stage):
    _, (rank0, _) = matrix
    assert (rank0[stage]["swapped"] == rank0[stage]["whole"]).all()


@pytest.mark.parametrize("stage", STAGES)
def test_overlapped_reductions_of_small_buckets_change_nothing(matrix, stage):
    _, (rank0, _) = matrix
    assert (rank0[stage]["overlapped"] == rank0[stage]["whole"]).all()


def test_no_extension_of_deepspeed_is_probed(matrix):
    _, ranks = matrix
    assert [rank["probes"] for rank in ranks] == [0, 0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(matrix, stage):
    _, ranks = matrix
    for result in (rank[stage] for rank in ranks):
        assert result["poisoned"] is False
        assert (result["after_poison"] == result["uneven"]).all()
        assert result["next_step"] is True


@pytest.mark.parametrize("stage", STAGES)
def test_the_inventory_lists_every_large_tensor(matrix, stage):
    _, ranks = matrix
    assert [rank[stage]["forgotten"] for rank in ranks] == [[], []]
