"""Learning rates, step by step."""

import pytest

from hybrid.config.sections import Actor
from hybrid.roles.schedule import learning_rate


def rates(total: int = 11, **fields) -> list[float]:
    return [learning_rate(Actor(learning_rate=1.0, **fields), update, total) for update in range(total)]


def test_constant_after_the_warm_up():
    assert rates(5, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_ends_at_the_floor(schedule):
    values = rates(schedule=schedule, min_lr_ratio=0.1)
    assert values[0] == 1.0
    assert values[5] == pytest.approx(0.55)
    assert values[-1] == pytest.approx(0.1)
    assert values == sorted(values, reverse=True)


def test_a_warm_up_as_long_as_the_run_only_rises():
    assert rates(3, warmup_steps=3, schedule="cosine") == pytest.approx([1 / 3, 2 / 3, 1.0])
