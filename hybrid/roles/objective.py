"""What the controller tells the trained roles and what they answer: plain data, importable without DeepSpeed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from hybrid.algorithms.logprobs import EndMask
from hybrid.errors import TrainingStopped
from hybrid.roles.packing import Row

Floats = torch.Tensor | np.ndarray
"""float32: tensors in the controller, arrays on the ranks, where they are views of what Ray delivered."""


@dataclass(frozen=True)
class PolicyRow:
    """One sample as the actor trains on it. Columns hold one float per response token."""

    row: Row
    advantages: Floats
    rollout_logprobs: Floats
    old_logprobs: Floats | None = None
    """None when the training forward's own log-probs serve: one optimizer step per rollout."""
    ref_logprobs: Floats | None = None
    is_fresh: bool = True
    """False when the sampler had older weights than the trainer: the two need not agree."""


@dataclass(frozen=True)
class PolicyObjective:
    """The loss of an optimizer step; `normalizer` counts over the whole step (tokens, rows, or rows * max_tokens)."""

    kind: str
    reduction: str
    clip_low: float
    clip_high: float
    dual_clip: float | None
    correction: str
    correction_low: float
    correction_high: float
    entropy_coef: float
    entropy_metric: bool
    kl_coef: float
    kl_kind: str
    temperature: float
    max_tokens: int
    normalizer: float
    sampler_bound: float | None
    """Largest mean |trainer - sampler| log-prob difference; beyond it the step is not taken and the run stops."""
    ends: EndMask | None = None
    """Where the sampler could not end a response; None where it always could."""

    @property
    def with_entropy(self) -> bool:
        return self.entropy_metric or self.entropy_coef > 0


@dataclass
class Fed:
    """Tokens that a rank's forward and backward passes were fed, and those of them that belong to no sample."""

    tokens: int = 0
    padding: int = 0


@dataclass
class UpdateResult:
    """What one optimizer step reports. `counted` is this rank's bytes by part just before the update, `fed` what it was fed; the rest is
    equal on all ranks."""

    applied: bool
    metrics: dict[str, float | None]
    counted: dict[str, int]
    fed: Fed = field(default_factory=Fed)


@dataclass(frozen=True)
class ValueRow:
    """One sample as the critic trains on it. Columns hold one float per response token."""

    row: Row
    returns: Floats
    old_values: Floats


def batch_metrics(fed: Sequence[Fed]) -> dict[str, float]:
    """How well a step's tokens were packed and spread, from what each rank was fed."""
    tokens = sum(rank.tokens for rank in fed)
    return {
        "batch/padding_share": sum(rank.padding for rank in fed) / tokens,
        "batch/rank_imbalance": max(rank.tokens for rank in fed) * len(fed) / tokens,
    }


def check_sampler(mean: float | None, largest: float | None, bound: float | None) -> None:
    """Raise `TrainingStopped` when trainer and sampler give the same tokens too different log-probs (mean absolute difference)."""
    if mean is None or bound is None or mean <= bound:
        return
    raise TrainingStopped(
        f"Trainer and sampler disagree: mean |log-prob difference| {mean:.3f} (largest {largest:.2f}) exceeds "
        f"algorithm.sampler_kl_bound={bound}. With bf16 a healthy mean is below 0.05. Usual causes: weights that did not arrive in the "
        "engine, another temperature or chat template, a model whose kernels differ. The step was not taken."
    )
