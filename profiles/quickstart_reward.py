"""The quickstart's reward: most of it for the right answer, a little for saying nothing else, so that even a wrong answer can improve."""

from __future__ import annotations

import re


def score(prompts: list[str], responses: list[str], labels: list, **columns: list) -> list[float]:
    """0.8 when the first number is the right one, 0.2 when the response is a number and nothing but a number."""
    return [_score(response, str(label)) for response, label in zip(responses, labels)]


def _score(response: str, answer: str) -> float:
    first = re.search(r"-?\d+", response)
    is_right = first is not None and int(first[0]) == int(answer)
    is_bare = re.fullmatch(r"-?\d+", response.strip()) is not None
    return 0.8 * is_right + 0.2 * is_bare
