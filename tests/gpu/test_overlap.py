"""Reductions on a stream of their own give the same weights. With one GPU they exchange nothing, but copy and wait as with several."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid.roles.zero import TrainedModel, ZeroOptions, load_partitioned

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BUCKET = 600_000
"""Elements; more than the largest parameter, and a small part of the model."""


@pytest.fixture(scope="module")
def ranks():
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def trained(stage: int, overlap: bool) -> list[torch.Tensor]:
    """Masters after three steps of two micro-batches."""
    options = ZeroOptions(stage, torch.bfloat16, (0.9, 0.95), 1e-8, 0.0, 1.0, overlap_comm=overlap)
    with patch("hybrid.roles.zero.LARGEST_BUCKET", BUCKET):
        model = TrainedModel(load_partitioned(stage, torch.bfloat16, llama), options)
    ids = torch.randint(0, 1024, (4, 256), generator=torch.Generator().manual_seed(0)).cuda()
    for _ in range(3):
        losses = [lambda engine, part=part: engine(input_ids=part, labels=part).loss / 2 for part in ids.split(2)]
        assert model.step(losses, 1e-3, lambda: None).applied
    masters = [p.float().cpu() for group in model.optimizer.param_groups for p in group["params"]]
    model.engine.destroy()
    return masters


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_are_those_without_overlap(ranks, stage):
    """A failure means that a bucket is filled again, or stepped with, before it was reduced: train.overlap_comm must be false."""
    for ours, theirs in zip(trained(stage, True), trained(stage, False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
