"""Attention over packed segments whose responses share their prompt (`packing.py`), on scaled_dot_product_attention.

Registered with transformers under `NAME`, so any model that uses its attention interface runs packed. The prompt's keys and values are
computed once per group and their gradients add up over the responses, as if each response had had its own copy.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hybrid.roles.packing import Segment

NAME = "hybrid_packed"

ONE_CALL_TOKENS = 512
"""Up to this length a segment is one masked call; beyond it the masked-out half would cost more than extra calls."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    packed_segments: list[Segment],
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """`query` 1 x heads x N x D, `key` and `value` 1 x kv_heads x N x D; returns 1 x N x heads x D.

    Raises `NotImplementedError` for attention variants that the packed path does not compute (soft caps, sinks).
    """
    unsupported = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if unsupported:
        raise NotImplementedError(f"packed attention does not support {', '.join(unsupported)}; use flash_attention_2")
    window = kwargs.get("sliding_window")
    if window is not None and any(s.length > window for s in packed_segments):
        raise NotImplementedError(
            f"packed attention sees whole sequences, this model slides over {window}; use flash_attention_2"
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (key, value))
    # Cut by `split`, whose gradient is one concatenation; that of a slice is as long as the whole batch, for every slice.
    lengths = [segment.length for segment in packed_segments]
    outputs = []
    for segment, *own in zip(packed_segments, *(t.split(lengths, dim=2) for t in (query, key, value)), strict=True):
        attend = _one_call if segment.length <= ONE_CALL_TOKENS else _call_per_response
        outputs.append(attend(*own, segment, scale=scaling, dropout_p=dropout))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


@lru_cache(maxsize=64)
def segment_mask(segment: Segment, device: torch.device) -> torch.Tensor:
    """S x S booleans: a token sees itself, what came before it in its own response, and its prompt."""
    owner = [0] * segment.prompt
    for number, length in enumerate(segment.responses, start=1):
        owner += [number] * length
    owner_S = torch.tensor(owner, device=device)
    causal_SS = torch.ones(len(owner), len(owner), dtype=torch.bool, device=device).tril()
    return causal_SS & ((owner_S[None, :] == 0) | (owner_S[None, :] == owner_S[:, None]))


def _one_call(query, key, value, segment: Segment, **options):
    if len(segment.responses) <= 1:
        return scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    return scaled_dot_product_attention(query, key, value, attn_mask=segment_mask(segment, query.device), **options)


def _call_per_response(query, key, value, segment: Segment, **options):
    lengths = [segment.prompt, *segment.responses]
    (query, *queries), (key, *keys), (value, *values) = (t.split(lengths, dim=2) for t in (query, key, value))
    outputs = [scaled_dot_product_attention(query, key, value, is_causal=True, **options)]
    for own_query, own_key, own_value in zip(queries, keys, values):
        length = own_query.shape[2]
        mask = torch.ones(length, segment.prompt + length, dtype=torch.bool, device=query.device).tril(segment.prompt)
        all_keys, all_values = torch.cat([key, own_key], dim=2), torch.cat([value, own_value], dim=2)
        outputs.append(scaled_dot_product_attention(own_query, all_keys, all_values, attn_mask=mask, **options))
    return torch.cat(outputs, dim=2)


def _no_mask(*args, **kwargs) -> None:
    """The segments say who sees whom; a dense N x N mask would be wasted."""


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _no_mask)
