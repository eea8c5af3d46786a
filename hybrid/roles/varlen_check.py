"""The trainer's variable-length attention against scores computed one by one in float32: for tests on a GPU, and for `hybrid doctor`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid.roles.packing import Segment
from hybrid.roles.varlen import attend_varlen, pieces_of

SEGMENTS = (Segment(0, 37, (1, 64, 130, 0)), Segment(232, 150, (77,)), Segment(459, 1, (3, 9)))
"""Prompts and responses shorter and longer than the kernel's blocks of 64 and 128 tokens, one without tokens."""
TOKENS = 472


@dataclass(frozen=True)
class Case:
    """Heads of queries, heads of keys, size of a head of queries and of values, and the window in tokens or None."""

    heads: int = 4
    kv_heads: int = 4
    size: int = 64
    value_size: int = 64
    window: int | None = None


CASES = {
    "causal": Case(),
    "grouped heads": Case(kv_heads=2, size=128, value_size=128),
    "window": Case(kv_heads=1, window=40),
    "smaller values": Case(size=192, value_size=128),
    "largest heads": Case(heads=2, kv_heads=1, size=256, value_size=256),
}


@dataclass(frozen=True)
class Difference:
    """Largest difference in the result and in the gradients, each as a share of the largest value there."""

    forward: float
    backward: float


def difference(case: Case, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Difference:
    """How far `attend_varlen` in `dtype` is from float64 attention of each token to what it may see."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((case.heads, case.size), (case.kv_heads, case.size), (case.kv_heads, case.value_size))
    given = [torch.randn(1, heads, TOKENS, size, generator=generator).to(dtype) for heads, size in shapes]
    weights = torch.randn(1, TOKENS, case.heads, case.value_size, generator=generator).to(dtype)

    ours = [t.to(device, copy=True).requires_grad_() for t in given]
    out = attend_varlen(*ours, pieces_of(SEGMENTS, device), case.window, None)
    out.backward(weights.to(device))
    exact = [t.to(torch.float64, copy=True).requires_grad_() for t in given]
    wanted = _attention(*exact, _seen(case.window))
    wanted.backward(weights.double())
    pairs = [(mine.grad, theirs.grad) for mine, theirs in zip(ours, exact, strict=True)]
    return Difference(_share(out, wanted), max(_share(mine, theirs) for mine, theirs in pairs))


def _share(ours: torch.Tensor, exact: torch.Tensor) -> float:
    ours, exact = ours.detach().cpu().double(), exact.detach()
    return float((ours - exact).abs().max() / exact.abs().max())


def _seen(window: int | None) -> torch.Tensor:
    """N x N booleans, written from the definition: same sequence, not later, within the window."""
    seen = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for segment in SEGMENTS:
        prompt = list(range(segment.start, segment.start + segment.prompt))
        start = segment.start + segment.prompt
        sequences = [prompt]
        for length in segment.responses:
            sequences.append(prompt + list(range(start, start + length)))
            start += length
        for sequence in sequences:
            for place, token in enumerate(sequence):
                first = 0 if window is None else max(0, place - window + 1)
                seen[token, sequence[first : place + 1]] = True
    return seen


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    scores = (query @ key.transpose(2, 3)) * query.shape[-1] ** -0.5
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)
