"""Prompts with their samples, and which of them teach something. Pure functions."""

from __future__ import annotations

import math
from dataclasses import replace

from hybrid.data.samples import Sample

Group = list[Sample]
"""All samples of a prompt, its greedy answer included."""


def by_prompt(samples: list[Sample]) -> list[Group]:
    """`samples` by their `group`, in ascending order of it."""
    groups: dict[int, Group] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return [groups[number] for number in sorted(groups)]


def teaches(group: Group) -> bool:
    """Whether the scores of a prompt's draws differ. Compared with each other: a standard deviation of equal floats need not be 0."""
    scores = [sample.score for sample in group if not sample.greedy]
    return max(scores) != min(scores)


def number(groups: list[Group]) -> list[Sample]:
    """The samples of `groups`, with `group` counted from 0."""
    return [replace(sample, group=i) for i, group in enumerate(groups) for sample in group]


def prompts_to_draw(missing: int, accepted: int, seen: int, most: int) -> int:
    """How many prompts the next round of dynamic sampling draws so that about `missing` of them teach, judged by the `accepted` of the
    `seen` so far; at least `missing`, at most `most`."""
    if missing >= most or not seen:
        return min(missing, most)
    rate = max(accepted / seen, missing / most)
    return min(most, math.ceil(missing / rate))
