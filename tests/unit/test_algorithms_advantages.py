"""Advantages: hand-computed numbers, degenerate batches, and what must not matter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.algorithms.advantages import ESTIMATORS, compute_advantages, discounted_returns, gae, whiten

GROUP_ESTIMATORS = [e for e in ESTIMATORS if e not in ("gae", "reinforce")]


def advantages_of(estimator, scores, groups, lengths=None, width=None, kl=None, values=None):
    """One number per row: the advantage on its last token, for rows of `lengths` tokens."""
    lengths = lengths or [1] * len(scores)
    width = width or max(lengths)
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    kl = torch.zeros(mask.shape) if kl is None else kl
    advantages, _ = compute_advantages(
        estimator,
        torch.tensor(scores),
        kl,
        torch.zeros(mask.shape) if values is None else values,
        mask,
        torch.tensor(groups),
        0.9,
        0.9,
        greedy_scores=torch.full((max(groups) + 1,), 0.25),
    )
    return advantages


@pytest.mark.parametrize(
    ("estimator", "scores", "groups", "expected"),
    [
        ("rloo", [6.0, 3.0, 9.0, 12.0, 1.0], [0, 0, 1, 1, 2], [3, -3, -3, 3, 0]),
        ("dr_grpo", [6.0, 9.0, 3.0, 12.0], [0, 1, 0, 1], [1.5, -1.5, -1.5, 1.5]),
        ("group_norm", [2.0, 2.0, 1.0, 3.0], [0, 0, 1, 1], [0, 0, -(0.5**0.5), 0.5**0.5]),
        ("maxrl", [1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], [3, -1, -1, -1]),
        ("maxrl", [0.0, 0.0, -1.0], [0, 0, 0], [0, 0, 0]),
        ("maxrl", [0.7, -0.6, -0.1], [0, 0, 0], [0, 0, 0]),
        ("maxrl", [0.6, -0.7, 0.1], [0, 0, 0], [0, 0, 0]),
        ("remax", [1.0, 0.0], [0, 1], [0.75, -0.25]),
    ],
)
def test_group_estimators_by_hand(estimator, scores, groups, expected):
    torch.testing.assert_close(
        advantages_of(estimator, scores, groups)[:, 0],
        torch.tensor(expected, dtype=torch.float32),
        atol=1e-5,
        rtol=1e-5,
    )


def test_opo_weighs_the_baseline_by_length():
    advantages = advantages_of("opo", [1.0, 0.0], [0, 0], lengths=[1, 3])
    torch.testing.assert_close(advantages[0, 0], torch.tensor(0.75))
    torch.testing.assert_close(advantages[1], torch.full((3,), -0.25))


def test_interior_masked_tokens_are_skipped():
    rewards, values = torch.tensor([[0.0, 7.0, 5.0]]), torch.tensor([[1.0, 999.0, 3.0]])
    with_gap = gae(rewards, values, torch.tensor([[1, 0, 1]]), 0.9, 0.8)
    without = gae(rewards[:, [0, 2]], values[:, [0, 2]], torch.ones(1, 2), 0.9, 0.8)
    for gap, plain in zip(with_gap, without):
        torch.testing.assert_close(gap[:, [0, 2]], plain)
        assert gap[0, 1] == 0


def test_gae_with_lambda_one_is_return_minus_value():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=generator) < 0.7
    advantages, returns = gae(rewards, values, mask, 0.95, 1.0)
    expected = discounted_returns(rewards, mask, 0.95)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, torch.where(mask, expected - values, 0.0))


def test_scores_that_float_cannot_hold_exactly_give_no_group_norm_signal():
    assert (advantages_of("group_norm", [0.7] * 7 + [0.1] * 3, [0] * 7 + [1] * 3) == 0).all()


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_group_of_one_carries_no_signal(estimator):
    expected = 1.0 - 0.25 if estimator == "remax" else 0.0
    assert advantages_of(estimator, [1.0], [0]) == pytest.approx(expected if estimator != "reinforce_baseline" else 0.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    "lengths", [[0, 0, 0, 0], [1, 1, 1, 1], [0, 5, 1, 0]], ids=["all masked", "one token", "empty rows"]
)
@pytest.mark.parametrize("scores", [[1.0] * 4, [1e6, -1e6, 0.0, 0.0]], ids=["constant", "extreme"])
def test_degenerate_batches_are_finite_and_zero_where_masked(estimator, lengths, scores):
    mask = torch.arange(5)[None, :] < torch.tensor(lengths)[:, None]
    garbage = torch.where(mask, 0.5, torch.nan)
    advantages = advantages_of(estimator, scores, [0, 0, 1, 2], lengths, width=5, kl=garbage, values=garbage)
    assert advantages.isfinite().all()
    assert (advantages[~mask] == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_rows_and_no_columns(estimator):
    empty = torch.zeros(0, 3)
    ids = torch.zeros(0, dtype=torch.long)
    greedy = torch.zeros(1)
    assert compute_advantages(estimator, empty[:, 0], empty, empty, empty, ids, 1.0, 1.0, greedy)[0].shape == (0, 3)
    flat, ids = torch.zeros(2, 0), torch.zeros(2, dtype=torch.long)
    assert compute_advantages(estimator, torch.ones(2), flat, flat, flat, ids, 1.0, 1.0, greedy)[0].shape == (2, 0)


def test_whitened_over_unmasked_tokens_only():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    white = whiten(torch.tensor([[1.0, 2.0, 1e9], [6.0, torch.nan, torch.inf]]), mask)
    kept = white[mask.bool()]
    torch.testing.assert_close(kept.mean(), torch.tensor(0.0))
    torch.testing.assert_close(kept.var(correction=0), torch.tensor(1.0))


def test_sums_over_many_bfloat16_tokens_are_float32():
    rewards, mask = torch.full((1, 2000), 2**-7, dtype=torch.bfloat16), torch.ones(1, 2000)
    returns = discounted_returns(rewards, mask, 1.0)
    assert returns.dtype == torch.float32
    assert returns[0, 0] == 2000 / 2**7
    assert gae(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)[0][0, 0] == 2000 / 2**7


def test_wrong_calls_are_named():
    one = torch.ones(1, 1)
    rest = (torch.ones(1), one, None, one, torch.zeros(1, dtype=torch.long), 1.0, 1.0)
    for estimator, word in [("grpo", "group_norm"), ("gae", "values"), ("remax", "greedy_scores")]:
        with pytest.raises(ValueError, match=word):
            compute_advantages(estimator, *rest)


@settings(max_examples=25, deadline=None)
@given(estimator=st.sampled_from(ESTIMATORS), seed=st.integers(0, 2**31), extra=st.integers(1, 4))
def test_padding_and_order_of_rows_change_nothing(estimator, seed, extra):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = 6, 7
    mask = torch.rand(rows, columns, generator=generator) < 0.6
    kl, values = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    scores = torch.randint(0, 3, (rows,), generator=generator).double()
    groups = torch.randint(0, 3, (rows,), generator=generator)
    greedy = torch.rand(3, generator=generator, dtype=torch.float64)

    def run(order, pad):
        def widen(x, fill):
            return torch.nn.functional.pad(x[order], (0, pad), value=fill)

        return compute_advantages(
            estimator,
            scores[order],
            widen(kl, torch.nan),
            widen(values, torch.nan),
            widen(mask, False),
            groups[order],
            0.97,
            0.9,
            greedy,
        )

    plain, order = run(torch.arange(rows), 0), torch.randperm(rows, generator=generator)
    for before, after in zip(plain, run(order, extra)):
        torch.testing.assert_close(after[:, :columns], before[order])
        assert (after[:, columns:] == 0).all()
