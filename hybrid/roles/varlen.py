"""Packed segments as sequences of different lengths for `torch.nn.attention.varlen.varlen_attn`, which runs torch's flash kernel (Dao 2023,
arXiv:2307.08691) on CUDA.

One call computes a layer. Its sequences are the prompts and the responses, in the order of the packed row, so queries stay where they are.
The keys of a response are those of its prompt and its own. The kernel aligns its causal mask at the last query and the last key, as
torch's `causal_lower_right` does, which calls the same kernel. `check_alignment` makes sure of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad

from hybrid.errors import ConfigError
from hybrid.roles.packing import Segment

if TYPE_CHECKING:
    from hybrid.roles.reach import Reach

DTYPES = (torch.bfloat16, torch.float16)
"""The kernel takes no others."""
HEAD_MULTIPLE, LARGEST_HEAD = 8, 256
"""Sizes of a head that the kernel takes."""
NOT_TRAINED = range(193, 225)
"""Sizes whose gradient torch refuses on some of the GPUs (compute capability 8.6, 8.9, 12.0 and 12.1)."""


@dataclass(frozen=True)
class Pieces:
    """P sequences that stand for packed segments: those of their queries, and those of their keys."""

    ends_q: torch.Tensor
    ends_k: torch.Tensor
    """int32, P + 1: 0, then where each sequence ends."""
    longest_q: int
    longest_k: int
    """Tokens."""
    keys_K: torch.Tensor | None
    """Index into the packed row of each key; None where keys are used where they lie."""


def pieces_of(segments: Sequence[Segment], device: torch.device | str) -> Pieces:
    """The sequences of `segments`. A prompt with one response is one sequence; with several, each is one, and the prompt is one."""
    queries: list[int] = []
    keys: list[list[tuple[int, int]]] = []  # (start, length) of the parts of each
    for segment in segments:
        if len(segment.responses) <= 1:
            queries.append(segment.length)
            keys.append([(segment.start, segment.length)])
            continue
        prompt = (segment.start, segment.prompt)
        queries.append(segment.prompt)
        keys.append([prompt])
        start = segment.start + segment.prompt
        for length in segment.responses:
            if length:
                queries.append(length)
                keys.append([prompt, (start, length)])
            start += length
    lengths_k = [sum(length for _, length in parts) for parts in keys]
    keys_K = None
    if lengths_k != queries:
        keys_K = torch.cat([torch.arange(start, start + length) for parts in keys for start, length in parts]).to(
            device
        )
    return Pieces(_ends(queries, device), _ends(lengths_k, device), max(queries), max(lengths_k), keys_K)


def _ends(lengths: list[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, reach: Reach | None) -> bool:
    """Whether the kernel computes a layer with this attention. It has no dropout and no chunks, and it takes half types only: layers in
    float32 are left to scaled_dot_product_attention."""
    head = query.shape[-1]
    fits = head % HEAD_MULTIPLE == 0 and head <= LARGEST_HEAD and head not in NOT_TRAINED and value.shape[-1] <= head
    alike = query.dtype in DTYPES and query.dtype == key.dtype == value.dtype
    return fits and alike and dropout == 0 and not (reach is not None and reach.chunked)


def attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Pieces,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """`query` 1 x heads x N x D, `key` 1 x kv_heads x N x D and `value` 1 x kv_heads x N x E with E <= D; returns 1 x N x heads x E.
    `window`: tokens that a token sees, itself among them; None: all before it."""
    by_token = (t[0].transpose(0, 1) for t in (query, key, value))
    query_NHD, key_KHD, value_KHE = (t if t.stride(-1) == 1 else t.contiguous() for t in by_token)
    if pieces.keys_K is not None:
        key_KHD, value_KHE = (t.index_select(0, pieces.keys_K) for t in (key_KHD, value_KHE))
    head, own = query.shape[-1], value.shape[-1]
    out_NHD = varlen_attn(
        query_NHD,
        key_KHD,
        pad(value_KHE, (0, head - own)) if own < head else value_KHE,  # the kernel has one size of heads
        pieces.ends_q,
        pieces.ends_k,
        pieces.longest_q,
        pieces.longest_k,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # tokens before and after the query's own
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out_NHD[None, ..., :own]


def check_alignment(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Raise `ConfigError` where the kernel does not show the last query the last key of sequences with more keys than queries.

    Attention of one response of 2 tokens to a prompt of 5, whose scores are all alike, is the mean of the values that a token sees.
    """
    pieces = pieces_of([Segment(0, 5, (2, 1))], device)
    value = torch.arange(8.0, device=device).to(dtype)[:, None].repeat(1, HEAD_MULTIPLE)[None, None]
    same = torch.zeros_like(value)
    means_N = attend_varlen(same, same, value, pieces, None, 1.0)[0, :, 0, 0].float()
    wanted_N = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, (0 + 1 + 2 + 3 + 4 + 7) / 6], device=device)
    if not torch.allclose(means_N, wanted_N, rtol=0.01, atol=0.01):
        raise ConfigError(
            f"model.attention: varlen is invalid: torch {torch.__version__} does not end the causal mask of its variable-length attention "
            "at the last query and the last key on this device. Set model.attention=sdpa."
        )
