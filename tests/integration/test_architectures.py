"""Architectures whose weights or layers vLLM takes in ways of their own, from their plan to their export. tests/e2e has all of them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid.errors import RolloutError
from hybrid.roles.weights import WeightBuckets
from hybrid.rollout.sender import make_sender
from tests.architecture_checks import load
from tests.integration.architecture_row import BUCKET_BYTES, architecture_row, engine_options
from tests.integration.engine_process import EngineProcess
from tests.tiny_architectures import make_tiny_architecture

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with ExitStack() as stack:
        yield stack.push(EngineProcess(engine_options(tmp_path_factory.mktemp("none"), torch.float32)))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_neox", "deepseek_v3"])
def test_c05_c06_an_architecture_is_exact_from_plan_to_export(engine, tmp_path, name):
    row = architecture_row(engine, name, tmp_path)
    assert row.is_exact(), row


def test_only_weights_that_vllm_takes_must_arrive(engine, tmp_path):
    folder = make_tiny_architecture("llama_tied", tmp_path / "model")
    on_disk = load_file(folder / "model.safetensors")
    on_disk["lm_head.weight"] = on_disk["model.embed_tokens.weight"].clone()
    save_file(on_disk, folder / "model.safetensors", metadata={"format": "pt"})
    engine.become(engine_options(folder, torch.float32))
    buckets = list(WeightBuckets(load(folder).hf, 0, BUCKET_BYTES))
    assert "lm_head.weight" not in {name for bucket in buckets for name, _ in bucket}
    sender = make_sender("shm", 0, [engine], BUCKET_BYTES)
    sender.send(buckets, 1)
    without = [[(n, t) for n, t in bucket if "layers.1.self_attn.q_proj" not in n] for bucket in buckets]
    with pytest.raises(RolloutError, match=r"1 of 21 weights were not sent: `model.layers.1.self_attn.q_proj"):
        sender.send(without, 2)
    sender.send(buckets, 3)
