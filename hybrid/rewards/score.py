"""Scores of samples, each checked: a reward that fails is an error that shows the sample, never a silent 0."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

from hybrid.data.samples import Sample
from hybrid.errors import RewardError
from hybrid.rewards.function import RewardFunction


def score(reward: RewardFunction, samples: list[Sample]) -> list[float]:
    """One finite number per sample, from one call of `reward`. Raises `RewardError` otherwise."""
    names = {name for s in samples for name in s.prompt.columns}
    columns = {name: [s.prompt.columns.get(name) for s in samples] for name in names}
    try:
        values = reward(
            [s.prompt.text for s in samples], [s.text for s in samples], [s.prompt.label for s in samples], columns
        )
    except RewardError as error:
        raise RewardError(f"{error}\nThe batch had {len(samples)} samples; the first:\n{_shown(samples[0])}") from error
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple) or len(values) != len(samples):
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        raise RewardError(
            f"Reward {reward.name} must return a list of {len(samples)} numbers, one per sample; it returned {got}."
        )
    return [_checked(reward, value, sample) for value, sample in zip(values, samples)]


def accuracy(scores: list[float]) -> float:
    """Share of scores that are at least 1.0."""
    return sum(s >= 1.0 for s in scores) / len(scores)


def _checked(reward: RewardFunction, value: Any, sample: Sample) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RewardError(
            f"Reward {reward.name} must return finite numbers; it returned {value!r} for\n{_shown(sample)}"
        )
    return float(value)


def _shown(sample: Sample) -> str:
    prompt = sample.prompt.text if len(sample.prompt.text) <= 300 else "..." + sample.prompt.text[-300:]
    return f"  prompt:   {prompt!r}\n  response: {sample.text!r}\n  label:    {sample.prompt.label!r}"
