"""What a vLLM engine holds on one GPU: weights of a tensor-parallel rank, KV cache, and what its start reserves for good.

Read from vLLM 0.32.0; weights and KV cache on CPU are checked against the ledger.
"""

from __future__ import annotations

from math import prod
from typing import Any

from hybrid.config.architectures import text_config
from hybrid.config.kv_cache import cache_groups, layer_token_bytes
from hybrid.planning.prediction import KVCache
from hybrid.planning.shapes import ModelShapes
from hybrid.rollout.requests import BLOCK_TOKENS

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this, then cuts it."""
REPLICATED = ("norm", "mlp.gate.", "router", "block_sparse_moe.gate.")
"""Parameters that every tensor-parallel rank holds whole: norms, and the routers of experts."""
BATCHED_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens that vLLM takes in one pass: per tensor-parallel rank on CPU; 8192 on GPUs of less than 70 GiB."""
SAMPLER_COPIES = 3
"""Logits, log-softmax and the sampler's sort."""
CUDA_GRAPH_BYTES = 2**30
"""Stated, not measured: captured graphs and their pool; 0.5 to 3 GiB are reported."""


def engine_weights(model: ModelShapes, config: Any, tp: int, element_bytes: int, device: str) -> int:
    """Bytes of the weights on one of `tp` GPUs. On CPU the embedding and the head each have a copy packed for their kernels; other
    layers drop the original."""
    text = config.get_text_config()
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_ranks = min(tp, kv_heads)
    elements = 0
    for name, shape in model.parameters:
        if shape[0] == text.vocab_size and len(shape) == 2:
            elements += vocab_shard(text.vocab_size, tp) * shape[1]
        elif any(word in name for word in REPLICATED):
            elements += prod(shape)
        else:
            elements += prod(shape) // (kv_ranks if ".k_proj." in name or ".v_proj." in name else tp)
    packed = 2 * vocab_shard(text.vocab_size, tp) * text.hidden_size if device == "cpu" else 0
    rotary = getattr(text, "max_position_embeddings", 0) * head_size
    return (elements + packed + rotary) * element_bytes


def vocab_shard(vocab_size: int, tp: int) -> int:
    """Rows of the embedding on one rank."""
    return -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING // tp


def kv_cache(config: Any, tp: int, element_bytes: int, device: str, available: int, sequence_tokens: int) -> KVCache:
    """What `available` bytes of KV cache on one GPU hold, for sequences of at most `sequence_tokens` tokens. Whole blocks only."""
    text = text_config(config.get_text_config().to_dict())
    groups, block = cache_groups(text), BLOCK_TOKENS[device]
    block_bytes = groups.layers * layer_token_bytes(text, tp, element_bytes) * block
    blocks = available // block_bytes
    batched = BATCHED_TOKENS[device] * (tp if device == "cpu" else 1)
    of_one = groups.blocks(sequence_tokens, block, batched)
    return KVCache(
        bytes=blocks * block_bytes,
        bytes_per_token=groups.padded_layers * block_bytes // (groups.layers * block),
        tokens=max(0, blocks - 1) // (groups.full + groups.sliding) * block,
        sequences=max(0, blocks - 1) // of_one,
        least_bytes=(of_one + 1) * block_bytes,
    )


def graph_bytes(enforce_eager: bool) -> int:
    return 0 if enforce_eager else CUDA_GRAPH_BYTES


def profiling_bytes(config: Any, tp: int, element_bytes: int, max_num_seqs: int) -> int:
    """CUDA: what the engine's first pass leaves in torch's allocator, for good."""
    parts = _pass_parts(config, tp, element_bytes, max_num_seqs, BATCHED_TOKENS["cuda"])
    return sum(parts.values())


def sampling_bytes(config: Any, tp: int, element_bytes: int, sequences: int, tokens: int) -> dict[str, int]:
    """CPU: the widest pass over `tokens` tokens of `sequences` sequences, cut to what vLLM takes at a time."""
    return _pass_parts(config, tp, element_bytes, sequences, min(tokens, BATCHED_TOKENS["cpu"] * tp))


def _pass_parts(config: Any, tp: int, element_bytes: int, sequences: int, tokens: int) -> dict[str, int]:
    """Hidden states, residual and both halves of the MLP of every token; fp32 logits of every sequence with the sampler's copies."""
    text = config.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    activations = tokens * (4 * text.hidden_size + 3 * inner // tp) * element_bytes
    return {"engine activations": activations, "sampler": SAMPLER_COPIES * sequences * text.vocab_size * 4}


def largest_layer_bytes(model: ModelShapes, tp: int, element_bytes: int) -> int:
    """Of a weight sync: vLLM puts a layer together beside the old one before it copies it over."""
    per_layer: dict[str, int] = {}
    for (name, _), size in zip(model.parameters, model.sizes, strict=True):
        head, _, rest = name.partition("layers.")
        layer = f"{head}{rest.split('.')[0]}" if rest else name
        per_layer[layer] = per_layer.get(layer, 0) + size
    return max(per_layer.values()) * element_bytes // tp
