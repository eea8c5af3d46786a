"""Learning rate as a pure function of the optimizer step, so that it needs no state to resume."""

from __future__ import annotations

import math

from hybrid.config.sections import TrainedRole


def learning_rate(role: TrainedRole, update: int, total_updates: int) -> float:
    """Rate of optimizer step `update` (from 0): linear warm-up, then the schedule down to `min_lr_ratio` at the last step."""
    if update < role.warmup_steps:
        return role.learning_rate * (update + 1) / role.warmup_steps
    if role.schedule == "constant":
        return role.learning_rate
    progress = min(1.0, (update - role.warmup_steps) / max(1, total_updates - 1 - role.warmup_steps))
    shape = 1 - progress if role.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return role.learning_rate * (role.min_lr_ratio + (1 - role.min_lr_ratio) * shape)
