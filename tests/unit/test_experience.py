"""From samples to what is trained on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybrid.config import RunConfig, resolve
from hybrid.data.rollouts import check_recorded
from hybrid.data.samples import Prompt, Sample
from hybrid.errors import DataError
from hybrid.experience import (
    Forward,
    explained_variance,
    kl_beyond_bound,
    make_experience,
    sampler_bound,
    update_batches,
)


def config(**sections) -> RunConfig:
    base = {
        "cluster": {"device": "cpu", "gpus_per_node": 2},
        "model": {"path": "org/model", "dtype": "float32"},
        "reward": {"function": "math_verify"},
        "rollout": {"samples_per_prompt": 2, "kv_cache": "1MiB"},
        "train": {"steps": 1, "prompts_per_step": 4},
        "data": {"train": "org/data"},
    }
    return resolve(
        RunConfig.model_validate({k: {**base.get(k, {}), **sections.get(k, {})} for k in {**base, **sections}})
    )


def sample(group: int, tokens: int, logprob: float = -1.0) -> Sample:
    return Sample(Prompt(group, "p", [1, 2]), group, [3] * tokens, [logprob] * tokens, "text", False, 0)


def scored(scores: list[float], versions: list[int] | None = None) -> list[Sample]:
    """`SAMPLES` with rewards that shaping leaves alone, made by weights of `versions`."""
    versions = versions or [0] * len(SAMPLES)
    return [
        replace(s, reward=score, score=score, weight_version=version)
        for s, score, version in zip(SAMPLES, scores, versions, strict=True)
    ]


SAMPLES = [sample(0, 2), sample(0, 3), sample(1, 1), sample(1, 4)]


def test_advantages_have_the_length_of_their_responses():
    experience = make_experience(config(), scored([1.0, 0.0, 0.5, 0.5]), Forward(), kl_coef=0.0)
    assert [len(a) for a in experience.advantages] == [2, 3, 1, 4]
    assert experience.advantages[0].tolist() == pytest.approx([0.7071, 0.7071], abs=1e-3)
    assert torch.cat(experience.advantages[2:]).abs().sum() == 0, "equal scores carry no signal"
    assert experience.metrics["reward/mean"] == 0.5


def test_kl_in_the_reward_lowers_returns_and_is_measured():
    cfg = config(algorithm={"kl_coef": 0.5, "kl_kind": "k1", "kl_in": "reward", "advantage": "reinforce_baseline"})
    old = [torch.zeros(len(s.token_ids)) for s in SAMPLES]
    ref = [torch.full((len(s.token_ids),), -0.2) for s in SAMPLES]
    experience = make_experience(cfg, scored([0.0] * 4), Forward(old_logprobs=old, ref_logprobs=ref), kl_coef=0.5)
    assert experience.metrics["kl/reference"] == pytest.approx(0.2)
    assert experience.metrics["kl/response"] == pytest.approx(0.2 * 10 / 4)
    assert experience.returns[0].tolist() == pytest.approx([-0.2, -0.1])
    adapted = make_experience(cfg, scored([0.0] * 4), Forward(old_logprobs=old, ref_logprobs=ref), kl_coef=1.0)
    assert adapted.returns[0].tolist() == pytest.approx([-0.4, -0.2]), "the coefficient is the adapted one"


def test_the_old_policy_is_computed_only_where_it_is_used():
    assert not config().needs_old_logprobs
    assert not config(algorithm={"kl_coef": 0.1, "kl_in": "loss"}).needs_old_logprobs
    assert config(algorithm={"kl_coef": 0.1, "kl_in": "reward"}).needs_old_logprobs
    assert config(train={"steps": 1, "prompts_per_step": 4, "prompts_per_update": 2}).needs_old_logprobs
    assert config(train={"steps": 1, "prompts_per_step": 4, "epochs": 2}).needs_old_logprobs


def test_agreement_with_the_sampler_is_reported():
    old = [torch.full((len(s.token_ids),), -1.25) for s in SAMPLES]
    metrics = make_experience(config(), scored([0.0] * 4), Forward(old_logprobs=old), kl_coef=0.0).metrics
    assert metrics["kl/sampler"] == pytest.approx(0.25)
    assert metrics["sampler/logprob_diff_max"] == pytest.approx(0.25)


def test_samples_that_waited_need_not_agree_with_the_sampler():
    old = [torch.full((len(s.token_ids),), -1.25 if i < 2 else -9.0) for i, s in enumerate(SAMPLES)]
    samples = scored([1.0, 0.0, 0.5, 0.5], versions=[3, 3, 2, 2])
    experience = make_experience(config(), samples, Forward(old_logprobs=old), kl_coef=0.0, version=3)
    assert experience.metrics["sampler/logprob_diff_max"] == pytest.approx(0.25)
    assert experience.is_fresh == [True, True, False, False]


def test_remax_compares_with_the_greedy_answer_to_each_prompt():
    cfg = config(algorithm={"advantage": "remax"})
    greedy = [replace(sample(g, 1), greedy=True, reward=v, score=v) for g, v in ((0, 0.25), (1, 1.0))]
    experience = make_experience(cfg, scored([1.0, 0.0, 0.5, 1.0]), Forward(), kl_coef=0.0, greedy=greedy)
    assert [float(a[0]) for a in experience.advantages] == pytest.approx([0.75, -0.25, -0.5, 0.0])


def test_large_scores_are_compared_before_they_are_rounded():
    experience = make_experience(
        config(algorithm={"advantage": "dr_grpo"}), scored([1e9, 1e9 + 1, 0.5, 0.5]), Forward(), kl_coef=0.0
    )
    assert [float(a[0]) for a in experience.advantages] == [-0.5, 0.5, 0.0, 0.0]


def test_the_critic_is_measured_by_the_variance_that_it_explains():
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(torch.full((3,), 2.0), returns) == pytest.approx(0)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(3)) is None


def test_a_policy_far_from_its_reference_is_told_with_the_bound():
    cfg = config(algorithm={"kl_coef": 0.1})
    assert kl_beyond_bound(cfg, 9.9) is None
    assert kl_beyond_bound(cfg, None) is None
    assert "12.0 nats" in kl_beyond_bound(cfg, 12.0) and "kl_bound=10" in kl_beyond_bound(cfg, 12.0)
    assert kl_beyond_bound(config(algorithm={"kl_coef": 0.1, "kl_bound": None}), 1e9) is None


def test_the_bound_on_the_sampler_is_off_where_it_must_differ():
    assert sampler_bound(config()) == 0.1
    assert sampler_bound(config(rollout={"top_p": 0.9})) is None
    assert sampler_bound(config(rollout={"top_k": 20})) is None


def test_every_epoch_uses_every_prompt_once_in_a_repeatable_order():
    cfg = config(train={"steps": 1, "prompts_per_step": 4, "prompts_per_update": 2, "epochs": 3})
    batches = update_batches(cfg, step=5)
    assert len(batches) == 6
    assert all(sorted(batches[i] + batches[i + 1]) == [0, 1, 2, 3] for i in (0, 2, 4))
    assert batches == update_batches(cfg, step=5)
    assert update_batches(config(), step=1) == [[0, 1, 2, 3]]


def test_a_recording_of_another_size_is_refused():
    cfg = config(rollout={"replay": None}, train={"steps": 1, "prompts_per_step": 2})
    check_recorded(cfg, {1: SAMPLES})
    with pytest.raises(DataError, match="prompts_per_step=4"):
        check_recorded(config(), {1: SAMPLES})
    with pytest.raises(DataError, match="2 prompts with 1 to 2 samples"):
        check_recorded(cfg, {1: SAMPLES[:3]})


def test_a_recording_with_shorter_responses_than_the_profile_allows_is_refused():
    """Its end tokens would be left out of the softmax that they were drawn from."""
    train = {"steps": 1, "prompts_per_step": 2}
    shortest = min(len(each.token_ids) for each in SAMPLES)
    check_recorded(config(train=train, rollout={"min_new_tokens": shortest, "max_new_tokens": 8}), {1: SAMPLES})
    with pytest.raises(DataError, match=f"rollout.min_new_tokens: {shortest + 1} is invalid"):
        check_recorded(config(train=train, rollout={"min_new_tokens": shortest + 1, "max_new_tokens": 8}), {1: SAMPLES})


def test_greedy_answers_are_recorded_for_remax_and_for_no_other():
    train = {"steps": 1, "prompts_per_step": 2}
    plain, remax = config(train=train), config(train=train, algorithm={"advantage": "remax"})
    with_greedy = [*SAMPLES, *(replace(sample(g, 1), greedy=True) for g in (0, 1))]
    check_recorded(remax, {1: with_greedy})
    with pytest.raises(DataError, match="0 greedy answers to 2 prompts"):
        check_recorded(remax, {1: SAMPLES})
    with pytest.raises(DataError, match="no use for them"):
        check_recorded(plain, {1: with_greedy})
