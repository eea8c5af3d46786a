"""Rewards that ship with hybrid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def math_verify(prompts: list[str], responses: list[str], labels: list[Any]) -> list[float]:
    """1.0 where the response's last mathematical answer equals the label, boxed or plain, else 0.0 (package math-verify)."""
    from math_verify import parse, verify

    # Its own timeouts use signals, which only the main thread may set; the reward's deadline bounds the batch.
    def equal(response: str, label: Any) -> bool:
        gold = parse(str(label), parsing_timeout=None)
        return bool(verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None))

    return [float(equal(r, label)) for r, label in zip(responses, labels)]


def reasoning_gym(task: Any) -> Callable[..., list[float]]:
    """The scorer of a reasoning-gym task: 0.0 to 1.0, 1.0 for exactly the answer."""

    def reasoning_gym_score(
        prompts: list[str], responses: list[str], labels: list[Any], entry: list[dict]
    ) -> list[float]:
        return [float(task.score_answer(answer=r.strip(), entry=e)) for r, e in zip(responses, entry)]

    return reasoning_gym_score
