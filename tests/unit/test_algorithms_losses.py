"""Losses: hand-computed numbers, gradients by finite differences, garbage in masked slots, extreme inputs."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.algorithms.kl import kl_estimate
from hybrid.algorithms.losses import CORRECTIONS, POLICY_LOSSES, REDUCTIONS, policy_loss, reduce_tokens, value_loss
from hybrid.algorithms.rewards import overlong_penalty


def loss_of(logprobs, old, advantages, mask, kind="ppo", **changes):
    options = {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": None,
        "reduction": "token_mean",
        "max_tokens": 9,
        "rollout_logprobs": None,
        "correction": "none",
    }
    return policy_loss(logprobs, old, advantages, mask, kind, **options | changes)


def batch(seed, rows=5, columns=6, spread=0.5):
    """logprobs, old, advantages, rollout, mask: float64, with at least one token, one empty row and one gap."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, columns, generator=generator, dtype=torch.float64) * 3
    logprobs = old + torch.randn(rows, columns, generator=generator, dtype=torch.float64) * spread
    rollout = old + torch.randn(rows, columns, generator=generator, dtype=torch.float64) * spread
    advantages = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, columns, generator=generator) < 0.7
    mask[0, 0], mask[1] = True, False
    return logprobs, old, advantages, rollout, mask


@pytest.mark.parametrize(
    ("ratios", "advantages", "dual_clip", "expected"),
    [
        ([0.5, 1.0, 1.5], [1.0, -1.0, 2.0], None, [-0.5, 1.0, -2.4]),
        ([0.5, 1.0, 10.0], [1.0, -1.0, -4.0], 3.0, [-0.5, 1.0, 12.0]),
        ([2.0, 2.0, 0.5], [2.0, -2.0, 2.0], 1.5, [-2.4, 3.0, -1.0]),
    ],
)
def test_ppo_by_hand(ratios, advantages, dual_clip, expected):
    logprobs, old, mask = torch.tensor([ratios]).log(), torch.zeros(1, 3), torch.ones(1, 3)
    loss, metrics = loss_of(logprobs, old, torch.tensor([advantages]), mask, dual_clip=dual_clip)
    assert float(loss) == pytest.approx(sum(expected) / 3, rel=1e-5)
    assert float(metrics["ratio_mean"]) == pytest.approx(sum(ratios) / 3)
    assert float(metrics["ratio_max"]) == pytest.approx(max(ratios))


def test_clip_fraction_counts_tokens_that_lost_their_gradient():
    logprobs = torch.tensor([[0.5, 1.5, 1.5, 1.0, 9.0]]).log().requires_grad_()
    advantages = torch.tensor([[-1.0, 1.0, -1.0, 1.0, -1.0]])  # clipped, clipped, free, free, beyond the dual clip
    loss, metrics = loss_of(logprobs, torch.zeros(1, 5), advantages, torch.ones(1, 5), dual_clip=3.0)
    loss.backward()
    assert (logprobs.grad == 0).tolist() == [[True, True, False, False, True]]
    assert float(metrics["clip_fraction"]) == pytest.approx(3 / 5)


def test_reinforce_by_hand():
    logprobs, advantages = torch.tensor([[-0.5, -1.0, -1.5]]), torch.tensor([[1.0, -1.0, 2.0]])
    loss, _ = loss_of(logprobs, logprobs, advantages, torch.ones(1, 3), "reinforce")
    assert float(loss) == pytest.approx(2.5 / 3)


def test_at_the_old_policy_every_kind_gives_the_policy_gradient():
    logprobs, _, advantages, _, mask = batch(0)
    advantages = torch.where(mask, advantages, 0.0)
    expected = -advantages / mask.sum()
    for kind in ("ppo", "cispo", "reinforce"):
        leaf = logprobs.clone().requires_grad_()
        loss_of(leaf, logprobs, advantages, mask, kind)[0].backward()
        torch.testing.assert_close(leaf.grad, expected)
    leaf = logprobs.clone().requires_grad_()
    loss_of(leaf, logprobs, advantages, mask, "gspo")[0].backward()
    torch.testing.assert_close(leaf.grad.sum(1), expected.sum(1))


def test_corrections_by_hand_and_their_metrics():
    old = torch.full((2, 2), -1.0, dtype=torch.float64)
    weights = torch.tensor([[0.25, 1.0], [3.0, 3.0]], dtype=torch.float64)
    mask, ones = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64)
    expected = {
        "tis": [0.25, 1.0, 2.0, 2.0],
        "icepop": [0.0, 1.0, 0.0, 0.0],
        "seq_mask": [0.25, 1.0, 0.0, 0.0],  # geometric means 0.5 and 3
    }
    for correction, kept in expected.items():
        loss, metrics = loss_of(old, old, -ones, mask, rollout_logprobs=old - weights.log(), correction=correction)
        assert float(loss) == pytest.approx(sum(kept) / 4)
        assert float(metrics["correction_weight_mean"]) == pytest.approx(sum(kept) / 4)
        assert float(metrics["correction_ess"]) == pytest.approx(sum(kept) ** 2 / sum(w * w for w in kept) / 4)
        changed = sum(abs(a - b) > 1e-9 for a, b in zip(kept, weights.flatten().tolist()))
        assert float(metrics["correction_clipped_share"]) == pytest.approx(changed / 4)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", [*POLICY_LOSSES, "dual"])
def test_policy_gradient_by_finite_differences(kind, reduction):
    logprobs, old, advantages, rollout, mask = batch(1)
    dual_clip = 1.5 if kind == "dual" else None
    kind = "ppo" if kind == "dual" else kind
    # cispo's weight is a stopped gradient, which differences do not see: hold it by making it constant (fully clipped).
    clip = 0.0 if kind == "cispo" else 0.2

    def loss(x):
        changes = {"clip_low": clip, "clip_high": clip, "dual_clip": dual_clip, "reduction": reduction}
        return loss_of(x, old, advantages, mask, kind, rollout_logprobs=rollout, correction="tis", **changes)[0]

    assert torch.autograd.gradcheck(loss, logprobs.requires_grad_())


def test_cispo_gradient_is_the_clipped_weight_times_the_advantage():
    logprobs, old, advantages, _, mask = batch(2)
    logprobs.requires_grad_()
    loss_of(logprobs, old, advantages, mask, "cispo")[0].backward()
    weights = (logprobs - old).exp().clamp(0.8, 1.2).detach()
    torch.testing.assert_close(logprobs.grad, torch.where(mask, -weights * advantages, 0.0) / mask.sum())


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_only_the_trained_log_probs_and_values_get_a_gradient(kind):
    logprobs, old, advantages, rollout, mask = (x.requires_grad_(x.is_floating_point()) for x in batch(2))
    loss_of(logprobs, old, advantages, mask, kind, rollout_logprobs=rollout, correction="tis")[0].backward()
    assert logprobs.grad.any()
    values, old_values, returns, _, mask = (x.requires_grad_(x.is_floating_point()) for x in batch(3))
    value_loss(values, old_values, returns, mask, 0.2).backward()
    assert values.grad.any()
    assert [x.grad for x in (old, advantages, rollout, old_values, returns)] == [None] * 5


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_gradient_by_finite_differences(clip):
    values, old, returns, _, mask = batch(3)
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, returns, mask, clip), values.requires_grad_())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradient_by_finite_differences(kind):
    logprobs, ref, _, _, _ = batch(4)
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref, kind), logprobs.requires_grad_())


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_slots_reach_neither_value_nor_gradient(kind, correction, garbage):
    logprobs, old, advantages, rollout, mask = batch(5)

    def run(fill):
        tensors = [torch.where(mask, x, fill) for x in (logprobs, old, advantages, rollout)]
        leaf = tensors[0].requires_grad_()
        changes = {"dual_clip": 3.0, "reduction": "sequence_mean", "correction": correction}
        loss, metrics = loss_of(leaf, *tensors[1:3], mask, kind, rollout_logprobs=tensors[3], **changes)
        loss.backward()
        return torch.stack([loss.detach(), *metrics.values()]), leaf.grad

    for clean, dirty in zip(run(0.0), run(garbage)):
        torch.testing.assert_close(dirty, clean)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_masked_slots_of_value_loss_and_kl(garbage):
    values, old, returns, _, mask = batch(6)
    dirty = [torch.where(mask, x, garbage).requires_grad_() for x in (values, old, returns)]
    loss = value_loss(*dirty, mask, 0.2)
    torch.testing.assert_close(loss, value_loss(values, old, returns, mask, 0.2))
    for kind in ("k1", "k2", "k3"):
        loss = loss + reduce_tokens(kl_estimate(dirty[0], dirty[1], kind), mask, "token_mean", 9)
    loss.backward()
    assert loss.isfinite()
    assert dirty[0].grad.isfinite().all()
    assert (dirty[0].grad[~mask] == 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("mask", [[[1, 1], [1, 1]], [[1, 0], [1, 0]], [[0, 0], [1, 1]], [[0, 0], [0, 0]]])
def test_extreme_ratios_and_empty_rows_are_finite_in_float32(kind, reduction, mask):
    mask = torch.tensor(mask)
    logprobs = torch.tensor([[-1e4, 0.0], [0.0, -1e4]], requires_grad=True)
    other = torch.tensor([[0.0, -1e4], [-1e4, 0.0]])
    for correction in CORRECTIONS:
        changes = {"reduction": reduction, "rollout_logprobs": logprobs.detach(), "correction": correction}
        loss, metrics = loss_of(logprobs, other, torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), mask, kind, **changes)
        loss.backward()
        assert torch.stack([loss.detach(), *metrics.values()]).isfinite().all()
        assert logprobs.grad.isfinite().all()
        assert mask.any() or loss == 0


@pytest.mark.parametrize("normalizer", [None, 0, torch.tensor(0.0)])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_mean_over_nothing_is_zero_and_keeps_the_graph(shape, normalizer):
    values = torch.full(shape, torch.nan, requires_grad=True)
    for reduction in REDUCTIONS:
        loss = reduce_tokens(values, torch.zeros(shape), reduction, 9, normalizer)
        loss.backward()
        assert loss == 0
    for loss in (
        loss_of(values, values.detach(), values.detach(), torch.zeros(shape))[0],
        value_loss(values, values.detach(), values.detach(), torch.zeros(shape), 0.2, normalizer),
    ):
        loss.backward()
        assert loss == 0
    assert (values.grad == 0).all()


def test_wrong_names_are_named():
    one = torch.ones(1, 1)
    for changes in ({"kind": "grpo"}, {"reduction": "mean"}, {"correction": "clip", "rollout_logprobs": one}):
        with pytest.raises(ValueError, match="known:"):
            loss_of(one, one, one, one, **changes)
    with pytest.raises(ValueError, match="rollout_logprobs"):
        loss_of(one, one, one, one, correction="tis")
    with pytest.raises(ValueError, match="known:"):
        kl_estimate(one, one, "k4")


def test_overlong_penalty_of_a_tensor():
    penalty = overlong_penalty(torch.tensor([10, 80, 90, 100]), 100, 20, 2.0)
    torch.testing.assert_close(penalty, torch.tensor([0.0, 0.0, -1.0, -2.0]))


LOSSES = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(POLICY_LOSSES),
        "reduction": st.sampled_from(REDUCTIONS),
        "correction": st.sampled_from(CORRECTIONS),
        "dual_clip": st.sampled_from([None, 2.0]),
        "clip_high": st.sampled_from([0.2, 0.28]),
    }
)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), extra=st.integers(0, 4), options=LOSSES)
def test_padding_and_order_of_rows_change_nothing(seed, extra, options):
    *tensors, mask = batch(seed)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))

    def run(order, pad):
        def widen(x, fill):
            return torch.nn.functional.pad(x[order], (0, pad), value=fill)

        logprobs, old, advantages, rollout = (widen(x, math.nan) for x in tensors)
        leaf = logprobs.requires_grad_()
        loss, metrics = loss_of(leaf, old, advantages, widen(mask, False), rollout_logprobs=rollout, **options)
        loss.backward()
        return loss.detach(), torch.stack(list(metrics.values())), leaf.grad

    loss, metrics, gradient = run(torch.arange(len(mask)), 0)
    other_loss, other_metrics, other_gradient = run(order, extra)
    torch.testing.assert_close(other_loss, loss)
    torch.testing.assert_close(other_metrics, metrics)
    torch.testing.assert_close(other_gradient[:, : mask.shape[1]], gradient[order])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(0, 5), max_size=3), options=LOSSES)
def test_cutting_into_micro_batches_changes_nothing(seed, cuts, options):
    *tensors, mask = batch(seed)
    whole = {
        "token_mean": mask.sum(),
        "sequence_mean": mask.any(1).sum(),
        "constant": len(mask) * 9,
    }
    edges = [0, *sorted(cuts), len(mask)]  # equal edges make micro-batches without rows

    def run(pieces, normalizer, value_normalizer):
        leaf = tensors[0].clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for piece in pieces:
            logprobs, old, advantages, rollout = (x[piece] for x in (leaf, *tensors[1:]))
            changes = options | {"rollout_logprobs": rollout, "normalizer": normalizer}
            total = total + loss_of(logprobs, old, advantages, mask[piece], **changes)[0]
            total = total + value_loss(logprobs, old, advantages, mask[piece], 0.2, value_normalizer)
        total.backward()
        return total.detach(), leaf.grad

    uncut = run([slice(None)], None, None)
    cut = run([slice(a, b) for a, b in pairwise(edges)], whole[options["reduction"]], mask.sum())
    for before, after in zip(uncut, cut):
        torch.testing.assert_close(after, before)
