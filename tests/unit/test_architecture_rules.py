"""Which models are refused, by what their config.json asks for, and how the command says so."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hybrid.cli import app
from hybrid.config import load_run
from hybrid.config.architecture_page import PAGE, page
from hybrid.config.architectures import TRAINED as TABLE
from hybrid.config.architectures import kernel_refusal, refusal, text_config
from hybrid.config.kv_cache import cache_groups, kv_token_bytes
from hybrid.config.resolve import model_config
from tests.tiny_architectures import TRAINED, tiny_architecture_config
from tests.unit.config_profile import PROFILE
from tests.unit.config_profile import refusal as refused_profile

SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
STATE = "keep a state along the sequence"


@pytest.fixture
def folder(tmp_path):
    """Writes a config.json and returns its folder."""

    def write(**config):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES | config))
        return tmp_path / "model"

    return write


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(PROFILE)
    return path


def why(tokens=80, sampled=True, **config):
    found = refusal(SIZES | config, tokens, sampled)
    return found and found.why


@pytest.mark.parametrize("name", TRAINED)
def test_tiny_models_of_the_table_are_not_refused(name):
    config = tiny_architecture_config(name).to_dict()
    assert why(**config) is None
    assert config["model_type"] in TABLE


def test_every_type_of_the_table_has_a_tiny_model():
    assert {model_type for model_type, _ in TRAINED.values()} == set(TABLE)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}, f"linear_attention .*{STATE}"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, f"type mamba .*{STATE}"),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention"], "mamba_d_state": 16},
            rf"type mamba \(mamba_d_state; linear_attention in layer_types\) {STATE}",
        ),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
            rf"type linear_attention \(layer_types\) {STATE}",
        ),
        ({"model_type": "mamba2", "state_size": 16}, rf"type mamba2 \(state_size\) {STATE}"),
        ({"model_type": "rwkv", "rescale_every": 6}, rf"type rwkv \(rescale_every\) {STATE}"),
        ({"model_type": "bert"}, r"it is an encoder.*\(is_decoder=false\)"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "type conv .* neighbouring tokens"),
        ({"model_type": "new_one", "layer_types": ["full_attention", "retention"]}, "type retention .* not known"),
        ({"model_type": "qwen3_next", "linear_num_value_heads": 32}, f"linear_num_value_heads.*{STATE}"),
        ({"model_type": "jamba", "mamba_d_state": 16}, f"mamba_d_state.*{STATE}"),
        ({"model_type": "recurrent_gemma", "block_types": ["recurrent", "attention"]}, f"block_types.*{STATE}"),
        ({"model_type": "zamba2", "layers_block_type": ["hybrid", "mamba"]}, "type hybrid"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "index_topk"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi"),
        ({"model_type": "llama4_text"}, "attn_temperature_tuning"),
        ({"model_type": "mine", "attn_config": {"alibi": True}}, "ALiBi"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 2}}, "vision_config"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"model_type": "cohere2", "tie_word_embeddings": False}, "ignores its head"),
        ({"model_type": "olmoe", "tie_word_embeddings": True}, "does not tie its head"),
        ({"model_type": "gptj"}, "GPTJForCausalLM computes attention past"),
        ({"model_type": "stablelm"}, "StableLmForCausalLM computes attention past"),
        ({"model_type": "no_such_type"}, "no causal language model of model_type no_such_type"),
    ],
)  # fmt: skip
def test_c04_what_packed_rows_or_vllm_would_get_wrong_is_refused(config, says):
    import re

    assert re.search(says, why(**config))


def test_other_types_are_not_refused_as_such():
    assert why(model_type="exaone4", layer_types=["full_attention", "sliding_attention"]) is None
    assert why(model_type="granitemoehybrid", layer_types=["attention", "attention"], mamba_d_state=16) is None
    assert why(model_type="llama4_text", attention_chunk_size=8192, attn_temperature_tuning=False) is None
    assert why(model_type="bert", is_decoder=True) is None
    assert why(model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Mine"}) is None


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "soft caps (attn_logit_softcapping)"),
        ({"model_type": "gpt_oss"}, "sinks"),
    ],
)  # fmt: skip
def test_a_softmax_without_a_cuda_kernel_is_refused_there(folder, profile, config, says):
    path = folder(**config)
    cuda = [f"model.path={path}", "cluster.device=cuda", "model.attention=sdpa"]
    said = refused_profile(profile, *cuda)
    assert f"model.path: {path} is invalid: no CUDA kernel computes packed attention with {says}" in said
    assert ("Set model.attention=flash_attention_2" in said) == ("caps" in says)
    load_run(profile, [f"model.path={path}", "cluster.device=cpu"])


def test_sinks_and_chunks_are_refused_with_flash_attention():
    assert "sinks" in kernel_refusal({"model_type": "gpt_oss"}, "flash_attention_2", "cuda").why
    assert "chunks" in kernel_refusal({"attention_chunk_size": 8192}, "flash_attention_2", "cuda").why
    assert kernel_refusal({"attention_chunk_size": 8192}, "sdpa", "cuda") is None
    assert kernel_refusal({"attn_logit_softcapping": 50.0}, "flash_attention_2", "cuda") is None


def test_a_head_matters_to_the_sampler_alone():
    assert why(model_type="cohere2", tie_word_embeddings=False, sampled=False) is None
    assert why(model_type="cohere2", tie_word_embeddings=True) is None


def test_long_positions_are_refused_for_long_sequences():
    config = {"model_type": "phi3", "original_max_position_embeddings": 4096, "rope_scaling": {"type": "longrope"}}
    assert why(tokens=4096, **config) is None
    assert "more than 4096 tokens" in why(tokens=4097, **config)


@pytest.mark.parametrize("command", [["plan"], ["train"], ["train", "--dry-run"]])
def test_c04_a_refused_model_ends_every_command_with_status_2(folder, profile, command):
    path = folder(model_type="lfm2", layer_types=["conv", "full_attention"])
    (path / "model.safetensors").touch()
    ended = CliRunner().invoke(app, [*command[:1], str(profile), f"model.path={path}", *command[1:]])
    assert ended.exit_code == 2
    assert "its layers of type conv (layer_types) mix neighbouring tokens" in ended.output


def test_other_packed_models_are_checked_too(folder, profile):
    path = folder(model_type="mamba", state_size=16)
    critic = ["algorithm.advantage=gae", f"critic.path={path}"]
    assert f"critic.path: {path} is invalid: its layers of type mamba" in refused_profile(profile, *critic)
    reference = ["algorithm.kl_coef=0.1", f"reference.path={path}"]
    assert f"reference.path: {path} is invalid: its layers of type mamba" in refused_profile(profile, *reference)


def test_latent_attention_in_fp32_on_cpu_is_refused_by_name(folder, profile):
    path = folder(model_type="deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64, num_key_value_heads=4)
    assert "model.dtype: float32 is invalid: vLLM" in refused_profile(
        profile, f"model.path={path}", "model.dtype=float32"
    )


def test_a_model_that_vllm_runs_on_gpus_only_is_refused_on_cpu(folder, profile):
    given = [f"model.path={folder(model_type='ernie4_5_moe')}", "model.attention=sdpa"]
    assert "vLLM on CPU leaves out the bias of its router" in refused_profile(profile, *given)
    load_run(profile, [*given, "cluster.device=cuda", "cluster.gpus_per_node=2"])


def test_heads_of_keys_and_values_and_gpus_divide_one_another(folder, profile):
    path = folder(model_type="llama", num_attention_heads=12, num_key_value_heads=3, hidden_size=384)
    said = refused_profile(profile, f"model.path={path}", "rollout.tensor_parallel_size=2")
    assert "rollout.tensor_parallel_size: 2 is invalid" in said
    assert "3 heads of keys and values" in said
    path = folder(model_type="llama", num_key_value_heads=1)
    load_run(profile, [f"model.path={path}", "rollout.tensor_parallel_size=2"])


def test_c14_older_names_are_those_of_today(folder, profile):
    path = folder(model_type="gpt2", n_embd=768, n_head=12, n_layer=6, n_positions=1024)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in SIZES}))
    found = model_config(str(path))
    assert (found["hidden_size"], found["num_attention_heads"], found["num_hidden_layers"]) == (768, 12, 6)
    assert found["max_position_embeddings"] == 1024
    assert load_run(profile, [f"model.path={path}"]).model.path == str(path)
    assert "5 does not divide the 12 attention heads" in refused_profile(
        profile, f"model.path={path}", "rollout.tensor_parallel_size=5"
    )
    assert text_config({"n_head": 71, "multi_query": True})["num_key_value_heads"] == 1


V2_LITE = {
    "model_type": "deepseek_v2", "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_c40_latent_attention_keeps_one_vector_on_every_gpu(tp):
    assert kv_token_bytes(V2_LITE, tp, 2) == 31_104


def test_fewer_heads_than_gpus_are_repeated():
    assert kv_token_bytes(SIZES, 1, 2) == 2 * 2 * 2 * 32 * 2
    assert kv_token_bytes(SIZES, 2, 2) == kv_token_bytes(SIZES, 8, 2) == 2 * 2 * 1 * 32 * 2


@pytest.mark.parametrize(
    ("config", "layers", "full", "sliding"),
    [
        ({"num_hidden_layers": 4}, 4, 1, 0),
        ({"num_hidden_layers": 4, "sliding_window": 64}, 4, 0, 1),
        ({"num_hidden_layers": 4, "sliding_window": 64, "use_sliding_window": False}, 4, 1, 0),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}, 2, 1, 1),
        ({"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4, "sliding_window": 64}, 4, 1, 5),
        ({"layer_types": ["sliding_attention"] * 22 + ["full_attention"] * 4, "sliding_window": 64}, 4, 1, 6),
        ({"layer_types": ["sliding_attention"] * 13 + ["full_attention"] * 12, "sliding_window": 64}, 13, 1, 1),
    ],
)
def test_windows_make_groups_of_layers_as_vllm_counts_them(config, layers, full, sliding):
    groups = cache_groups({"num_hidden_layers": len(config.get("layer_types", ())), **config})
    assert (groups.layers, groups.full, groups.sliding) == (layers, full, sliding)


def test_c13_a_window_bounds_the_blocks_of_a_sequence():
    groups = cache_groups(
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 64}
    )
    assert groups.blocks(32_000, 16, 1_000) == 2_000 + 67 + 1  # 63 + 1000 tokens, and one block more
    assert groups.blocks(100, 16, 1_000) == 7 + 7 + 1


def test_the_page_is_made_from_the_table():
    assert PAGE.read_text() == page(), "python -m hybrid.config.architecture_page"
