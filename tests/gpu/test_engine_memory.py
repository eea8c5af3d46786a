"""An engine on a CUDA device: what it holds itself falls when it sleeps, whatever other processes do meanwhile."""

import multiprocessing

import pytest
import torch
from safetensors.torch import load_file

from hybrid.memory.probe import device_used_bytes, measured_bytes, release_free_memory
from hybrid.rollout.requests import EngineOptions
from hybrid.rollout.sender import make_sender
from launch.tiny_models import make_tiny_llama
from tests.integration.engine_process import EngineProcess

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20
KV_BYTES = 256 * MIB
BOTH = ["weights", "kv_cache"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_tiny_llama(folder)
    options = EngineOptions(str(folder), "bfloat16", "cuda", KV_BYTES, max_model_len=128, max_num_seqs=16)
    with EngineProcess(options) as started:
        yield started


def fell(rows):
    return rows[0]["before_bytes"] - rows[-1]["after_bytes"]


def test_what_the_engine_holds_falls_as_the_device_does(engine):
    """Proves that our sum over vLLM's books is what the device gives back."""
    before = device_used_bytes()
    rows = engine.leave(BOTH)
    counted = sum(row["counted_bytes"] for row in rows)
    assert fell(rows) >= 0.9 * counted and abs(before - device_used_bytes() - fell(rows)) <= 0.1 * counted
    engine.come(BOTH)


def _hold(size, started, ended):
    block = torch.ones(size, dtype=torch.uint8, device="cuda")
    started.set()
    ended.wait()
    del block


def test_another_process_that_allocates_meanwhile_does_not_end_the_sleep(engine):
    """A process opens its context and takes more than leaves; vLLM's own check would call that a failure."""
    context = multiprocessing.get_context("spawn")
    started, ended = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(4 * KV_BYTES, started, ended))
    other.start()
    rows = engine.leave(BOTH)
    assert started.wait(60)
    try:
        assert fell(rows) >= 0.9 * sum(row["counted_bytes"] for row in rows)
        engine.come(BOTH)
        assert fell(engine.leave(BOTH)) >= 0.9 * KV_BYTES
    finally:
        ended.set()
        other.join(30)


class Source:
    def __init__(self, weights):
        self.weights = {name: weight.to("cuda", torch.bfloat16) for name, weight in weights.items()}

    def names_shapes(self):
        return [(name, weight.dtype, tuple(weight.shape)) for name, weight in self.weights.items()]

    def __iter__(self):
        yield list(self.weights.items())


def test_a_sync_takes_a_buffer_of_the_model_and_gives_it_back(tmp_path):
    """Of a bucket of 2 GiB a small model uses what it needs; three syncs leave nothing behind on either side."""
    folder = make_tiny_llama(tmp_path / "llama", vocab_size=50_000, hidden_size=512)
    source = Source(load_file(folder / "model.safetensors"))
    size = sum(weight.nbytes for weight in source.weights.values())
    options = EngineOptions(str(folder), "bfloat16", "cuda", KV_BYTES, max_model_len=128, max_num_seqs=16)
    with EngineProcess(options) as started:
        sender = make_sender("ipc", 0, [started], 2**31)
        held, awake = [], started.stats()["measured_bytes"]
        for version in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            started.take_peak()
            sender.send(source, version)
            peak = started.take_peak()
            assert peak["peak_bytes"] > peak["held_bytes"]  # it clones what it receives
            assert torch.cuda.max_memory_allocated() - before <= 1.1 * size
            release_free_memory("cuda")
            held.append((measured_bytes("cuda"), started.stats()["measured_bytes"]))
        assert held[1] == held[2] and held[2][1] <= awake + 0.1 * size
