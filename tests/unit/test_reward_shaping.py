"""From raw scores to what advantages see: each step by hand, their order, and the running moments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.algorithms.rewards import Moments, add_moments, shape_scores
from hybrid.config import RunConfig
from hybrid.data.samples import Prompt, Sample
from hybrid.errors import RewardError
from hybrid.rewards.shaping import shape, weighted_sum


def shaped(scores, lengths=None, unfinished=None, weights=None, **options) -> list[float]:
    n = len(scores)
    return shape_scores(
        torch.tensor(scores),
        torch.tensor(lengths or [1] * n),
        torch.tensor(unfinished or [False] * n),
        torch.tensor(weights or [1.0] * n),
        max_new_tokens=100,
        **options,
    ).tolist()


def test_without_options_scores_are_what_they_were():
    assert shaped([3.0, -1e6], lengths=[100, 1], unfinished=[True, False]) == [3.0, -1e6]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"clip": (-1.0, 2.0)}, [2.0, -1.0, 0.5]),
        ({"moments": Moments(4, 1.0, 16.0)}, [1.0, -3.0, -0.25]),
        ({"weights": [2.0, 1.0, 0.0]}, [6.0, -5.0, 0.0]),
        ({"overlong_buffer": 20, "overlong_factor": 2.0}, [3.0, -6.0, -1.5]),
        ({"unfinished_penalty": 0.5}, [3.0, -5.0, 0.0]),
        ({"unfinished_score": -7.0}, [3.0, -5.0, -7.0]),
    ],
)
def test_each_step_alone(options, expected):
    result = shaped([3.0, -5.0, 0.5], lengths=[80, 90, 100], unfinished=[False, False, True], **options)
    assert result == pytest.approx(expected)


def test_the_order_is_the_documented_one():
    # clip 9 -> 5; (5 - 1) / 2 = 2; x 3 = 6; overlong at 95 of the last 10: -0.5; unfinished: -0.25
    steps = {"clip": (-5.0, 5.0), "moments": Moments(1, 1.0, 4.0), "overlong_buffer": 10, "unfinished_penalty": 0.25}
    assert shaped([9.0], lengths=[95], unfinished=[True], weights=[3.0], **steps) == pytest.approx([5.25])


def test_penalties_are_taken_in_float64_so_that_equal_scores_stay_equal():
    score, one = torch.tensor([0.7, 0.0], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    unfinished = torch.tensor([True, False])
    result = shape_scores(score, one, unfinished, one, max_new_tokens=100, unfinished_penalty=0.7)
    assert result.tolist() == [0.0, 0.0]


def test_an_override_has_the_last_word():
    options = {"overlong_buffer": 10, "unfinished_score": -1.0, "moments": Moments(2, 5.0, 9.0)}
    assert shaped([1.0], lengths=[100], unfinished=[True], weights=[4.0], **options) == [-1.0]


@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=5), max_size=5))
def test_moments_do_not_depend_on_how_scores_came(batches):
    moments = Moments()
    for batch in batches:
        moments = add_moments(moments, torch.tensor(batch, dtype=torch.float64))
    everything = torch.tensor([x for batch in batches for x in batch], dtype=torch.float64)
    assert moments.count == len(everything)
    if len(everything):
        assert moments.mean == pytest.approx(float(everything.mean()), abs=1e-6)
        assert moments.std == pytest.approx(float(everything.std(correction=0)), abs=1e-6)


def test_equal_scores_are_finite_when_normalised():
    moments = add_moments(Moments(), torch.full((7,), 0.1))
    assert shaped([0.1, 0.1], moments=moments) == pytest.approx([0.0, 0.0], abs=1e-6)


def test_several_rewards_are_summed_with_their_weights():
    assert weighted_sum([(1.0, [1.0, 0.0]), (0.5, [0.0, 4.0]), (-1.0, [0.25, 0.0])]) == [0.75, 2.0]
    assert weighted_sum([(2.0, [])]) == []


def config(**reward) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "train": {"steps": 1},
            "data": {"train": "d"},
            "rollout": {"max_new_tokens": 4},
            "reward": reward,
        }
    )


def sample(reward, source="a", tokens=1, truncated=False, greedy=False) -> Sample:
    prompt = Prompt(0, "p", [1], columns={"meta": {"source": source}})
    return Sample(prompt, 0, [5] * tokens, [-1.0] * tokens, "", truncated, 0, reward, greedy=greedy)


def test_the_profile_says_how_and_the_raw_reward_stays():
    cfg = config(
        clip=[-1, 1], source_field="meta.source", source_weights={"b": 0.5}, overlong_buffer=2, unfinished_penalty=1.0
    )
    samples = [sample(3.0), sample(3.0, "b"), sample(0.0, tokens=4, truncated=True)]
    assert shape(cfg, samples, Moments()) == Moments()
    assert [s.score for s in samples] == [1.0, 0.5, -2.0]
    assert [s.reward for s in samples] == [3.0, 3.0, 0.0]


def test_moments_go_on_over_steps_and_leave_greedy_answers_out():
    cfg = config(normalise=True, clip=[-2, 2])
    first, second = [sample(0.0), sample(9.0), sample(1e9, greedy=True)], [sample(4.0), sample(0.0)]
    moments = shape(cfg, first, Moments())
    assert (moments.count, moments.mean) == (2, 1.0)
    assert [s.score for s in first] == pytest.approx([-1.0, 1.0, 1.0])
    assert shape(cfg, second, moments).count == 4
    assert [s.score for s in second] == pytest.approx([1.0, -1.0])


def test_a_prompt_without_its_source_is_an_error():
    with pytest.raises(RewardError, match=r"has no field origin \(reward.source_field\): its fields are meta"):
        shape(config(source_field="origin", source_weights={"a": 2.0}), [sample(1.0)], Moments())
