"""The KL coefficient follows its target, and the guard stops or warns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybrid.config import RunConfig
from hybrid.errors import TrainingStopped
from hybrid.phases import adapt_kl, guard_kl


def session(**algorithm):
    cfg = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "train": {"steps": 1, "prompts_per_step": 10},
            "rollout": {"samples_per_prompt": 10},
            "data": {"train": "d"},
            "algorithm": {"kl_coef": 0.1, **algorithm},
        }
    )
    warnings: list[str] = []
    return SimpleNamespace(cfg=cfg, report=SimpleNamespace(warn=warnings.append), warnings=warnings)


@pytest.mark.parametrize(("kl", "expected"), [(6.0, 0.1002), (1.0, 0.0998), (2.2, 0.1001), (None, 0.1)])
def test_the_coefficient_moves_towards_the_target_by_a_fifth_per_horizon(kl, expected):
    progress = SimpleNamespace(kl_coef=0.1, step=1)
    adapt_kl(session(kl_target=2.0, kl_horizon=10_000), progress, {"kl/response": kl})
    assert progress.kl_coef == pytest.approx(expected)


def test_without_a_target_the_coefficient_stays():
    progress = SimpleNamespace(kl_coef=0.1, step=1)
    adapt_kl(session(), progress, {"kl/response": 99.0})
    assert progress.kl_coef == 0.1


def test_the_coefficient_waits_for_the_actor():
    s = session(advantage="gae", critic_only_steps=2, kl_target=2.0)
    for step, expected in ((2, 0.1), (3, 0.0998)):
        progress = SimpleNamespace(kl_coef=0.1, step=step)
        adapt_kl(s, progress, {"kl/response": 0.0})
        assert progress.kl_coef == pytest.approx(expected)


def test_the_guard_stops_or_warns_beyond_its_bound():
    guard_kl(session(), {"kl/response": 9.0})
    guard_kl(session(), {})
    with pytest.raises(TrainingStopped, match=r"algorithm.kl_bound=10.*raise the bound"):
        guard_kl(session(), {"kl/response": 11.0})
    s = session(kl_bound_action="warn", kl_bound=1.0)
    guard_kl(s, {"kl/response": 2.0})
    assert len(s.warnings) == 1
