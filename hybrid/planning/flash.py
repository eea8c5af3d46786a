"""The memory of flash attention's kernels (Dao 2023, arXiv:2307.08691): torch's own, and those of the package flash-attn.

Of both, `mha_varlen_bwd` (flash_api.cpp) tells what a gradient takes. The gradients of keys and values are made per query head, and
that of queries adds up in float32, with room for a block of rows after each sequence.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hybrid.roles import attention

FLASH = "hybrid_planned"
"""Registered below. transformers looks for a kernel wherever the name holds `flash`."""
BLOCK_ROWS = 128
"""Rows after each sequence."""


def backward_bytes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: int) -> int:
    """Bytes of the workspace of a gradient: `query` T x heads x D, `key` and `value` K x kv_heads x D, of `sequences` sequences."""
    tokens, heads, size = query.shape
    rounded = -(-size // (32 if size <= 128 else 64)) * (32 if size <= 128 else 64)
    rows = tokens + BLOCK_ROWS * sequences
    groups = heads // key.shape[1]
    expanded = groups * (key.nbytes + value.nbytes) if groups > 1 else 0
    return rows * heads * (rounded + 1) * torch.float32.itemsize + expanded


def varlen_backward_bytes(grad_out, query, key, value, out, _sums, ends_q, *_) -> int:
    """Bytes that torch's gradient of `varlen_attn` takes beside its inputs, outputs included: with copies of what it wants contiguous."""
    copies = sum(t.nbytes for t in (grad_out, out) if not t.is_contiguous())
    outputs = query.nbytes + key.nbytes + value.nbytes
    return copies + outputs + backward_bytes(query, key, value, ends_q.shape[0] - 1)


class _Flash(torch.autograd.Function):
    """What the package keeps and allocates, without computing: nothing quadratic."""

    @staticmethod
    def forward(ctx, query, key, value, sequences):
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.sequences = sequences
        return out

    @staticmethod
    def backward(ctx, _gradient):
        query, key, value, *_ = ctx.saved_tensors
        workspace = backward_bytes(query, key, value, ctx.sequences)
        held = query.new_empty(workspace, dtype=torch.uint8)  # noqa: F841  lives as long as the kernel
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _planned_flash(module, query, key, value, attention_mask, *, cu_seq_lens_q, **_kwargs):
    """Heads first in, tokens first out, as transformers' attention functions. Shorter values become as long as the keys, as there."""
    attention.record(module)
    head, own = query.shape[-1], value.shape[-1]
    padded = value if own == head else pad(value, (0, head - own))
    by_token = (t[0].transpose(0, 1) for t in (query, key, padded))
    return _Flash.apply(*by_token, len(cu_seq_lens_q) - 1)[None, ..., :own], None


AttentionInterface.register(FLASH, _planned_flash)
AttentionMaskInterface.register(FLASH, lambda *args, **kwargs: None)
attention.RECORDED.add(FLASH)
