"""What travels through a step: prompts in, samples out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Prompt:
    """One prompt, tokenised once."""

    index: int
    """Position in the run's prompt stream: unique per use, so seeds derived from it differ between epochs."""
    text: str
    """Readable form, shown in samples.jsonl and given to reward functions."""
    token_ids: list[int]
    """The chat template's output; what engines and trainer both see."""
    label: Any = None
    """Whatever the reward compares with; None when the data has no label."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The record's other columns, passed to the reward function by name."""
    where: str = ""
    """Where it came from, for errors: `file:line`, `name[index]` or the question of a task; empty when nothing says so."""


@dataclass
class Sample:
    """One response to a prompt."""

    prompt: Prompt
    group: int
    """Which prompt of the step it answers, 0..prompts_per_step-1."""
    token_ids: list[int]
    """Response tokens, including the end token when the model produced one."""
    logprobs: list[float]
    """The sampler's log-prob of each response token, after temperature."""
    text: str
    """Decoded response without the end token, and without special tokens unless `reward.keep_special_tokens` keeps them."""
    truncated: bool
    """True when generation ended because max_new_tokens was reached."""
    weight_version: int
    """Version of the weights that made it."""
    reward: float | None = None
    """What the rewards said, summed with their weights; None before scoring."""
    score: float | None = None
    """`reward` after shaping: what the advantage is computed from."""
    greedy: bool = False
    """True for the greedy answer that remax compares with: scored, never trained on."""
