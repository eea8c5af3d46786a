"""`samples.jsonl`: a few rollouts of every step, for people to read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.data.samples import Sample
from hybrid.telemetry.jsonl import JsonLines

DEEPEST = 20
"""Levels of a label that are written as JSON."""


class SamplesWriter:
    """Appends up to `per_step` rollouts of each step to `path`."""

    def __init__(self, path: str | Path, per_step: int):
        self.per_step = per_step
        self._lines = JsonLines(path)

    def write(self, step: int, samples: Sequence[Sample], extra: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Append the chosen ones, best first. `extra`: further columns of each sample, in the order of `samples`."""
        for index in choose(samples, self.per_step):
            sample = samples[index]
            row = {
                "step": step,
                "reward": _finite(sample.reward),
                "prompt": sample.prompt.text,
                "response": sample.text,
                "label": sample.prompt.label,
                "truncated": sample.truncated,
                "tokens": len(sample.token_ids),
                "weight_version": sample.weight_version,
                "group": sample.group,
                **(extra[index] if extra else {}),
            }
            self._lines.append(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False))

    def close(self) -> None:
        self._lines.close()


def choose(samples: Sequence[Sample], count: int) -> list[int]:
    """Indices of the best, the worst and others evenly between in reward, best first; samples without a reward count as worst."""
    count = min(count, len(samples))
    if count <= 0:
        return []
    rewards = [-math.inf if _finite(s.reward) is None else s.reward for s in samples]
    ranked = sorted(range(len(samples)), key=lambda i: -rewards[i])
    if count == 1:
        return ranked[:1]
    return [ranked[round(k * (len(samples) - 1) / (count - 1))] for k in range(count)]


def _plain(value: Any, depth: int = 0) -> Any:
    """`value` as JSON has it. A label is whatever the data had: what JSON has no word for, NaN too, is written as Python shows it."""
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, dict) and depth < DEEPEST:
        return {key if isinstance(key, str) else str(key): _plain(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple) and depth < DEEPEST:
        return [_plain(inner, depth + 1) for inner in value]
    try:
        return str(value)
    except Exception as error:  # Of a type of the user's, or nested too deep to be shown.
        return f"{type(value).__name__} that cannot be shown ({type(error).__name__})"


def _finite(reward: float | None) -> float | None:
    return reward if reward is not None and math.isfinite(reward) else None
