"""Two ranks send together: one writes, rank 0 calls the engines, and whoever fails says so to the others, which do not wait."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from hybrid.errors import HybridError
from hybrid.rollout.sender import InStep, make_sender

WORLD = 2
BUCKETS = [[("a", torch.ones(4))], [("b", torch.full((4,), 2.0))]]


class Engine:
    """Stands for an engine: keeps what it is sent."""

    def __init__(self, fails: bool):
        self.weights, self.fails, self.version = {}, fails, None

    def start_weight_update(self):
        pass

    def update_weights(self, request):
        if self.fails:
            raise ValueError("the engine is full")
        [path] = request["update_info"]["paths"].values()
        self.weights |= {name: tensor.tolist() for name, tensor in load_file(path).items()}

    def finish_weight_update(self):
        pass

    def set_weight_version(self, version):
        self.version = version


class BrokenSource:
    """Yields one bucket, then fails, on the rank that has it."""

    def __iter__(self):
        yield BUCKETS[0]
        raise MemoryError("no room to gather")


def _rank(rank: int, store: str, queue) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    outcomes = {}
    cases = {
        "all well": (BUCKETS, False),
        "engine fails": (BUCKETS, True),
        "rank 1 fails": (BrokenSource() if rank == 1 else BUCKETS, False),
    }
    for case, (source, engine_fails) in cases.items():
        engine = Engine(engine_fails)
        sender = make_sender("shm", rank, [engine] if rank == 0 else ["not called"], bucket_bytes=16, timeout_s=20)
        error = None
        try:
            sender.send(source, 5)
        except HybridError as raised:
            error = str(raised)
        outcomes[case] = (error, engine.weights, engine.version)
    outcomes["files left open"] = [f for f in os.listdir("/proc/self/fd") if "hybrid-weights" in _target(f)]
    queue.put((rank, outcomes))
    dist.destroy_process_group()


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    context = mp.get_context("spawn")
    queue = context.Queue()
    store = str(tmp_path_factory.mktemp("rendezvous") / "store")
    processes = [context.Process(target=_rank, args=(rank, store, queue)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    try:
        return dict(queue.get(timeout=60) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def test_a_sync_of_two_ranks_reaches_the_engine_whole(ranks):
    error, weights, version = ranks[0]["all well"]
    assert error is None and ranks[1]["all well"][0] is None
    assert weights == {"a": [1.0] * 4, "b": [2.0] * 4}
    assert version == 5
    assert ranks[1]["all well"][1] == {}


@pytest.mark.parametrize(
    ("case", "says"), [("engine fails", "the engine is full"), ("rank 1 fails", "no room to gather")]
)
def test_a_failure_of_one_rank_reaches_all_at_once(ranks, case, says):
    for rank in range(WORLD):
        error, _, version = ranks[rank][case]
        assert says in error
        assert version is None
    failing = 0 if case == "engine fails" else 1
    assert f"actor rank {failing}" in ranks[1 - failing][case][0]


def test_no_shared_memory_is_left(ranks):
    assert ranks[0]["files left open"] == ranks[1]["files left open"] == []


def test_a_rank_whose_weights_fail_goes_on_with_placeholders_of_the_same_shapes():
    """Its peers wait for it in vLLM's collectives, chunk by chunk: fewer tensors of its own would leave them there."""

    class Failing:
        def names_shapes(self):
            return [("a", torch.float32, (4,)), ("b", torch.bfloat16, (2, 3)), ("c", torch.float32, ())]

        def __iter__(self):
            yield [("a", torch.ones(4))]
            raise RuntimeError("no room to gather b")

    stream = InStep(Failing(), "cpu")
    sent = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream]
    assert sent == Failing().names_shapes()
    assert str(stream.error) == "no room to gather b"


def test_a_reader_that_stops_is_no_failure_of_the_weights():
    class Whole:
        def names_shapes(self):
            return [("a", torch.float32, (4,))]

        def __iter__(self):
            yield [("a", torch.ones(4))]

    stream = InStep(Whole(), "cpu")
    for _ in stream:
        break
    assert stream.error is None
    assert len(list(stream)) == 1
