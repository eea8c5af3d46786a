"""An engine on a CUDA device: what it holds itself falls when it sleeps, whatever other processes do meanwhile."""

import multiprocessing

import pytest
import torch

from hybrid.memory.probe import device_used_bytes
from hybrid.rollout.requests import EngineOptions
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
