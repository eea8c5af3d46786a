"""Architectures: names of weights, packed passes and gradients of tiny models, against transformers' own. The table is in tests/e2e."""

from __future__ import annotations

import shutil

import pytest
import torch

from hybrid.config import load_run, resolve
from hybrid.data.batches import Lengths
from hybrid.errors import ConfigError
from hybrid.planning.passes import packed_pass, with_layers
from hybrid.planning.shapes import read_config
from hybrid.roles.weights import WeightBuckets, checkpoint_parts
from hybrid.rollout.checkpoint_names import checkpoint_shapes
from hybrid.start_check import check_passes
from tests.architecture_checks import eager, gradient_norms, load, packed_difference
from tests.tiny_architectures import BASE, TRAINED, make_tiny_architecture, tiny_architecture_config
from tests.unit.config_profile import PROFILE

COMPUTED = ("qwen3_moe", "gpt_neox", "deepseek_v3")
"""Rows whose passes are compared here; tests/e2e compares all."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Makes a row's folder once."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = make_tiny_architecture(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.mark.parametrize("name", TRAINED)
def test_c05_c06_weights_have_the_names_and_shapes_of_the_checkpoint(folders, name):
    source = WeightBuckets(eager(folders(name)), 0, 10**5)
    said = {name: shape for name, _, shape in source.names_shapes()}
    assert said == checkpoint_shapes(folders(name))
    sent = [(name, tuple(tensor.shape)) for bucket in source for name, tensor in bucket]
    assert sent == list(said.items())


@pytest.mark.parametrize("name", COMPUTED)
def test_packed_passes_are_exact(folders, name):
    assert packed_difference(folders(name)) <= 1e-5
    ours, theirs, apart = gradient_norms(folders(name))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert apart <= 1e-5 * theirs


def test_sent_weights_are_those_of_the_checkpoint(folders):
    from safetensors.torch import load_file

    folder = folders("deepseek_v3")
    sent = {name: tensor for bucket in WeightBuckets(load(folder).hf, 0, 10**5) for name, tensor in bucket}
    on_disk = load_file(folder / "model.safetensors")
    assert sent.keys() == on_disk.keys()
    assert all(torch.equal(sent[name], on_disk[name]) for name in sent)


def test_buckets_are_bounded_and_a_larger_tensor_comes_alone(folders):
    bound = 40_000
    source = WeightBuckets(eager(folders("qwen3_moe")), 0, bound)
    for bucket in source:
        parts_of_one = len({name.partition(".experts.")[0] for name, _ in bucket}) == 1
        assert sum(t.nbytes for _, t in bucket) <= bound or len(bucket) == 1 or parts_of_one
    loaded = WeightBuckets(source.hf, 0, bound, as_loaded=True)
    named = dict(source.hf.named_parameters())
    assert {name: tuple(t.shape) for bucket in loaded for name, t in bucket} == {
        name: tuple(p.shape) for name, p in named.items()
    }


def test_checkpoints_that_join_what_transformers_splits_are_refused():
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import Chunk, WeightConverter

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_architecture_config("llama"))
    targets = [f"self_attn.{letter}_proj.weight" for letter in "qkv"]
    model._weight_conversions = [WeightConverter("self_attn.qkv_proj.weight", targets, operations=[Chunk(dim=0)])]
    with pytest.raises(ConfigError, match=r"join tensors .* `model.layers.0.self_attn.qkv_proj.weight`"):
        checkpoint_parts(model)


def planned(folder, **options):
    """The trace of a training pass of 16 tokens."""
    usual = {"implementation": "sdpa", "checkpointing": False, "backward": True, "device": "cpu"}
    usual |= {"dtype": torch.bfloat16, "trust_remote_code": False}
    return packed_pass(str(folder), "policy", (Lengths(0, 8, 8),), **(usual | options))


def test_experts_are_planned_in_fp32(folders):
    held = [planned(folders("qwen3_moe"), dtype=dtype).held for dtype in (torch.bfloat16, torch.float32)]
    assert held[0] < held[1] < 2 * held[0]


def test_values_that_are_shorter_than_keys_are_planned_with_flash_attention(folders):
    assert "first layer" in planned(folders("deepseek_v2"), implementation="flash_attention_2").highest


def config_of(folder, model_type, **fields):
    """Save the config of a tiny `model_type`, with an expert or two where it has some."""
    from transformers import AutoConfig

    AutoConfig.for_model(model_type, **(BASE | fields)).save_pretrained(folder)
    return folder


def test_router_biases_that_are_not_trained_are_planned(tmp_path):
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64}
    assert planned(config_of(tmp_path, "ernie4_5_moe", **experts)).held > 0


def test_layers_with_experts_stand_for_deep_models_that_begin_with_dense_ones(tmp_path):
    folder = config_of(tmp_path / "glm", "glm4_moe_lite", num_hidden_layers=5)
    assert with_layers(read_config(str(folder)), 3).mlp_layer_types == ["sparse"] * 3
    folder = config_of(tmp_path / "ernie", "ernie4_5_moe", num_hidden_layers=5, moe_layer_start_index=4)
    assert with_layers(read_config(str(folder)), 3).moe_layer_start_index == 0


@pytest.mark.parametrize(
    ("model_type", "fields", "checkpointing", "said"),
    [
        ("jetmoe", {"num_local_experts": 4, "kv_channels": 32}, False, "depends on values that only a run has"),
        (
            "ctrl",
            {"n_embd": 128, "n_head": 4, "n_layer": 2, "dff": 256},
            True,
            "gradient_checkpointing: true is invalid",
        ),
        ("nemotron", {}, False, "NemotronAttention is not told which rows are packed"),
    ],
)
def test_passes_that_cannot_be_planned_are_refused_in_a_sentence(tmp_path, model_type, fields, checkpointing, said):
    folder = config_of(tmp_path, model_type, **fields)
    with pytest.raises(ConfigError, match=said) as raised:
        planned(folder, checkpointing=checkpointing)
    assert str(folder) in str(raised.value)
    profile = tmp_path / "p.yaml"
    profile.write_text(PROFILE)
    given = [f"model.path={folder}", f"model.gradient_checkpointing={checkpointing}"]
    with pytest.raises(ConfigError, match=said):  # a dry run has no plan
        check_passes(resolve(load_run(profile, given)))


def test_weights_that_the_files_lack_are_an_error(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(folders("llama"), tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="lack 1 weights, such as `lm_head"):
        load(tmp_path / "model")


def test_a_model_that_computes_attention_by_itself_is_refused_when_it_is_planned(tmp_path):
    from transformers import BloomConfig

    BloomConfig(hidden_size=64, n_layer=2, n_head=2, vocab_size=512).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="past transformers' interface"):
        planned(tmp_path, backward=False, dtype=torch.float32)
