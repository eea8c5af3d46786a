"""What a vLLM engine holds on one GPU: weights of a tensor-parallel rank, KV cache, and what its start reserves for good.

Read from vLLM 0.32.0; weights and KV cache on CPU are checked against the ledger.
"""

from __future__ import annotations

from math import prod
from typing import Any

from hybrid.config.architectures import text_config
from hybrid.config.kv_cache import cache_groups, layer_token_bytes
from hybrid.planning.facts import CPU_BATCHED_TOKENS
from hybrid.planning.prediction import KVCache
from hybrid.planning.shapes import ModelShapes
from hybrid.rollout.requests import BLOCK_TOKENS

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of this, then cuts it."""
REPLICATED = ("norm", "mlp.gate.", "router", "block_sparse_moe.gate.")
"""Parameters that every tensor-parallel rank holds whole: norms, and the routers of experts."""
SAMPLER_COPIES = {"cpu": 3, "cuda": 10}
"""fp32 tensors of sequences x vocabulary that sampling takes: logits, log-softmax and the sampler's sort. On CUDA vLLM's first pass samples
with top-p and top-k; published are 9.6 to 9.9, whatever the model."""


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


def kv_cache(
    config: Any, tp: int, element_bytes: int, device: str, available: int, sequence_tokens: int, batched_tokens: int
) -> KVCache:
    """What `available` bytes of KV cache on one GPU hold, for sequences of at most `sequence_tokens` tokens. Whole blocks only.
    `batched_tokens`: of a pass, see `MachineFacts`."""
    text = text_config(config.get_text_config().to_dict())
    groups, block = cache_groups(text), BLOCK_TOKENS[device]
    block_bytes = groups.layers * layer_token_bytes(text, tp, element_bytes) * block
    blocks = available // block_bytes
    batched = batched_tokens * (tp if device == "cpu" else 1)
    of_one = groups.blocks(sequence_tokens, block, batched)
    return KVCache(
        bytes=blocks * block_bytes,
        bytes_per_token=groups.padded_layers * block_bytes // (groups.layers * block),
        tokens=max(0, blocks - 1) // (groups.full + groups.sliding) * block,
        sequences=max(0, blocks - 1) // of_one,
        least_bytes=(of_one + 1) * block_bytes,
    )


def first_pass(config: Any, tp: int, element_bytes: int, sequences: int, tokens: int) -> dict[str, int]:
    """CUDA: what a pass over `tokens` tokens of `sequences` sequences takes at most, as the one does that vLLM begins with. Activations are
    gone when it samples."""
    parts = _pass_parts(config, tp, element_bytes, sequences, tokens, "cuda")
    largest = max(parts, key=parts.__getitem__)
    return {largest: parts[largest]}


def sampling_bytes(config: Any, tp: int, element_bytes: int, sequences: int, tokens: int) -> dict[str, int]:
    """CPU: the widest pass over `tokens` tokens of `sequences` sequences, cut to what vLLM takes at a time."""
    return _pass_parts(config, tp, element_bytes, sequences, min(tokens, CPU_BATCHED_TOKENS * tp), "cpu")


def _pass_parts(config: Any, tp: int, element_bytes: int, sequences: int, tokens: int, device: str) -> dict[str, int]:
    """Hidden states, residual and both halves of the MLP of every token; fp32 logits of every sequence with the sampler's copies."""
    text = config.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    activations = tokens * (4 * text.hidden_size + 3 * inner // tp) * element_bytes
    return {"engine activations": activations, "sampler": SAMPLER_COPIES[device] * sequences * text.vocab_size * 4}


def reloading_bytes(model: ModelShapes, tp: int, element_bytes: int) -> tuple[int, int]:
    """Of a weight sync, of the largest layer: (what vLLM puts together beside the old one before it copies it over, what it keeps of the
    layer from earlier buckets until the rest has come). The latter are whole tensors, as they came; one tensor is never in two buckets."""
    layers: dict[str, list[int]] = {}
    for (name, _), size in zip(model.parameters, model.sizes, strict=True):
        head, _, rest = name.partition("layers.")
        layers.setdefault(f"{head}{rest.split('.')[0]}" if rest else name, []).append(size)
    whole = max(map(sum, layers.values()))
    waiting = max((sum(sizes) for sizes in layers.values() if len(sizes) > 1), default=0)
    return whole * element_bytes // tp, waiting * element_bytes
