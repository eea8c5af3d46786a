"""Scores of samples, each a finite number, or an error that shows the sample. Never a silent 0."""

from __future__ import annotations

import math
import numbers
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid.data.samples import Sample
from hybrid.errors import RewardError
from hybrid.rewards.function import BadSample, Batch, Hung, RewardFunction

OWN_NAMES = ("prompts", "responses", "labels")
TAIL = 300
"""Characters of prompt and response that an error shows."""

LARGEST_SCORE = 1e15
"""Squares of larger ones leave float32, and all advantages would be 0 or not a number."""


def score(reward: RewardFunction, samples: Sequence[Sample]) -> list[float]:
    """One finite float per sample, from one call of `reward`.

    Raises `RewardError`, with function, rule and sample, when the function raises, passes its deadline, needs a column that the data does
    not have, or returns anything but a list (array, tensor) of that many finite numbers.
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
    started = time.monotonic()
    try:
        result = reward(batch)
    except Hung as hung:
        rule = f"did not return within {reward.timeout_s:g} s: {hung}"
        raise _error(reward, rule, "Raise reward.timeout_s, or make it faster.", samples, 0, "first sample") from hung
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        index = _culprit(reward, batch, error, started + reward.timeout_s - time.monotonic())
        which = "sample" if index is not None else "no sample alone makes it raise; the first one"
        raise _error(reward, f"raised {_raised(error)}", "Correct it.", samples, index or 0, which) from error
    return _checked(reward, result, samples)


def batch_of(samples: Sequence[Sample]) -> Batch:
    """Arguments of a reward function. A column that a record lacks is None there; one named as the first three is left out."""
    columns = dict.fromkeys(name for s in samples for name in s.prompt.columns if name not in OWN_NAMES)
    own = {
        "prompts": [s.prompt.text for s in samples],
        "responses": [s.text for s in samples],
        "labels": [s.prompt.label for s in samples],
    }
    return own | {name: [s.prompt.columns.get(name) for s in samples] for name in columns}


def accuracy(scores: Sequence[float]) -> float:
    """Share of scores of at least 1.0. `scores` must not be empty."""
    return sum(value >= 1.0 for value in scores) / len(scores)


def _checked(reward: RewardFunction, result: Any, samples: Sequence[Sample]) -> list[float]:
    returned = result.tolist() if hasattr(result, "tolist") else result  # numpy, torch
    if not isinstance(returned, list | tuple):
        raise _error(
            reward, f"returned {_shown(result)}", f"Return a list of {len(samples)} numbers, one per response."
        )
    if len(returned) != len(samples):
        raise _error(
            reward,
            f"returned {len(returned)} scores for {len(samples)} responses",
            "Return one per response, in their order.",
            samples,
            min(len(returned), len(samples) - 1),
            "first sample without a score" if len(returned) < len(samples) else "last sample",
        )
    return [_number(reward, value, samples, i) for i, value in enumerate(returned)]


def _number(reward: RewardFunction, value: Any, samples: Sequence[Sample], index: int) -> float:
    plain = value.item() if hasattr(value, "item") else value
    try:
        number = float(plain) if isinstance(plain, numbers.Real) else math.nan
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_SCORE:
        rule = f"returned {_shown(value)} as score {index}"
        raise _error(
            reward, rule, f"Every score must be a finite number of at most {LARGEST_SCORE:g} in size.", samples, index
        )
    return number


def _culprit(reward: RewardFunction, batch: Batch, error: BaseException, seconds: float) -> int | None:
    """The sample that makes the function raise, found by asking for one at a time, in what is left of the deadline."""
    if isinstance(error, BadSample):
        return error.index
    end = time.monotonic() + seconds
    for index in range(len(batch["responses"])):
        left = end - time.monotonic()
        if left <= 0:
            return None
        try:
            reward({name: [values[index]] for name, values in batch.items()}, left)
        except Hung:
            return None
        except KeyboardInterrupt:
            raise
        except BaseException as single:
            if type(single) is type(error):
                return index
    return None


def _raised(error: BaseException) -> str:
    """Type, text and the innermost line, which is where a user looks first."""
    if isinstance(error, BadSample):
        return str(error)
    between = (str(Path(__file__).parent), "concurrent/futures")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in between)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _error(
    reward: RewardFunction,
    rule: str,
    fix: str,
    samples: Sequence[Sample] = (),
    index: int = 0,
    which: str = "sample",
) -> RewardError:
    lines = [f"The reward {reward.name} {rule}. {fix}"]
    if samples:
        sample = samples[index]
        lines += [
            f"  {which}: number {index} of {len(samples)} in the batch",
            f"  prompt:   {_tail(sample.prompt.text)}",
            f"  response: {_tail(sample.text)}",
            f"  label:    {_shown(sample.prompt.label)}",
        ]
    return RewardError("\n".join(lines))


def _tail(text: str) -> str:
    return repr(text) if len(text) <= TAIL else f"... {text[-TAIL:]!r}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= TAIL else f"{text[:TAIL]} ..."
