"""Checkpoints that hold more than the model: heads of other classes, further layers, a copy of a tied head, constants of older versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file

from hybrid.roles.export import export_model, gather
from hybrid.roles.weights import WeightBuckets
from hybrid.rollout.checkpoint_names import checkpoint_shapes, unused_tensors
from launch.tiny_models import make_tiny_llama
from tests.architecture_checks import load
from tests.unit.test_start_models import edit, refusal


@pytest.fixture
def model(tmp_path) -> Path:
    return make_tiny_llama(tmp_path / "model")


def add_tensors(folder: Path, shards: bool, **extra: tuple[int, ...]) -> None:
    """Write further tensors into a model's weights, which then are one file or several."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights |= {name: torch.ones(shape) for name, shape in extra.items()}
    save_torch_state_dict(weights, folder, max_shard_size=300_000 if shards else 10**9, metadata={"format": "pt"})


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(
    "extra",
    [
        {"score.weight": (1, 128)},
        {"v_head.summary.weight": (1, 128), "v_head.summary.bias": (1,)},
        {"classifier.weight": (2, 128)},
        {"model.layers.2.mlp.up_proj.weight": (256, 128), "model.vision_tower.0.weight": (8, 8)},
        {"model.layers.0.self_attn.rotary_emb.inv_freq": (16,), "model.rotary_emb.inv_freq": (16,)},
    ],
)
def test_tensors_of_no_part_of_the_model_are_left_out_with_a_note(model, extra, shards):
    before = checkpoint_shapes(model)
    add_tensors(model, shards, **extra)
    assert (model / "model.safetensors.index.json").is_file() == shards
    assert refusal(model) == ""
    constants = "inv_freq" in str(extra)  # both libraries leave these out by themselves
    assert all(("left out of training" in note) and min(extra) in note for note in refusal.notes)
    assert len(refusal.notes) == (0 if constants else 1)
    unused = unused_tensors(str(model))
    assert unused == (set() if constants else set(extra))
    assert checkpoint_shapes(model, unused) == before


def test_a_copy_of_a_tied_head_is_no_unused_tensor(model):
    edit(model / "config.json", tie_word_embeddings=True)
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert refusal(model) == ""
    assert refusal.notes == []
    assert unused_tensors(str(model)) == set()


def test_an_export_holds_the_trained_tensors_and_no_others(model, tmp_path):
    before = load_file(model / "model.safetensors")
    add_tensors(model, True, **{"v_head.summary.weight": (1, 128)})
    policy = load(model)
    state = gather(WeightBuckets(policy.hf, 0, 2**17, as_loaded=True), is_writer=True)
    assert export_model(policy.hf, state, str(model), tmp_path / "runs" / "model", None, False).problem is None
    exported = load_file(tmp_path / "runs" / "model" / "model.safetensors")
    assert exported.keys() == before.keys()
    assert all(torch.equal(exported[name], before[name]) for name in before)


def test_sent_weights_are_those_that_the_engine_expects(model):
    add_tensors(model, False, **{"value_head.weight": (1, 128), "score.weight": (1, 128)})
    sent = {name: shape for name, _, shape in WeightBuckets(load(model).hf, 0, 10**6).names_shapes()}
    assert sent == checkpoint_shapes(model, unused_tensors(str(model)))
