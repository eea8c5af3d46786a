"""Which model architectures train exactly, and why others are refused: one table, from which ARCHITECTURES.md is made.

Decided from config.json, and for types that are not in the table from what transformers' class says of itself: before anything starts. A
refusal follows from what a config asks for, so that it holds for models that nobody has listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.config.trained import TRAINED

Config = Mapping[str, Any]
"""A config.json, or the text part of one."""

PLAIN_LAYERS = (
    "attention",
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "dense",
    "sparse",
    "moe",
    "mlp",
)
"""Layer types that keep packed rows apart."""
STATE = "keep a state along the sequence, which packed rows would share"
OTHER_LAYERS: dict[str, str] = {
    "linear_attention": STATE,
    "mamba": STATE,
    "mamba2": STATE,
    "rwkv": STATE,
    "recurrent": STATE,
    "hybrid": STATE,
    "hybrid_sliding": STATE,
    "conv": "mix neighbouring tokens, also those of two packed rows",
    "indexed_attention": "choose the tokens that they attend to by an index, which packed attention does not compute",
}
"""Layer type -> how its layers are not exact. Other types that are not in PLAIN_LAYERS are refused as unknown."""
KEYS_OF_LAYERS: dict[str, str] = {
    "compress_ratios": "indexed_attention",
    "conv_L_cache": "conv",
    "full_attn_idxs": "conv",
    "hybrid_override_pattern": "mamba",
    "index_topk": "indexed_attention",
    "linear_attn_config": "linear_attention",
    "linear_num_value_heads": "linear_attention",
    "lru_width": "recurrent",
    "mamba_d_state": "mamba",
    "mamba_num_heads": "mamba",
    "rescale_every": "rwkv",
    "ssm_cfg": "mamba",
    "state_size": "mamba",
}
"""Keys of configs that need not name their layer types -> the type that they mean."""
ANY_STATE = "linear_attention"
"""transformers 5 writes this type for every layer with a state; the config's other keys say which kind it is."""
TIED_ONLY = ("cohere", "cohere2", "cohere2_moe", "gemma2")
"""vLLM ignores a head of their own."""
SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")
"""Their softmax has a sink per head."""
UNTIED_ONLY = ("dbrx", "deepseek_v2", "deepseek_v3", "gpt_oss", "gptj", "olmoe")
"""vLLM does not tie their head to the embeddings."""
NOT_ON_CPU: dict[str, str] = {
    "ernie4_5_moe": "leaves out the bias of its router, and chooses other experts",
    "laguna": "ends with an error",
    "phimoe": "ends with an error",
}
"""Reasons why vLLM 0.32 on CPU cannot serve these types."""
OLDER_NAMES: dict[str, tuple[str, ...]] = {
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_key_value_heads": ("num_kv_heads",),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "intermediate_size": ("n_inner",),
}
"""A key of today -> its names in older families: GPT-2, GPT-J, BLOOM, MPT, DBRX, Falcon."""


ANOTHER = "Name another model: hybrid/config/ARCHITECTURES.md lists those that train."


@dataclass(frozen=True)
class Refusal:
    """Why a model does not train exactly, said of the model, and what helps."""

    why: str
    fix: str = ANOTHER


def text_config(config: Config) -> dict[str, Any]:
    """The text part of a config.json, with today's names of its keys."""
    text = config.get("text_config")
    text = dict(text if isinstance(text, Mapping) else config)
    for name, older in OLDER_NAMES.items():
        found = next((text[key] for key in older if text.get(key) is not None), None)
        if text.get(name) is None and found is not None:
            text[name] = found
    if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
        text["num_key_value_heads"] = 1
    return text


def refusal(config: Config, tokens: int, sampled: bool) -> Refusal | None:
    """Why the model of a config.json does not train exactly; None where it does, or nothing is known against it.

    `tokens` is the longest sequence; `sampled`: vLLM generates from the model.
    """
    text = text_config(config)
    rules = (
        _other_parts,
        _layer_types,
        _shared_layers,
        _alibi,
        _scaled_by_position,
        _dynamic_positions,
        _own_attention,
    )
    found = next((found for rule in rules if (found := rule(config, text))), None)
    return found or _long_positions(text, tokens) or (_head(config, text) if sampled else None)


def kernel_refusal(config: Config, attention: str, device: str) -> Refusal | None:
    """Why the kernels of `attention` (model.attention) on `device` do not compute the model's attention; None where they do."""
    text = text_config(config)
    sinks = text.get("model_type") in SINKS
    if attention == "flash_attention_2":
        if sinks:
            return Refusal("flash_attention_2 leaves out its sinks of attention")
        if text.get("attention_chunk_size"):
            return Refusal(
                "flash_attention_2 does not attend in chunks (attention_chunk_size)", "Set model.attention=sdpa."
            )
        return None
    if device == "cuda" and text.get("attn_logit_softcapping") is not None:
        return _scores("soft caps")
    return _scores("sinks") if device == "cuda" and sinks else None


def scores_on_cuda(what: str) -> str:
    """The sentences of `kernel_refusal` for "soft caps" or "sinks" of attention."""
    found = _scores(what)
    return f"{found.why}. {found.fix}"


def _scores(what: str) -> Refusal:
    caps = what == "soft caps"
    key = " (attn_logit_softcapping)" if caps else ""
    fix = "Set model.attention=flash_attention_2 (flash-attn must be installed where it runs), or name another model."
    return Refusal(f"no CUDA kernel computes packed attention with {what}{key}", fix if caps else ANOTHER)


Rule = Callable[[Config, Config], Refusal | None]


def _other_parts(config: Config, text: Config) -> Refusal | None:
    if config.get("is_encoder_decoder"):
        return Refusal("it is an encoder with a decoder (is_encoder_decoder), and a policy is a decoder alone")
    for part in ("vision_config", "audio_config"):
        if config.get(part):
            return Refusal(f"it has parts beside the language model ({part}), which are not trained")
    return None


def _layer_types(config: Config, text: Config) -> Refusal | None:
    names = ("layer_types", "layers_block_type", "block_types")
    named = next((key for key in names if text.get(key) and isinstance(text[key], list)), None)
    key = next((key for key in KEYS_OF_LAYERS if text.get(key)), None)
    if named is None:
        return None if key is None else _layer_refusal(_kind_of(text, key), key)
    other = next((str(kind) for kind in text[named] if kind not in PLAIN_LAYERS), None)
    if other == ANY_STATE and key and OTHER_LAYERS[own := _kind_of(text, key)] == STATE and own != other:
        return _layer_refusal(own, f"{key}; {other} in {named}")
    return None if other is None else _layer_refusal(other, named)


def _kind_of(text: Config, key: str) -> str:
    """The type of the layers that `key` is about: models of such layers alone have its name."""
    kind = text.get("model_type")
    return kind if kind in OTHER_LAYERS else KEYS_OF_LAYERS[key]


def _layer_refusal(kind: str, key: str) -> Refusal:
    differs = OTHER_LAYERS.get(kind, "are not known to keep packed rows apart")
    return Refusal(f"its layers of type {kind} ({key}) {differs}")


def _shared_layers(config: Config, text: Config) -> Refusal | None:
    if text.get("num_kv_shared_layers"):
        return Refusal(
            "layers take keys and values of earlier ones (num_kv_shared_layers), which the trainer does not keep"
        )
    return None


def _alibi(config: Config, text: Config) -> Refusal | None:
    nested = text.get("attn_config")
    asked = text.get("alibi") or (isinstance(nested, Mapping) and nested.get("alibi"))
    if asked or text.get("model_type") in ("bloom", "mpt"):
        return Refusal("ALiBi biases attention by distances in the packed row")
    return None


def _scaled_by_position(config: Config, text: Config) -> Refusal | None:
    if text.get("attn_temperature_tuning", text.get("model_type") == "llama4_text"):
        return Refusal("its attention is scaled by positions in the packed row (attn_temperature_tuning)")
    return None


def _rope(text: Config) -> Config:
    """How positions are scaled; `rope_scaling` in older configs."""
    found = text.get("rope_scaling") or text.get("rope_parameters")
    return found if isinstance(found, Mapping) else {}


def _dynamic_positions(config: Config, text: Config) -> Refusal | None:
    rope = _rope(text)
    if "dynamic" in (rope.get("rope_type"), rope.get("type")):
        return Refusal(
            "its positions are scaled by the longest row of a batch (rope type dynamic), in vLLM by a constant"
        )
    return None


def _long_positions(text: Config, tokens: int) -> Refusal | None:
    """vLLM takes the long factors for every sequence once one may be long, transformers where one is."""
    rope = _rope(text)
    short = text.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if "longrope" not in (rope.get("rope_type"), rope.get("type")) or not short or tokens <= short:
        return None
    return Refusal(
        f"its positions are scaled for sequences of more than {short} tokens (rope type longrope), in vLLM then for shorter ones too",
        f"Keep data.max_prompt_tokens + rollout.max_new_tokens, now {tokens}, at {short} or less.",
    )


def _head(config: Config, text: Config) -> Refusal | None:
    kind, tied = text.get("model_type"), config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if kind in TIED_ONLY and tied is False:
        return Refusal("vLLM ignores its head, which is not tied to the embeddings (tie_word_embeddings=false)")
    if kind in UNTIED_ONLY and tied is True:
        return Refusal("vLLM does not tie its head to the embeddings (tie_word_embeddings=true)")
    return None


def _own_attention(config: Config, text: Config) -> Refusal | None:
    """For types that are not in the table: what transformers' class says of itself, in seconds, as torch is imported."""
    kind = config.get("model_type")
    if kind in TRAINED or config.get("auto_map"):
        return None
    found = _causal_class(kind)
    if found is None:
        return Refusal(f"transformers has no causal language model of model_type {kind}")
    if found._is_stateful and not text.get("layer_types"):
        return Refusal(f"layers of {found.__name__} {STATE}")
    if not found._supports_attention_backend:
        return Refusal(
            f"{found.__name__} computes attention past transformers' interface, so packed rows cannot be kept apart"
        )
    if getattr(found.config_class, "is_decoder", None) is False and not text.get("is_decoder"):
        return Refusal("it is an encoder, whose tokens see those after them (is_decoder=false)")
    return None


def _causal_class(model_type: str) -> Any:
    """transformers' causal language model of `model_type`; None where there is none."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return getattr(transformers, name[0] if isinstance(name, tuple) else name) if name else None
