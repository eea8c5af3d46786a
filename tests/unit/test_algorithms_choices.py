"""What the functions know, the profile offers, and the table explains."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

import hybrid.algorithms
from hybrid.algorithms.advantages import ESTIMATORS
from hybrid.algorithms.losses import CORRECTIONS, POLICY_LOSSES, REDUCTIONS
from hybrid.config.algorithm import Algorithm, Reward

TABLE = (Path(hybrid.algorithms.__file__).parent / "README.md").read_text()
CHOICES = {
    "advantage": ESTIMATORS,
    "policy_loss": POLICY_LOSSES,
    "reduction": REDUCTIONS,
    "correction": CORRECTIONS,
    "kl_kind": ("k1", "k2", "k3"),
}


@pytest.mark.parametrize("field", CHOICES)
def test_the_profile_offers_what_the_functions_know(field):
    assert set(get_args(Algorithm.model_fields[field].annotation)) == set(CHOICES[field])


@pytest.mark.parametrize("field", CHOICES)
def test_every_choice_has_a_row(field):
    missing = [name for name in CHOICES[field] if f"| `{name}` |" not in TABLE]
    assert not missing


def test_every_key_that_shapes_scores_is_in_the_table():
    elsewhere = {"function", "model", "batch", "processes", "keep_special_tokens", "timeout_s", "batch_tokens"}
    assert not [key for key in Reward.model_fields if key not in elsewhere and f"`{key}`" not in TABLE]
