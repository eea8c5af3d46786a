"""Collecting a step's prompts: once, or until enough of them teach something."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from hybrid.algorithms.rewards import Moments
from hybrid.collect import collect
from hybrid.config import RunConfig, resolve
from hybrid.data.groups import by_prompt, number, prompts_to_draw, teaches
from hybrid.data.prompts import PromptSource
from hybrid.data.samples import Prompt, Sample
from hybrid.rewards import RewardFunction
from hybrid.telemetry.spans import Spans


def sample(group: int, score: float, greedy: bool = False) -> Sample:
    return Sample(Prompt(group, "p", [1]), group, [5, 6], [-1.0] * 2, "", False, 0, score, score, greedy)


def test_a_group_teaches_when_its_draws_differ():
    assert teaches([sample(0, 1.0), sample(0, 0.0)])
    assert not teaches([sample(0, 0.1)] * 7)
    assert not teaches([sample(0, 1.0), sample(0, 1.0), sample(0, 0.0, greedy=True)]), "the greedy answer is no draw"


def test_groups_are_numbered_anew_in_their_order():
    groups = by_prompt([sample(7, 1.0), sample(2, 0.0), sample(7, 3.0)])
    assert [[s.score for s in g] for g in groups] == [[0.0], [1.0, 3.0]]
    assert [(s.group, s.score) for s in number(groups)] == [(0, 0.0), (1, 1.0), (1, 3.0)]


@pytest.mark.parametrize(
    ("missing", "accepted", "seen", "expected"),
    [(8, 0, 0, 8), (3, 0, 0, 3), (4, 4, 8, 8), (2, 6, 8, 3), (1, 0, 64, 8), (8, 7, 8, 8)],
)
def test_later_rounds_draw_by_what_was_accepted_so_far(missing, accepted, seen, expected):
    assert prompts_to_draw(missing, accepted, seen, most=8) == expected


@dataclass
class Progress:
    step: int = 1
    weight_version: int = 0
    reward_moments: Moments = field(default_factory=Moments)
    leftovers: list = field(default_factory=list)


class Engines:
    """Answers prompt i with two draws, which score differently where `teaching(i)`."""

    def __init__(self, teaching):
        self.teaching, self.rounds = teaching, []

    def generate(self, prompts, sampling, *, step, version, round_, with_greedy, arrived, check):
        self.rounds.append((step, round_, len(prompts)))
        samples = [
            Sample(p, i, [5], [-1.0], "1" if j and self.teaching(p.index) else "0", False, version)
            for i, p in enumerate(prompts)
            for j in range(sampling.n)
        ]
        for group in reversed(by_prompt(samples)) if arrived else []:
            check()
            arrived(group)
        return samples


def session(teaching, prompts=4, rounds=5, **algorithm):
    cfg = resolve(
        RunConfig.model_validate(
            {
                "cluster": {"device": "cpu", "gpus_per_node": 2},
                "model": {"path": "org/model", "dtype": "float32"},
                "reward": {"function": "math_verify"},
                "rollout": {"samples_per_prompt": 2, "kv_cache": "1MiB"},
                "algorithm": {"sampling_rounds": rounds, **algorithm},
                "train": {"steps": 9, "prompts_per_step": prompts},
                "data": {"train": "org/data"},
            }
        )
    )
    warnings = []
    return SimpleNamespace(
        cfg=cfg,
        engines=Engines(teaching),
        prompts=PromptSource(lambda place: Prompt(0, f"p{place}", [1, 2]), {}),
        reward_model=None,
        reward=reads(),
        extra_rewards=[],
        recorder=None,
        phase=lambda name: nullcontext(),
        engine_version=0,
        actor=None,
        report=SimpleNamespace(warn=warnings.append, spans=Spans()),
        ledger=SimpleNamespace(overlapped=lambda seconds: None),
        warnings=warnings,
    )


def reads(by_group: bool = True) -> RewardFunction:
    """The score is the response, read as a number."""
    return RewardFunction(lambda responses: [float(text) for text in responses], "reads", 60.0, by_group)


def places(samples) -> list[int]:
    return [s.prompt.index for s in samples[::2]]


def test_without_dynamic_sampling_a_step_is_one_round_whatever_it_scores():
    s = session(lambda i: i % 2 == 0)
    rollout = collect(s, Progress())
    assert s.engines.rounds == [(1, 0, 4)]
    assert places(rollout.samples) == [0, 1, 2, 3]
    assert rollout.metrics["rollout/equal_share"] == 0.5
    assert rollout.metrics["tokens/generated"] == 8


@pytest.mark.parametrize("dynamic", [False, True])
def test_scores_made_during_generation_change_nothing(dynamic):
    def scored(by_group: bool):
        s, progress = session(lambda i: i % 2 == 0, dynamic_sampling=dynamic), Progress()
        s.reward, s.extra_rewards = reads(by_group), [(0.5, reads(not by_group))]
        return collect(s, progress)

    early, late = scored(True), scored(False)
    assert early.samples == late.samples and early.metrics == late.metrics
    assert {sample.score for sample in early.samples} == {0.0, 1.5}


def test_equal_prompts_are_replaced_and_what_is_over_serves_the_next_step():
    s, progress = session(lambda i: i % 2 == 0, dynamic_sampling=True), Progress()
    first = collect(s, progress)
    assert places(first.samples) == [0, 2, 4, 6]
    assert [x.group for x in first.samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert s.engines.rounds == [(1, 0, 4), (1, 1, 4)]
    assert first.metrics["rollout/rounds"] == 2
    assert progress.leftovers == []

    progress.step = 2
    s.engines.teaching = lambda i: True
    collect(s, progress)
    assert s.engines.rounds[-1] == (2, 0, 4)


def test_no_accepted_prompt_is_ever_lost():
    s, progress, used = session(lambda i: i % 5 < 3, dynamic_sampling=True), Progress(), []
    for step in range(1, 8):
        progress.step = step
        used += places(collect(s, progress).samples)
    waiting = [group[0].prompt.index for group in progress.leftovers]
    accepted = [i for i in range(s.prompts.state_dict()["used"]) if i % 5 < 3]
    assert sorted(used + waiting) == accepted, "each accepted prompt is trained on once, or still waits"
    assert used == sorted(used), "the oldest first"
    assert len(used) == 7 * 4 and not s.warnings


def test_enough_leftovers_are_a_step_without_generating():
    s, progress = session(lambda i: True, dynamic_sampling=True), Progress()
    progress.leftovers = by_prompt([sample(g, float(j)) for g in range(5) for j in range(2)])
    rollout = collect(s, progress)
    assert s.engines.rounds == []
    assert len(rollout.samples) == 8 and len(progress.leftovers) == 1
    assert rollout.metrics["rollout/waited_prompts"] == 5
    assert rollout.metrics["tokens/generated"] == 0


def test_the_rounds_are_bounded_and_the_step_is_filled():
    s, progress = session(lambda i: i == 1, dynamic_sampling=True, rounds=3), Progress()
    rollout = collect(s, progress)
    assert len(s.engines.rounds) == 3
    assert places(rollout.samples) == [1, 0, 2, 3]
    assert rollout.metrics["rollout/filling_prompts"] == 3
    assert "1 of 4 prompts" in s.warnings[0]
