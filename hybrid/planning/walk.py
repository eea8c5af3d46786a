"""The order in which a run goes through its phases, as weighted transitions: what a schedule is paid for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from hybrid.config.run import RunConfig
from hybrid.memory.tenants import NEEDS, Key

Walk = Mapping[tuple[str, str], float]
"""How often a step goes from one phase to another. What happens once in a run counts 1 / steps."""


def walk(cfg: RunConfig, tenants: Iterable[Key]) -> Walk:
    """Transitions of a resolved config that has `tenants`: those of a step, and, for their share, those of start and end.

    Phases that need none of the tenants move nothing and are left out; a phase that follows itself is one.
    """
    have = set(tenants)
    moving = {phase for phase, needs in NEEDS.items() if have.intersection(needs)} | {"init"}
    updates = ["train_critic", "train_actor"] * cfg.updates_per_rollout
    step = [*(["generate"] if cfg.uses_engines else []), "score", *(["forward"] if uses_forward(cfg) else []), *updates]
    start, end = ["init"], ["checkpoint"] if cfg.checkpoint.export else []
    if cfg.uses_engines:
        step += ["sync"]
        start += ["sync", "generate", "forward", "sync", *(["evaluate"] if evaluates(cfg) else [])]
        end = [*(["evaluate"] if evaluates(cfg) else []), *end]
    start, step, end = ([phase for phase in part if phase in moving] for part in (start, step, end))
    weights: dict[tuple[str, str], float] = {}
    for sequence, times in (([*step, step[0]], 1.0), ([*start, step[0]], 1 / cfg.train.steps)):
        _add(weights, sequence, times)
    _add(weights, [step[-1], *end], 1 / cfg.train.steps)
    return weights


def uses_forward(cfg: RunConfig) -> bool:
    """Whether a step has a pass over the samples before training: for a reference, a critic, or old log-probs."""
    return cfg.uses_reference or cfg.uses_critic or cfg.needs_old_logprobs


def evaluates(cfg: RunConfig) -> bool:
    """Whether held-out problems are answered at the start and the end."""
    return cfg.uses_engines and (cfg.data.eval is not None or cfg.data.train.startswith("reasoning_gym:"))


def _add(weights: dict[tuple[str, str], float], sequence: list[str], times: float) -> None:
    for pair in pairwise(sequence):
        if pair[0] != pair[1]:
            weights[pair] = weights.get(pair, 0.0) + times
