"""Every estimator with ppo, and every loss with group_norm, learns two trivial tasks on three seeds; with the sign wrong none does.

By name: `pytest tests/e2e/test_learning_matrix.py`.
"""

from __future__ import annotations

import pytest
import torch

from hybrid.algorithms.advantages import ESTIMATORS
from hybrid.algorithms.losses import POLICY_LOSSES
from tests.e2e.learning import TASKS, learn

PAIRS = [*((estimator, "ppo") for estimator in ESTIMATORS), *(("group_norm", k) for k in POLICY_LOSSES if k != "ppo")]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The tensors are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize(("estimator", "kind"), PAIRS)
def test_it_learns(estimator, kind, task, seed):
    assert learn(task, estimator, kind, seed) >= task.reached


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
@pytest.mark.parametrize(("estimator", "kind"), PAIRS)
def test_with_the_sign_wrong_it_does_not(estimator, kind, task):
    assert learn(task, estimator, kind, steps=20, sign=-1.0) < task.reached
