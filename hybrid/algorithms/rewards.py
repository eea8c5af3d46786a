"""Shaping of scores: what lies between what a reward said and what an advantage is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Length = TypeVar("Length", int, float, Tensor)

SMALLEST_STD = 1e-8
"""Scores that have all been equal so far are divided by this, and are 0 anyway."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of all scores so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Biased standard deviation; 0 before the first score."""
        return (self.squares / self.count) ** 0.5 if self.count else 0.0


def add_moments(moments: Moments, scores: Tensor) -> Moments:
    """`moments` with finite `scores` (any shape) added (Chan et al. 1979: pairwise, so that nothing is lost to cancellation)."""
    if scores.numel() == 0:
        return moments
    scores = scores.double()
    added, mean = scores.numel(), float(scores.mean())
    count, difference = moments.count + added, mean - moments.mean
    squares = float((scores - mean).square().sum()) + difference**2 * moments.count * added / count
    return Moments(count, moments.mean + difference * added / count, moments.squares + squares)


def shape_scores(
    scores: Tensor,
    lengths: Tensor,
    unfinished: Tensor,
    weights: Tensor,
    *,
    max_new_tokens: int,
    clip: tuple[float, float] | None = None,
    moments: Moments | None = None,
    overlong_buffer: int | None = None,
    overlong_factor: float = 1.0,
    unfinished_penalty: float | None = None,
    unfinished_score: float | None = None,
) -> Tensor:
    """Scores as advantages see them, float64, from raw ones. All tensors have one entry per response, B.

    In this order, each step where its argument is given:
    1. clip: the raw score to [low, high];
    2. moments: `(s - mean) / std` of all clipped scores so far, these included (the caller adds them with `add_moments`);
    3. weights: times the weight of the prompt's source;
    4. overlong_buffer: plus `overlong_penalty` of `lengths`;
    5. where `unfinished` (no end token): minus unfinished_penalty, or unfinished_score in place of all before.
    Bounds come first so that an outlier does not enter the moments; what is said about a response's end comes last so that its size
    is the one in the profile.
    """
    scores = clip_scores(scores.double(), clip)
    if moments is not None:
        scores = (scores - moments.mean) / max(moments.std, SMALLEST_STD)
    scores = scores * weights
    if overlong_buffer is not None:
        scores = scores + overlong_penalty(lengths.double(), max_new_tokens, overlong_buffer, overlong_factor)
    if unfinished_penalty is not None:
        scores = scores - unfinished_penalty * unfinished.double()
    if unfinished_score is not None:
        scores = scores.masked_fill(unfinished.bool(), unfinished_score)
    return scores


def clip_scores(scores: Tensor, clip: tuple[float, float] | None) -> Tensor:
    """`scores` within [low, high]; unchanged without bounds."""
    return scores if clip is None else scores.clamp(*clip)


def overlong_penalty(length: Length, max_new_tokens: int, buffer: int, factor: float) -> float | Tensor:
    """A penalty that grows over the last `buffer` tokens before the limit: 0 up to there, `-factor` at `max_new_tokens`.

    `min(0, -(length - (max_new_tokens - buffer)) / buffer * factor)`, lengths in tokens; a float for a number, a tensor for a tensor.
    DAPO, Yu et al. 2025, arXiv:2503.14476.
    """
    penalty = (max_new_tokens - buffer - length) / buffer * factor
    return penalty.clamp(max=0.0) if isinstance(penalty, Tensor) else min(0.0, penalty)
