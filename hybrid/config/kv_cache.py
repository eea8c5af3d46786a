"""Bytes of tokens in an engine's KV cache, from config.json alone, as vLLM 0.32.0 counts it (v1/core/kv_cache_utils.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNEVEN = 1.5
"""Kinds of layers that differ in number by less than this factor are padded to the larger number."""
NO_LATENT_ATTENTION = ("minicpm3",)
"""vLLM gives these the keys and values of every head, in spite of their kv_lora_rank."""


@dataclass(frozen=True)
class CacheGroups:
    """How vLLM lays out the layers of a model: `full` + `sliding` groups of `layers` layers each. A block belongs to one group."""

    layers: int
    full: int
    sliding: int
    window: int | None
    """Tokens that a layer of a sliding group sees; None where there is no such group."""

    @property
    def padded_layers(self) -> int:
        """Layers that a token takes memory in."""
        return self.layers * (self.full + self.sliding)

    def blocks(self, sequence_tokens: int, block_tokens: int, batched_tokens: int) -> int:
        """Blocks of one sequence at full length, when `batched_tokens` are computed at a time. A window may begin within a block."""
        whole = -(-sequence_tokens // block_tokens)
        if self.window is None:
            return self.full * whole
        seen = min(self.window - 1 + batched_tokens, sequence_tokens)
        return self.full * whole + self.sliding * (-(-seen // block_tokens) + 1)


def cache_groups(config: Mapping[str, Any]) -> CacheGroups:
    """The groups of a model's layers, from the text part of its config.json."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return CacheGroups(layers, 1, 0, None)
    kinds = config.get("layer_types")
    sliding = layers if not kinds else sum(kind == "sliding_attention" for kind in kinds)
    full = layers - sliding
    if not sliding:
        return CacheGroups(layers, 1, 0, None)
    if not full:
        return CacheGroups(layers, 0, 1, window)
    size = max(full, sliding) if max(full, sliding) < UNEVEN * min(full, sliding) else min(full, sliding)
    return CacheGroups(size, -(-full // size), -(-sliding // size), window)


def layer_token_bytes(config: Mapping[str, Any], tp: int, element_bytes: int) -> int:
    """Bytes per GPU of a token in one layer. Latent attention keeps one vector for all heads, whole on every GPU."""
    rank, kind = config.get("kv_lora_rank"), config.get("model_type")
    if rank and kind not in NO_LATENT_ATTENTION:
        return (rank + (config.get("qk_rope_head_dim") or 0)) * element_bytes
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * max(1, kv_heads // tp) * head_size * element_bytes


def kv_token_bytes(config: Mapping[str, Any], tp: int, element_bytes: int) -> int:
    """Bytes per GPU of a token in all layers, those that vLLM adds to fill its groups included."""
    return cache_groups(config).padded_layers * layer_token_bytes(config, tp, element_bytes)
