"""Parts leave a CUDA device for pinned memory, or a file, and come back bit by bit; the device's memory really falls."""

import pytest
import torch

from hybrid.errors import MemoryScheduleError
from hybrid.memory.probe import PeakSampler, device_used_bytes, measured_bytes, release_free_memory
from hybrid.memory.swap import Part, StorageSwap, come_parts, leave_parts
from hybrid.memory.tiers import FileTier, PinnedTier, in_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20


@pytest.fixture(params=["pinned", "file"])
def swap(request, tmp_path):
    if request.param == "file" and in_memory(tmp_path):
        pytest.skip(f"{tmp_path} is in memory: pass --basetemp with a folder on a disk")
    tier = PinnedTier(slab_bytes=64 * MIB) if request.param == "pinned" else FileTier(tmp_path)
    return StorageSwap(tier, "cuda")


def storages(**tensors):
    return [(name, tensor.untyped_storage()) for name, tensor in tensors.items()]


def test_tensors_and_views_come_back_bit_identical(swap):
    flat = torch.randn(50 * MIB, device="cuda")  # 200 MiB: more than three slabs, the last one in part.
    half = torch.randn(3 * MIB + 7, device="cuda").bfloat16()
    view = flat[1000:2000].view(10, 100)
    kept = [t.cpu() for t in (flat, view, half)]
    moved = swap.leave("weights", storages(flat=flat, half=half))
    assert moved.counted_bytes == flat.numel() * 4 + half.numel() * 2
    swap.come("weights")
    assert all(torch.equal(a.cpu(), b) for a, b in zip((flat, view, half), kept))
    flat[1000] = 7.0
    assert view[0, 0] == 7.0


def test_memory_falls_by_what_was_counted_and_twenty_cycles_do_not_grow(swap):
    release_free_memory("cuda")
    tensors = {str(i): torch.randn(n * MIB // 4, device="cuda") for i, n in enumerate([512, 128, 64, 30, 12])}
    awake = measured_bytes("cuda"), device_used_bytes()
    seen = set()
    for _ in range(20):
        counted = swap.leave("optimizer", storages(**tensors)).counted_bytes
        release_free_memory("cuda")
        asleep = measured_bytes("cuda"), device_used_bytes()
        assert awake[0] - asleep[0] >= counted
        assert awake[1] - asleep[1] >= 0.95 * counted
        swap.come("optimizer")
        seen.add((asleep[0], measured_bytes("cuda")))
    assert len(seen) == 1


def test_work_in_flight_on_any_stream_ends_before_a_part_leaves(swap):
    tensor, other = torch.zeros(64 * MIB, device="cuda"), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(500_000_000)
        tensor.add_(3)
    swap.leave("weights", storages(w=tensor))
    scribble = torch.full((64 * MIB,), -1.0, device="cuda")  # Takes the freed block if the copy out had not ended.
    swap.come("weights")
    assert tensor.eq(3).all() and scribble.eq(-1).all()


def test_work_queued_after_coming_sees_the_bytes(swap):
    tensor = torch.ones(64 * MIB, device="cuda")
    for _ in range(5):
        swap.leave("weights", storages(w=tensor))
        swap.come("weights")
        assert tensor.sum().item() == 64 * MIB


def test_slabs_are_pinned_once_and_shared_by_parts_in_turn():
    tier = PinnedTier(slab_bytes=64 * MIB)
    swap = StorageSwap(tier, "cuda")
    a, b = torch.randn(25 * MIB, device="cuda"), torch.randn(20 * MIB, device="cuda")
    kept = a.cpu(), b.cpu()
    for _ in range(3):
        for part, tensor in (("a", a), ("b", b)):
            swap.leave(part, storages(t=tensor))
            swap.come(part)
    assert tier.pinned_bytes == 128 * MIB
    swap.leave("a", storages(t=a))
    swap.leave("b", storages(t=b))
    assert tier.pinned_bytes == 256 * MIB
    swap.come("b")
    swap.come("a")
    assert torch.equal(a.cpu(), kept[0]) and torch.equal(b.cpu(), kept[1])


def test_slabs_of_other_sizes_are_refused():
    with pytest.raises(MemoryScheduleError, match="power of two"):
        PinnedTier(slab_bytes=100 * MIB)


def test_small_storages_and_those_on_the_host_stay(swap):
    small, host = torch.ones(1000, device="cuda"), torch.ones(MIB)
    assert swap.leave("weights", storages(small=small, host=host)).counted_bytes == 0
    assert small.sum() == 1000 and host.sum() == MIB


def test_read_only_parts_are_written_once_and_stateless_ones_never(swap):
    weights, bucket = torch.randn(16 * MIB, device="cuda"), torch.randn(16 * MIB, device="cuda")
    kept = weights.cpu()
    parts = {
        "weights": Part(storages(w=weights), read_only=True),
        "gradients": Part(storages(b=bucket), keep_bytes=False),
    }
    first = leave_parts(swap, parts, rank=0, node="here")
    come_parts(swap, list(parts), rank=0, node="here")
    second = leave_parts(swap, parts, rank=0, node="here")
    assert [r.copied_bytes for r in first] == [64 * MIB, 0] and [r.copied_bytes for r in second] == [0, 0]
    assert all(r.before_bytes - r.after_bytes >= r.counted_bytes for r in first + second)
    come_parts(swap, list(parts), rank=0, node="here")
    assert torch.equal(weights.cpu(), kept) and not bucket.any()


def test_training_that_leaves_between_steps_equals_training_that_stays(swap):
    def train(leaves):
        torch.manual_seed(0)
        model = torch.nn.Linear(2048, 2048, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(5):
            model(torch.randn(8, 2048, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if leaves:
                state = {f"{i}.{k}": v for i, s in enumerate(optimizer.state.values()) for k, v in s.items()}
                swap.leave("weights", storages(**dict(model.named_parameters())))
                swap.leave("optimizer", storages(**state))
                release_free_memory("cuda")
                swap.come("optimizer")
                swap.come("weights")
        return model.weight

    assert torch.equal(train(leaves=False), train(leaves=True))


def test_peaks_are_per_span():
    with PeakSampler("cuda") as sampler:
        block = torch.ones(100 * MIB // 4, device="cuda")
        del block
        release_free_memory("cuda")
        first, second = sampler.take(), sampler.take()
    assert first - second >= 100 * MIB
