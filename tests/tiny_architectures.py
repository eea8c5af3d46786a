"""Tiny random models of many architectures, with our tokenizer: the rows of the architecture table.

Head size 32, the smallest that vLLM's CPU attention takes; latent attention keeps the sizes that its kernels ask for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.tiny_models import SPECIALS, VOCAB_SIZE, make_tokenizer

Fields = dict[str, Any]

BASE: Fields = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": SPECIALS.index("<|im_start|>"),
    "eos_token_id": SPECIALS.index("<|im_end|>"),
    "pad_token_id": SPECIALS.index("<|im_end|>"),
}
EXPERTS: Fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
NO_DROPOUT: Fields = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attention_dropout": 0.0}
LAYERS: Fields = {"layer_types": ["sliding_attention", "full_attention"]}

LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""Latent attention and grouped experts of DeepSeek."""
TRAINED: dict[str, tuple[str, Fields]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "mistral_window": ("mistral", {"sliding_window": 64}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("phi3", NO_DROPOUT),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "sliding_window": 64, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True, "sliding_window": 64, **LAYERS}),
    "granite": ("granite", {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "cohere2": ("cohere2", {"tie_word_embeddings": True, "logit_scale": 0.25, "sliding_window": 64, **LAYERS}),
    "glm4": ("glm4", {}),
    "smollm3": ("smollm3", {}),
    "starcoder2": ("starcoder2", NO_DROPOUT | {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "gpt2": ("gpt2", NO_DROPOUT | {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "deepseek_v3": ("deepseek_v3", LATENT | {"topk_method": "noaux_tc"}),
    "gpt_oss": (
        "gpt_oss",
        {
            "max_position_embeddings": 131072,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            **LAYERS,
        },
    ),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 64}),
    "deepseek_v2": ("deepseek_v2", LATENT),
    "phi": ("phi", NO_DROPOUT | {"num_key_value_heads": 4}),
    "glm": ("glm", {}),
    "seed_oss": ("seed_oss", {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "ernie4_5": ("ernie4_5", {}),
    "olmo3": ("olmo3", {"sliding_window": 64, **LAYERS}),
    "apertus": ("apertus", {}),
    "exaone4": ("exaone4", {"sliding_window": 64, **LAYERS}),
    "glm4_moe": (
        "glm4_moe",
        EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "llama4": (
        "llama4_text",
        {
            "attn_temperature_tuning": False,
            "attention_chunk_size": 64,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 1,
            "num_local_experts": 4,
        },
    ),
    "ministral": ("ministral", {"sliding_window": 64, **LAYERS}),
    "ministral3": ("ministral3", {}),
    "olmo": ("olmo", {}),
    "opt": ("opt", {"dropout": 0.0, "ffn_dim": 256, "word_embed_proj_dim": 128}),
}
"""Name -> (model_type, fields of its config)."""


def tiny_architecture_config(name: str) -> Any:
    """The transformers config of a row of `TRAINED`."""
    from transformers import AutoConfig

    model_type, fields = TRAINED[name]
    return AutoConfig.for_model(model_type, **{**BASE, **fields})


def make_tiny_architecture(name: str, folder: str | Path, seed: int = 0) -> Path:
    """Save a random model (fp32) of row `name` with its tokenizer into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_architecture_config(name))
        _spread(model)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return Path(folder)


def _spread(model: Any) -> None:
    """Biases, norms and sinks begin at a constant, which hides that one of them is wrong: move each a little."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or name.endswith(("_bias", ".bias")):
                parameter += 0.1 * torch.randn(parameter.shape)
