"""Shaping of scores."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Length = TypeVar("Length", int, float, Tensor)


def overlong_penalty(length: Length, max_new_tokens: int, buffer: int, factor: float) -> float | Tensor:
    """A penalty that grows over the last `buffer` tokens before the limit: 0 up to there, `-factor` at `max_new_tokens`.

    `min(0, -(length - (max_new_tokens - buffer)) / buffer * factor)`, lengths in tokens; a float for a number, a tensor for a tensor.
    DAPO, Yu et al. 2025, arXiv:2503.14476.
    """
    penalty = (max_new_tokens - buffer - length) / buffer * factor
    return penalty.clamp(max=0.0) if isinstance(penalty, Tensor) else min(0.0, penalty)
