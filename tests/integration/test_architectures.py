"""Architectures whose weights or layers vLLM takes in ways of their own, from their plan to their export. tests/e2e has all of them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from hybrid.doctor.full.engine_process import EngineProcess
from hybrid.errors import RolloutError
from hybrid.roles.weights import WeightBuckets
from hybrid.rollout.checkpoint_names import unused_tensors
from hybrid.rollout.sender import make_sender
from tests.architecture_checks import load
from tests.integration.architecture_row import (
    BUCKET_BYTES,
    architecture_row,
    engine_options,
    greedy,
    mean_difference,
    train,
)
from tests.integration.ranks import run_ranks
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


def _gathered(rank, world, port, folders):
    """The weights that each model sends under ZeRO-3, on this rank."""
    import os

    import torch
    from torch import distributed as dist

    from hybrid.roles.models import ModelOptions, load_policy
    from hybrid.roles.zero import FrozenModel, load_deepspeed, load_partitioned

    os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    load_deepspeed().init_distributed("gloo", auto_mpi_discovery=False)
    sent = {}
    for folder in folders:
        options = ModelOptions(folder, torch.float32, "sdpa")
        model = FrozenModel(
            load_partitioned(3, torch.float32, lambda options=options: load_policy(options)), 3, torch.float32
        )
        buckets = WeightBuckets(model.module.hf, 3, BUCKET_BYTES)
        sent[folder] = {name: tensor.clone().numpy() for bucket in buckets for name, tensor in bucket}
        assert [name for name, _, _ in buckets.names_shapes()] == list(sent[folder])
    return sent


def test_zero_3_gathers_the_weights_of_the_checkpoint(tmp_path):
    folders = [str(make_tiny_architecture(n, tmp_path / n)) for n in ("qwen3_moe", "llama_tied", "deepseek_v3")]
    for sent in run_ranks(_gathered, folders):
        for folder, weights in sent.items():
            on_disk = load_file(f"{folder}/model.safetensors")
            assert weights.keys() == on_disk.keys()
            assert all(torch.equal(torch.from_numpy(weights[name]), on_disk[name]) for name in on_disk)


def test_only_weights_that_vllm_takes_must_arrive(engine, tmp_path):
    folder = make_tiny_architecture("llama_tied", tmp_path / "model")
    on_disk = load_file(folder / "model.safetensors")
    on_disk["lm_head.weight"] = on_disk["model.embed_tokens.weight"].clone()
    save_file(on_disk, folder / "model.safetensors", metadata={"format": "pt"})
    engine.become(engine_options(folder, torch.float32))
    policy = load(folder).eval()
    train(policy, 0.05)
    buckets = list(WeightBuckets(policy.hf, 0, BUCKET_BYTES))
    assert "lm_head.weight" not in {name for bucket in buckets for name, _ in bucket}
    sender = make_sender("shm", 0, [engine], BUCKET_BYTES)
    sender.send(buckets, 1)
    assert mean_difference(policy, greedy(engine, 1)) < 1e-3  # the head has followed the embeddings
    without = [[(n, t) for n, t in bucket if "layers.1.self_attn.q_proj" not in n] for bucket in buckets]
    with pytest.raises(RolloutError, match=r"1 of 21 weights were not sent: `model.layers.1.self_attn.q_proj"):
        sender.send(without, 2)
    sender.send(buckets, 3)


def test_a_head_of_another_class_is_left_out(engine, tmp_path):
    """vLLM refuses tensors that it does not know, such as the value head of a model that was trained with one."""
    folder = make_tiny_architecture("llama", tmp_path / "model")
    on_disk = load_file(folder / "model.safetensors")
    on_disk |= {"v_head.summary.weight": torch.ones(1, 128), "model.layers.2.mlp.up_proj.weight": torch.ones(256, 128)}
    (folder / "model.safetensors").unlink()
    save_torch_state_dict(on_disk, folder, max_shard_size=300_000, metadata={"format": "pt"})
    left_out = tuple(sorted(unused_tensors(str(folder))))
    engine.become(replace(engine_options(folder, torch.float32), left_out=left_out))
    policy = load(folder).eval()
    assert mean_difference(policy, greedy(engine, 0)) < 1e-3
    train(policy, 0.05)
    sender = make_sender("shm", 0, [engine], BUCKET_BYTES)
    for version in (1, 2):
        sender.send(WeightBuckets(policy.hf, 0, BUCKET_BYTES), version)
        assert mean_difference(policy, greedy(engine, version)) < 1e-3
