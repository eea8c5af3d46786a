"""Labels are tried before anything is started: one that `math_verify` cannot read would score 0 for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hybrid.answers.compare import label_answer
from hybrid.answers.labels import BadLabel, label_text
from hybrid.data.prompts import PromptSource
from hybrid.data.samples import Prompt
from hybrid.errors import DataError
from hybrid.rewards.function import RewardFunction
from hybrid.rewards.verifiers import MathVerify

TRY_S = 10.0
"""Seconds that reading labels may take; a label takes about a millisecond."""
SHOWN = 5
STREAM = 16


def check_labels(
    rewards: Sequence[RewardFunction | None],
    train: PromptSource,
    eval_reward: RewardFunction | None,
    held_out: Sequence[Prompt],
    say: Callable[[str], None],
    seconds: float = TRY_S,
) -> None:
    r"""Check the labels of prompts that `math_verify` scores; other functions may take any label, None included. `rewards` are those
    of the prompts of `train`, of which a task's stream has no end: its next `STREAM` are checked.

    Each label must be text or a finite number, and not stand for a missing value. As many as fit in `seconds` are tried as
    `\boxed{label}`; `say` is told how many cannot be read, with five of them.

    Raises `DataError`, with file and line, for the first label that is not one, and when none of those tried can be read.
    """
    prompts: list[Prompt] = []
    if any(reward is not None and reward.name == "math_verify" for reward in rewards):
        prompts += train.look(STREAM)
    if eval_reward is not None and eval_reward.name == "math_verify":
        prompts += held_out
    if not prompts:
        return
    for prompt in prompts:
        _require_label(prompt)
    tried, unreadable = _try(prompts, seconds)
    if not unreadable:
        return
    shown = "".join(f"\n  {p.where}: {_short(p.label)}: {reason}" for p, reason in unreadable[:SHOWN])
    if len(unreadable) == tried:
        raise DataError(
            f"{unreadable[0][0].where}: math_verify can read none of {tried} labels that were tried, of {len(prompts)}:{shown}\n"
            "Name the column with the answers in data.label_field, or score with a function of your own (file.py:function)."
        )
    others = f" ({len(prompts) - tried} more were not tried)" if tried < len(prompts) else ""
    say(f"math_verify cannot read {len(unreadable)} of {tried} labels{others}, whose responses score 0:{shown}")


def _require_label(prompt: Prompt) -> None:
    try:
        text = label_text(prompt.label)
    except BadLabel as error:
        raise DataError(
            f"{prompt.where}: {_short(prompt.label)} is invalid as the label of math_verify: {error}."
        ) from error
    if label_answer(text) is None:
        raise DataError(
            f"{prompt.where}: {_short(text)} is invalid as the label of math_verify: there is nothing in it. Give the record an answer, "
            "or remove it."
        )


def _try(prompts: Sequence[Prompt], seconds: float) -> tuple[int, list[tuple[Prompt, str]]]:
    """How many prompts were tried, spread over all, and those whose labels cannot be read, with the reason."""
    verifier = MathVerify()
    found: list[tuple[Prompt, str]] = []
    known: dict[str, str | None] = {}
    tried = 0
    # Data is often sorted by source: a cut-off pass looks at all of it, more and more closely.
    order = [i for step, start in _passes(len(prompts)) for i in range(start, len(prompts), step)]
    end: float | None = None
    for index in order:
        text = label_text(prompts[index].label)
        if text not in known:
            if end is not None and time.monotonic() > end:
                break
            known[text] = verifier.unreadable(text)
            end = end or time.monotonic() + seconds  # from when the process is up
        if reason := known[text]:
            found.append((prompts[index], reason))
        tried += 1
    return tried, found


def _passes(count: int) -> list[tuple[int, int]]:
    """(step, start) of passes that together visit each of `count` places once."""
    step = 1 << max(count - 1, 0).bit_length()
    passes = [(step, 0)]
    while step > 1:
        passes.append((step, step // 2))
        step //= 2
    return passes


def _short(label: object) -> str:
    text = repr(label)
    return text if len(text) <= 100 else f"{text[:100]} ..."
