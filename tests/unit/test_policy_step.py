"""The actor's loss on packed rows: cut or whole, with every term, and the figures of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid.algorithms.losses import CORRECTIONS, POLICY_LOSSES
from hybrid.roles.models import ModelOptions, load_critic
from hybrid.roles.objective import Fed, PolicyObjective, PolicyRow, batch_metrics
from hybrid.roles.packing import Row, pack
from hybrid.roles.policy_step import policy_objective, step_metrics
from hybrid.roles.reduction import Totals

LENGTHS = [3, 1, 5, 2]
OBJECTIVE = PolicyObjective(
    kind="ppo",
    reduction="token_mean",
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    correction="none",
    correction_low=0.5,
    correction_high=2.0,
    entropy_coef=0.0,
    entropy_metric=True,
    kl_coef=0.0,
    kl_kind="k3",
    temperature=1.0,
    max_tokens=6,
    normalizer=1.0,
    sampler_bound=None,
)
NORMALIZERS = {"token_mean": sum(LENGTHS), "sequence_mean": len(LENGTHS), "constant": len(LENGTHS) * 6}


def make_rows(with_old=True, with_ref=True) -> list[PolicyRow]:
    generator = torch.Generator().manual_seed(3)

    def column(n):
        return torch.randn(n, generator=generator) * 0.4 - 1

    return [
        PolicyRow(
            row=Row(i // 2, [1, 2], list(range(n))),
            advantages=column(n),
            rollout_logprobs=column(n),
            old_logprobs=column(n) if with_old else None,
            ref_logprobs=column(n) if with_ref else None,
        )
        for i, n in enumerate(LENGTHS)
    ]


def run(rows, objective, pieces):
    """Loss, gradients of log-probs and entropies, and metrics, of `rows` cut into `pieces`."""
    generator = torch.Generator().manual_seed(4)
    leaves = [torch.randn(sum(LENGTHS), generator=generator) - 1, torch.rand(sum(LENGTHS), generator=generator)]
    logprobs, entropies = (leaf.requires_grad_() for leaf in leaves)
    objective = replace(objective, normalizer=float(NORMALIZERS[objective.reduction]))
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    totals, loss = Totals(), 0.0
    for a, b in pieces:
        batch, span = pack([row.row for row in rows[a:b]], False), slice(starts[a], starts[b])
        loss = loss + policy_objective(rows[a:b], batch, logprobs[span], entropies[span], objective, totals)
    loss.backward()
    gradients = [torch.zeros(1) if x.grad is None else x.grad for x in (logprobs, entropies)]
    return float(loss.detach()), gradients, step_metrics(totals)


@pytest.mark.parametrize("reduction", NORMALIZERS)
@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_one_two_or_four_micro_batches_are_the_same_step(kind, reduction, correction):
    terms = {"kl_coef": 0.1, "entropy_coef": 0.01}
    objective = replace(OBJECTIVE, kind=kind, reduction=reduction, correction=correction, **terms)
    loss, gradients, metrics = run(make_rows(), objective, [(0, 4)])
    assert metrics["loss/policy"] == pytest.approx(loss, rel=1e-5)
    for pieces in ([(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)]):
        other_loss, other_gradients, other_metrics = run(make_rows(), objective, pieces)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(other_gradients, gradients)
        assert other_metrics.keys() == metrics.keys()
        known = {name: value for name, value in metrics.items() if value is not None}
        assert {name: other_metrics[name] for name in known} == pytest.approx(known, rel=1e-4, abs=1e-7)


def test_the_entropy_bonus_pushes_entropy_up_and_is_reduced_like_the_loss():
    _, (_, gradient), metrics = run(make_rows(), replace(OBJECTIVE, entropy_coef=0.5), [(0, 4)])
    torch.testing.assert_close(gradient, torch.full_like(gradient, -0.5 / sum(LENGTHS)))
    assert 0 < metrics["policy/entropy"] < 1
    _, (_, gradient), _ = run(make_rows(), OBJECTIVE, [(0, 4)])
    assert (gradient == 0).all()


def test_the_kl_is_added_with_its_present_coefficient():
    without, *_ = run(make_rows(), OBJECTIVE, [(0, 4)])
    once, _, metrics = run(make_rows(), replace(OBJECTIVE, kl_coef=0.1), [(0, 4)])
    twice, *_ = run(make_rows(), replace(OBJECTIVE, kl_coef=0.2), [(0, 4)])
    assert once - without == pytest.approx(0.1 * metrics["kl/reference"], rel=1e-4)
    assert twice - without == pytest.approx(2 * (once - without), rel=1e-4)


def test_rows_that_waited_say_nothing_about_the_sampler():
    rows = make_rows(with_old=False)
    _, _, metrics = run(rows, OBJECTIVE, [(0, 4)])
    assert metrics["sampler/logprob_diff_mean"] > 0
    _, _, metrics = run([replace(row, is_fresh=False) for row in rows], OBJECTIVE, [(0, 4)])
    assert metrics["sampler/logprob_diff_mean"] is None
    assert metrics["policy/ratio_mean"] == 1


def test_padding_is_counted_and_so_is_what_the_busiest_rank_has_more_than_the_others():
    assert batch_metrics([Fed(30, 0), Fed(10, 2)]) == {"batch/padding_share": 0.05, "batch/rank_imbalance": 1.5}
    assert batch_metrics([Fed(30, 0)]) == {"batch/padding_share": 0.0, "batch/rank_imbalance": 1.0}


def options(path) -> ModelOptions:
    return ModelOptions(str(path), torch.float32, "sdpa")


def test_a_critic_from_a_reward_model_starts_with_its_head(models_folder):
    from transformers import AutoModelForSequenceClassification

    critic = load_critic(options(models_folder / "tiny-reward"))
    reward = AutoModelForSequenceClassification.from_pretrained(models_folder / "tiny-reward", dtype=torch.float32)
    rows = [Row(0, [1, 7, 9], [4, 8]), Row(1, [5], [6, 3, 2])]
    values = critic(pack(rows, True)).split([2, 3])
    for row, value in zip(rows, values):
        ids = torch.tensor([row.prompt + row.response[:-1]])
        torch.testing.assert_close(value[-1], reward(input_ids=ids).logits[0, 0])
    names = {name for name, _ in critic.named_parameters()}
    assert not [name for name in names if name.startswith("head.bias")]


def test_a_critic_from_a_language_model_has_a_small_new_head(models_folder):
    critic = load_critic(options(models_folder / "tiny-llama"))
    assert critic(pack([Row(0, [1, 2], [3])], True)).abs() < 1
    again = load_critic(options(models_folder / "tiny-llama"))
    assert torch.equal(critic.head.weight, again.head.weight)
