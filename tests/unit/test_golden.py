"""Every case of tests/golden: numbers computed elsewhere from the same formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybrid.algorithms import advantages, kl, losses, rewards

CASES = json.loads((Path(__file__).parents[1] / "golden" / "cases.json").read_text())
FUNCTIONS = {
    "gae": advantages.gae,
    "discounted_returns": advantages.discounted_returns,
    "compute_advantages": advantages.compute_advantages,
    "kl_estimate": kl.kl_estimate,
    "adaptive_kl": kl.adaptive_kl,
    "policy_loss": losses.policy_loss,
    "value_loss": losses.value_loss,
    "overlong_penalty": rewards.overlong_penalty,
}
SELECTING = ("estimator", "kind", "reduction", "correction")


def case_name(case: dict) -> str:
    return "-".join([case["fn"], *(str(case["kwargs"][key]) for key in SELECTING if key in case["kwargs"])])


def tensors(kwargs: dict, dtype: torch.dtype) -> dict:
    def convert(name: str, value):
        if not isinstance(value, list):
            return value
        return torch.tensor(value, dtype=torch.int64 if name == "groups" else dtype)

    return {name: convert(name, value) for name, value in kwargs.items()}


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_value(case):
    result = FUNCTIONS[case["fn"]](**tensors(case["kwargs"], torch.float64))
    expected = case["expect"]
    if case["fn"] == "policy_loss":
        result = result[0]
    if isinstance(expected, dict):
        expected = [expected["advantages"], expected["returns"]]
        result = torch.stack(result)
    torch.testing.assert_close(
        torch.as_tensor(result, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-5,
        atol=1e-6,
        equal_nan=True,
    )


@pytest.mark.parametrize("case", [c for c in CASES if c["fn"] in ("policy_loss", "value_loss")], ids=case_name)
def test_gradient_is_finite_and_zero_where_masked(case):
    kwargs = tensors(case["kwargs"], torch.float32)
    trained = kwargs["logprobs" if case["fn"] == "policy_loss" else "values"].requires_grad_()
    result = FUNCTIONS[case["fn"]](**kwargs)
    loss = result[0] if case["fn"] == "policy_loss" else result
    loss.backward()
    assert loss.dtype == torch.float32
    assert trained.grad.isfinite().all()
    assert (trained.grad[kwargs["mask"] == 0] == 0).all()
