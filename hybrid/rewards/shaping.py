"""From what the rewards said to `Sample.score`, as the profile's section `reward` asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid.algorithms.rewards import Moments, add_moments, clip_scores, shape_scores
from hybrid.config import RunConfig
from hybrid.data.columns import NoColumn, missing, pick
from hybrid.data.samples import Prompt, Sample
from hybrid.errors import RewardError


def weighted_sum(terms: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    """`terms` are (weight, scores); one score per sample."""
    return [
        sum(weight * value for weight, value in zip([w for w, _ in terms], row)) for row in zip(*(s for _, s in terms))
    ]


def shape(cfg: RunConfig, samples: Sequence[Sample], moments: Moments) -> Moments:
    """Set `score` of `samples` from their `reward` and return the moments with these rewards added, where they are used.

    Raises `RewardError` when a prompt does not name its source.
    """
    reward = cfg.reward
    raw_B = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    if reward.normalise:
        # A greedy answer is not a draw of the policy, and would pull the mean.
        drawn_B = torch.tensor([not s.greedy for s in samples])
        moments = add_moments(moments, clip_scores(raw_B, reward.clip)[drawn_B])
    shaped_B = shape_scores(
        raw_B,
        torch.tensor([len(s.token_ids) for s in samples]),
        torch.tensor([s.truncated for s in samples]),
        torch.tensor([_source_weight(cfg, s.prompt) for s in samples], dtype=torch.float64),
        max_new_tokens=cfg.rollout.max_new_tokens,
        clip=reward.clip,
        moments=moments if reward.normalise else None,
        overlong_buffer=reward.overlong_buffer,
        overlong_factor=reward.overlong_factor,
        unfinished_penalty=reward.unfinished_penalty,
        unfinished_score=reward.unfinished_score,
    )
    for sample, score in zip(samples, shaped_B.tolist(), strict=True):
        sample.score = score
    return moments


def _source_weight(cfg: RunConfig, prompt: Prompt) -> float:
    if cfg.reward.source_field is None:
        return 1.0
    try:
        value = pick(prompt.columns, cfg.reward.source_field)
    except NoColumn as error:
        said = missing(prompt.columns, cfg.reward.source_field, "reward.source_field")
        raise RewardError(
            f"{prompt.where or repr(prompt.text[-60:])} {said} Name a column that every record has."
        ) from error
    return cfg.reward.source_weights.get(str(value), 1.0)
