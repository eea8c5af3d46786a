"""Scores of samples, each a finite number, or an error that shows the sample. Never a silent 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from hybrid.data.samples import Sample
from hybrid.errors import RewardError
from hybrid.rewards.function import Batch, Reply, RewardFunction
from hybrid.rewards.plain import LARGEST_SCORE, SHOWN, shown
from hybrid.rewards.user import OWN_NAMES


class Part(NamedTuple):
    """The share of one process: its number, and the places of its samples in the batch."""

    process: int
    places: list[int]


def score(reward: RewardFunction, samples: Sequence[Sample]) -> list[float]:
    """One finite float per sample, from one call of `reward`, or one call of each of its processes with whole prompts.

    Raises `RewardError`, with function, rule and sample, when the function raises, passes its deadline, ends its process, needs a column
    that the data does not have, or returns anything but a list (array, tensor, generator) of that many finite numbers.
    """
    if not samples:
        return []
    batch = batch_of(samples)
    if missing := reward.missing(batch):
        raise _error(
            reward,
            f"has a parameter {missing[0]}, but a batch has {', '.join(batch)}",
            "Give it a default, or rename it.",
        )
    parts = spread([sample.group for sample in samples], reward.processes)
    end = time.monotonic() + reward.timeout_s
    replies = reward.ask([_part(batch, places) for places in parts])
    scores: dict[int, float] = {}
    for number, (places, reply) in enumerate(zip(parts, replies, strict=True)):
        if "scores" not in reply and "returned" not in reply:
            raise _failure(reward, batch, samples, Part(number, places), reply, end)
        checked = _checked(reward, reply, [samples[i] for i in places], places, len(samples))
        scores |= dict(zip(places, checked, strict=True))
    return [scores[i] for i in range(len(samples))]


def spread(groups: Sequence[int], parts: int) -> list[list[int]]:
    """Places 0..len(groups)-1 in at most `parts` lists of about equal length, the places of a group together and in their order."""
    places: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        places.setdefault(group, []).append(place)
    shares: list[list[int]] = [[] for _ in range(min(parts, len(places)))]
    for of_group in places.values():
        min(shares, key=len).extend(of_group)
    return shares


def batch_of(samples: Sequence[Sample]) -> Batch:
    """Arguments of a reward function. A column that a record lacks is None there; one named as one of ours is left out."""
    columns = dict.fromkeys(name for s in samples for name in s.prompt.columns if name not in OWN_NAMES)
    own = {
        "prompts": [s.prompt.text for s in samples],
        "responses": [s.text for s in samples],
        "labels": [s.prompt.label for s in samples],
        "token_ids": [s.token_ids for s in samples],
    }
    return own | {name: [s.prompt.columns.get(name) for s in samples] for name in columns}


def accuracy(scores: Sequence[float]) -> float:
    """Share of scores of at least 1.0. `scores` must not be empty."""
    return sum(value >= 1.0 for value in scores) / len(scores)


def _part(batch: Batch, places: list[int]) -> Batch:
    return {name: [values[i] for i in places] for name, values in batch.items()}


def _checked(reward: RewardFunction, reply: Reply, samples: list[Sample], places: list[int], of: int) -> list[float]:
    """The scores of a reply about `samples`, which are number `places` of the `of` in the batch."""
    count = len(samples)
    if "returned" in reply:
        raise _error(reward, f"returned {reply['returned']}", f"Return a list of {count} numbers, one per response.")
    scores = reply["scores"]
    if len(scores) != count:
        at = min(len(scores), count - 1)
        raise _error(
            reward,
            f"returned {len(scores)} scores for {count} responses",
            "Return one per response, in their order.",
            samples[at],
            f"first sample without a score: number {places[at]} of {of}"
            if len(scores) < count
            else f"last sample: number {places[at]} of {of}",
        )
    for place, sample, value in zip(places, samples, scores):
        if isinstance(value, str):
            fix = f"Every score must be a finite number of at most {LARGEST_SCORE:g} in size."
            if value == "None":
                fix += " None does not leave a response out: return 0.0 for one that it says nothing about."
            raise _error(reward, f"returned {value} as score {place}", fix, sample, f"sample: number {place} of {of}")
    return scores


def _failure(
    reward: RewardFunction, batch: Batch, samples: Sequence[Sample], part: Part, reply: Reply, end: float
) -> RewardError:
    """The error of a call that gave no scores, about the sample that causes it where one can be found until `end`."""
    rule, fix, place = _rule(reward, reply), "Correct it.", None
    if "hung" in reply:
        fix = "Raise reward.timeout_s, or make it faster."
    elif "bad" in reply:
        place = part.places[reply["bad"][0]]
    else:
        place = _culprit(reward, batch, part, reply, end)
    which = "sample"
    if "hung" in reply:
        which = "first sample"
    elif place is None:
        which = f"no sample alone makes it {'raise' if 'raised' in reply else 'end'}; the first one"
    at = part.places[0] if place is None else place
    return _error(reward, rule, fix, samples[at], f"{which}: number {at} of {len(samples)}")


def _rule(reward: RewardFunction, reply: Reply) -> str:
    if "hung" in reply:
        return f"did not return within {reward.timeout_s:g} s: {reply['hung']}"
    if "ended" in reply:
        return f"crashed: {reply['ended']}"
    if "bad" in reply:
        return f"raised {reply['bad'][1]}"
    error = reply["raised"]
    return f"raised {error['type']}: {error['text']}{error['where']}"


def _culprit(reward: RewardFunction, batch: Batch, part: Part, reply: Reply, end: float) -> int | None:
    """The place of the sample that makes the function fail alike, found by asking for one at a time, in what is left of the deadline."""
    for place in part.places:
        left = end - time.monotonic()
        if left <= 0:
            return None
        (single,) = reward.ask([_part(batch, [place])], left, part.process)
        if "hung" in single:
            return None
        if _kind(single) == _kind(reply):
            return place
    return None


def _kind(reply: Reply) -> str | None:
    """Equal for failures that are alike."""
    return reply["raised"]["kind"] if "raised" in reply else reply.get("ended")


def _error(
    reward: RewardFunction, rule: str, fix: str, sample: Sample | None = None, which: str = "sample"
) -> RewardError:
    lines = [f"The reward {reward.name} {rule}{'' if rule.endswith('.') else '.'} {fix}"]
    if sample is not None:
        lines += [
            f"  {which} in the batch",
            f"  prompt:   {_tail(sample.prompt.text)}",
            f"  response: {_tail(sample.text)}",
            f"  label:    {shown(sample.prompt.label)}",
        ]
    return RewardError("\n".join(lines))


def _tail(text: str) -> str:
    return repr(text) if len(text) <= SHOWN else f"... {text[-SHOWN:]!r}"
