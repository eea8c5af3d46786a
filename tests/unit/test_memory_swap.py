"""Parts leave for a file and come back bit by bit, and the memory really goes."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from hybrid.errors import MemoryScheduleError
from hybrid.memory import tiers
from hybrid.memory.probe import process_bytes, release_free_memory
from hybrid.memory.swap import Part, StorageSwap, come_parts, leave_parts
from hybrid.memory.tiers import FileTier, PinnedTier, extents

MIB = 2**20


@pytest.fixture
def folder(tmp_path):
    """A folder on a disk: on machines whose /tmp is in memory, beside this file."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix=".swap.") as beside:
        yield Path(beside) if tiers.in_memory(tmp_path) else tmp_path


@pytest.fixture
def swap(folder):
    return StorageSwap(FileTier(folder / "swap"))


def storages(**tensors):
    return [(name, tensor.untyped_storage()) for name, tensor in tensors.items()]


def test_tensors_and_views_come_back_bit_identical(swap):
    flat = torch.randn(300_000)
    view = flat[1000:2000].view(10, 100)
    half = torch.randn(2**17 + 3).bfloat16()
    nan = torch.full((50_000,), float("nan"))
    kept = [t.clone() for t in (flat, view, half)]
    identity = id(flat), view.data_ptr() - flat.data_ptr()

    left = swap.leave("weights", storages(flat=flat, half=half, nan=nan))
    assert flat.untyped_storage().nbytes() == 0 and swap.away == {"weights"}
    came = swap.come("weights")

    counted = 300_000 * 4 + (2**17 + 3) * 2 + 50_000 * 4
    assert (left.counted_bytes, left.copied_bytes, came.copied_bytes) == (counted, counted, counted)
    assert all(torch.equal(a, b) for a, b in zip((flat, view, half), kept))
    assert nan.isnan().all()
    assert identity == (id(flat), view.data_ptr() - flat.data_ptr())
    flat[1000] = 7.0
    assert view[0, 0] == 7.0 and swap.away == set()


def test_an_optimizer_step_after_coming_back_equals_one_without_leaving(swap):
    def train(leaves):
        torch.manual_seed(0)
        model = torch.nn.Linear(200, 200)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.randn(8, 200)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if leaves:
                state = {f"{i}.{k}": v for i, s in enumerate(optimizer.state.values()) for k, v in s.items()}
                swap.leave("weights", storages(**dict(model.named_parameters())))
                swap.leave("optimizer", storages(**state))
                swap.come("optimizer")
                swap.come("weights")
        return model.weight

    assert torch.equal(train(leaves=False), train(leaves=True))


def test_storages_elsewhere_stay(swap):
    assert swap.leave("weights", storages(ghost=torch.zeros(100_000, device="meta"))).counted_bytes == 0


def test_small_storages_stay_and_shared_ones_move_once(swap):
    small, big = torch.arange(100), torch.arange(100_000)
    moved = swap.leave("weights", storages(small=small, big=big, again=big.view(10, -1)))
    assert moved.counted_bytes == 800_000
    assert small.sum() == 4950
    swap.come("weights")
    assert torch.equal(big, torch.arange(100_000))


def test_memory_falls_and_ten_cycles_do_not_grow(swap):
    tensors = {str(i): torch.randn(n * MIB // 4) for i, n in enumerate([40, 22, 9, 3, 3, 1, 1, 1])}
    before, first = process_bytes().rss, None
    for _ in range(10):
        counted = swap.leave("optimizer", storages(**tensors)).counted_bytes
        release_free_memory("cpu")
        asleep = process_bytes().rss
        assert counted == 80 * MIB
        assert before - asleep >= 0.9 * counted
        swap.come("optimizer")
        awake = process_bytes().rss
        first = first or (asleep, awake)
        assert awake - before <= 0.05 * counted
    assert asleep - first[0] < 4 * MIB and awake - first[1] < 4 * MIB


def test_buffers_without_state_are_freed_and_not_copied(swap):
    buffer = torch.randn(MIB)
    moved = swap.leave("gradients", storages(bucket=buffer), keep_bytes=False)
    assert (moved.counted_bytes, moved.copied_bytes) == (4 * MIB, 0)
    assert swap.come("gradients").copied_bytes == 0
    assert torch.equal(buffer, torch.zeros(MIB))


def test_read_only_parts_are_written_once_in_whatever_order_they_are_listed(swap):
    weights, bias = torch.randn(MIB), torch.randn(MIB // 4)
    kept = weights.clone(), bias.clone()
    first = swap.leave("weights", storages(w=weights, b=bias), read_only=True)
    swap.come("weights")
    second = swap.leave("weights", storages(b=bias, w=weights), read_only=True)
    swap.come("weights")
    assert (first.copied_bytes, second.copied_bytes, second.counted_bytes) == (5 * MIB, 0, 5 * MIB)
    assert torch.equal(weights, kept[0]) and torch.equal(bias, kept[1])
    with pytest.raises(MemoryScheduleError, match=r"weights is read-only but has other storages .*other"):
        swap.leave("weights", storages(w=weights, b=bias, other=torch.zeros(MIB)), read_only=True)


def test_parts_may_change_size_between_steps_and_are_let_go_when_they_come(swap):
    for count in (3, 1, 5):
        gradients = [torch.randn(MIB // 4 + i) for i in range(count)]
        kept = [g.clone() for g in gradients]
        swap.leave("gradients", storages(**{str(i): g for i, g in enumerate(gradients)}))
        swap.come("gradients")
        assert all(torch.equal(a, b) for a, b in zip(gradients, kept))
    before = process_bytes().rss
    big = torch.ones(50 * MIB // 4)
    swap.leave("gradients", storages(g=big))
    swap.come("gradients")
    del big
    assert process_bytes().rss - before < 5 * MIB
    assert swap.leave("gradients", []).counted_bytes == 0
    assert swap.come("gradients").counted_bytes == 0


def test_what_cannot_leave_is_named(swap):
    import numpy as np

    foreign = torch.from_numpy(np.zeros(100_000))
    with pytest.raises(
        MemoryScheduleError, match=r"weights: storage rope\.table \(800000 bytes on cpu\) is not resizable"
    ):
        swap.leave("weights", [("rope.table", foreign.untyped_storage())])
    shared = torch.zeros(100_000).share_memory_()
    with pytest.raises(MemoryScheduleError, match=r"emb .*(shared between processes|not resizable)"):
        swap.leave("weights", storages(emb=shared))
    assert swap.away == set()


def test_moves_out_of_turn_are_refused(swap):
    a = torch.randn(MIB)
    with pytest.raises(MemoryScheduleError, match="weights is not away"):
        swap.come("weights")
    swap.leave("weights", storages(a=a))
    with pytest.raises(MemoryScheduleError, match="weights has left already"):
        swap.leave("weights", storages(a=a))
    with pytest.raises(MemoryScheduleError, match="optimizer: storage master has left with weights"):
        swap.leave("optimizer", storages(master=a))
    swap.come("weights")


def test_a_full_disk_frees_nothing_and_says_what_to_do(swap, folder, monkeypatch):
    tensor = torch.randn(MIB)
    kept = tensor.clone()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    message = rf"weights needs 4194304 bytes in {folder}/swap, where \d+ are free .*memory\.swap_dir"
    with monkeypatch.context() as patch:
        patch.setattr(tiers.os, "posix_fallocate", full)
        with pytest.raises(MemoryScheduleError, match=message):
            swap.leave("weights", storages(w=tensor))
    with monkeypatch.context() as patch:
        patch.setattr(tiers.os, "pwrite", lambda fd, data, at: len(data) // 2)
        with pytest.raises(MemoryScheduleError, match=message):
            swap.leave("weights", storages(w=tensor))
    assert torch.equal(tensor, kept)
    swap.leave("weights", storages(w=tensor))
    swap.come("weights")
    assert torch.equal(tensor, kept)


def test_a_really_full_disk(swap):
    with pytest.raises(MemoryScheduleError, match=r"(No space left|File too large).*memory\.swap_dir"):
        swap.tier.reserve("weights", 1 << 50)


def test_folders_in_memory_are_refused():
    with pytest.raises(MemoryScheduleError, match=r"memory\.swap_dir=/dev/shm is a tmpfs"):
        FileTier("/dev/shm")


def test_swap_files_leave_no_trace(swap, folder):
    swap.leave("weights", storages(w=torch.randn(MIB)))
    assert list((folder / "swap").iterdir()) == []


def test_rows_of_a_rank_carry_measured_bytes_around_each_part(swap):
    weights, buffer = torch.randn(16 * MIB), torch.randn(16 * MIB)
    parts = {"weights": Part(storages(w=weights)), "gradients": Part(storages(b=buffer), keep_bytes=False)}
    left = leave_parts(swap, parts, rank=1, node="here")
    came = come_parts(swap, ["weights"], rank=1, node="here")
    assert [(r.part, r.rank, r.node, r.counted_bytes, r.copied_bytes) for r in left] == [
        ("weights", 1, "here", 64 * MIB, 64 * MIB),
        ("gradients", 1, "here", 64 * MIB, 0),
    ]
    assert all(r.before_bytes - r.after_bytes > 0.9 * r.counted_bytes for r in left)
    assert came[0].after_bytes - came[0].before_bytes > 0.9 * 64 * MIB


def test_extents_lay_storages_end_to_end_over_slabs():
    rows = extents([5, 8, 1], slab_bytes=4)
    assert rows == [
        (0, 0, 0, 0, 4),
        (0, 4, 1, 0, 1),
        (1, 0, 1, 1, 3),
        (1, 3, 2, 0, 4),
        (1, 7, 3, 0, 1),
        (2, 0, 3, 1, 1),
    ]
    assert sum(row[4] for row in rows) == 14


def test_pinned_memory_opens_no_context_before_it_is_used(monkeypatch):
    """Each role makes its tier while the engines of its GPU start, and they count what others take."""
    opened = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: opened.append("stream") or "stream")
    tier = PinnedTier()
    assert not opened
    assert (tier._side, tier._side, opened) == ("stream", "stream", ["stream"])
