"""Attention by its table of scores, for what no kernel computes: soft caps (Gemma 2, arXiv:2408.00118) and sinks (gpt-oss,
arXiv:2508.10925). The softmax is in float32, as in transformers' eager attention of Gemma 2."""

from __future__ import annotations

import torch
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

BLOCK_QUERIES = 256
"""Queries whose scores are in memory at a time. Where there are several blocks, the backward pass computes each again."""


def attend_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As scaled_dot_product_attention on 1 x heads x Q x D with a mask or `is_causal`, and with two arguments more.

    `softcap` bounds the scaled scores: `softcap * tanh(score / softcap)`. `sinks`, one score per head, enter each row's softmax and take
    their share of it to nowhere.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if is_causal:
        queries, keys = query.shape[2], key.shape[2]
        attn_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
    blocks = query.split(BLOCK_QUERIES, dim=2)
    outputs = []
    for block, mask in zip(blocks, attn_mask.split(BLOCK_QUERIES), strict=True):
        args = (block, key, value, mask, scale, dropout_p, softcap, sinks)
        if len(blocks) > 1 and torch.is_grad_enabled():
            outputs.append(checkpoint(_attend, *args, use_reentrant=False, preserve_rng_state=dropout_p > 0))
        else:
            outputs.append(_attend(*args))
    return torch.cat(outputs, dim=2)


def _attend(query, key, value, mask, scale, dropout_p, softcap, sinks):
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        shares = scores.softmax(-1)
    else:
        of_sinks = sinks.float().view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
        shares = torch.cat([scores, of_sinks], dim=-1).softmax(-1)[..., :-1]
    return dropout(shares.to(value.dtype), dropout_p) @ value
