"""Ranks of a node that hold the same bytes keep one copy of them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch

from hybrid.errors import MemoryScheduleError
from hybrid.memory.node_copy import NodeTier
from hybrid.memory.swap import StorageSwap
from hybrid.memory.tiers import FileTier
from tests.unit.test_memory_swap import folder, storages  # noqa: F401

SIZE = 300_000


def rank_swap(shared: Path, rank: int) -> StorageSwap:
    tier = NodeTier(FileTier(shared / f"actor-{rank}"), shared / "actor-node", is_writer=rank == 0)
    tier.replicated = ("weights",)
    return StorageSwap(tier)


def other_rank(shared: Path, pipe) -> None:
    """Rank 1: leaves and comes when told, and says what it copied and what came back."""
    swap, weights = rank_swap(shared, 1), torch.zeros(SIZE)  # unlike rank 0's: what comes back is rank 0's copy
    own = torch.full((SIZE,), 5.0)
    while (order := pipe.recv()) is not None:
        if order == "leave":
            moved = [swap.leave("weights", storages(w=weights)), swap.leave("optimizer", storages(o=own))]
            pipe.send([m.copied_bytes for m in moved])
        else:
            swap.come("weights"), swap.come("optimizer")
            pipe.send((weights.tolist()[::1000], own.unique().tolist()))


def test_one_rank_writes_and_the_others_read_its_copy(folder):  # noqa: F811
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=other_rank, args=(folder, theirs))
    process.start()
    try:
        swap, weights = rank_swap(folder, 0), torch.arange(SIZE, dtype=torch.float32)
        for _ in range(3):
            pipe.send("leave")
            assert swap.leave("weights", storages(w=weights)).copied_bytes == 4 * SIZE
            assert pipe.recv() == [0, 4 * SIZE]
            pipe.send("come")
            swap.come("weights")
            assert pipe.recv() == (weights.tolist()[::1000], [5.0])
            weights += 1  # a training step
    finally:
        pipe.send(None)
        process.join(10)
    assert process.exitcode == 0


def test_a_copy_that_nobody_left_is_an_error(folder):  # noqa: F811
    swap, weights = rank_swap(folder, 1), torch.zeros(SIZE)
    swap.leave("weights", storages(w=weights))
    with pytest.raises(MemoryScheduleError, match="no rank of this node left a copy"):
        swap.come("weights")
