"""The quickstart's reward: for the right answer, and the more for saying little else, so that even a wrong answer can improve."""

from __future__ import annotations

import re


def score(prompts: list[str], responses: list[str], labels: list, **columns: list) -> list[float]:
    """The first number of a response counts. Right: 0.4, and up to 0.6 more for the share of the response that it is. Wrong: up to 0.2
    for that share."""
    return [_score(response.strip(), int(label)) for response, label in zip(responses, labels)]


def _score(response: str, answer: int) -> float:
    first = re.search(r"-?\d+", response)
    if first is None:
        return 0.0
    share = len(first[0]) / len(response)
    return 0.4 + 0.6 * share if int(first[0]) == answer else 0.2 * share
