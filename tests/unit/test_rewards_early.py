"""Scoring beside generation gives what scoring after it gives, and its errors are not lost."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybrid.data.samples import Sample
from hybrid.errors import RewardError
from hybrid.rewards import EarlyScores, RewardFunction, load_reward, load_rewards, score
from hybrid.rewards import early as early_module
from hybrid.telemetry.spans import Spans
from tests.unit.data_files import config, sample


def reward(function, timeout_s: float = 10.0) -> RewardFunction:
    return RewardFunction(function, "mine.py:fn", timeout_s, by_group=True)


def groups(count: int, size: int = 3) -> list[list[Sample]]:
    return [[replace(sample(f"{g}.{i}", prompt=f"p{g}"), group=g) for i in range(size)] for g in range(count)]


def above_the_groups_mean(prompts, responses):
    """How far a response lies above the mean of its prompt's: wrong as soon as a group is cut."""
    values = [float(text) for text in responses]
    of = {p: [v for v, q in zip(values, prompts) if q == p] for p in prompts}
    return [v - sum(of[p]) / len(of[p]) for v, p in zip(values, prompts)]


def test_groups_in_any_order_score_as_all_at_once():
    made = groups(12)
    samples = [s for group in made for s in group]
    both = [reward(above_the_groups_mean), reward(lambda responses: [len(r) for r in responses])]
    early = EarlyScores(both)
    for group in random.Random(0).sample(made, len(made)):
        early.add(group)
        time.sleep(0.001)
    early.close()
    for function in both:
        assert early.of(function, samples) == score(function, samples)


def test_scoring_begins_before_the_last_group_is_done_and_calls_take_what_waits(monkeypatch):
    calls, first, go_on, clock = [], threading.Event(), threading.Event(), [0.0]
    monkeypatch.setattr(early_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def slow(responses):
        calls.append(responses)
        first.set()
        assert go_on.wait(30)
        clock[0] += 3.0
        return [1.0] * len(responses)

    made, function = groups(4, size=2), reward(slow, 60)
    early = EarlyScores([function])
    early.add(made[2])
    assert first.wait(30)
    clock[0] += 1.0
    assert early.seconds() == 1.0, "the call under way counts, as far as it has come"
    for i in (3, 0, 1):
        early.add(made[i])
    early.close()
    go_on.set()
    assert early.of(function, [s for group in made for s in group]) == [1.0] * 8
    assert calls == [["2.0", "2.1"], ["3.0", "3.1", "0.0", "0.1", "1.0", "1.1"]]
    assert early.seconds() == 4.0 + 3.0


def test_functions_of_a_file_score_early_as_they_do_late():
    file = Path(__file__).with_name("user_rewards.py")
    made = groups(6)
    samples = [s for group in made for s in group]
    function = load_reward(f"{file}:below_the_best", 30, by_group=True, processes=2)
    early = EarlyScores([function])
    for group in random.Random(0).sample(made, len(made)):
        early.add(group)
    early.close()
    assert early.of(function, samples) == score(function, samples)
    function.close()


def test_calls_are_spans_of_a_thread_of_their_own():
    spans = Spans()
    spans.start()
    early = EarlyScores([reward(lambda responses: [0.0] * len(responses))], spans.span)
    (group,) = groups(1)
    early.add(group)
    early.close()
    early.of(early.functions[0], group)
    (span,) = spans.take()
    assert span.thread != threading.current_thread().name and span.name == "score 1 groups"


def fails_on_second(responses):
    if "1.0" in responses:
        raise ValueError("no judge")
    return [0.0] * len(responses)


def hangs_on_second(responses):
    if "1.0" in responses:
        time.sleep(30)
    return [0.0] * len(responses)


@pytest.mark.parametrize(
    ("function", "said"), [(fails_on_second, "ValueError: no judge"), (hangs_on_second, "did not return within 0.2 s")]
)
def test_an_error_shows_while_groups_are_still_to_come_and_again_at_the_end(function, said):
    made, failing = groups(3), reward(function, 0.2)
    early = EarlyScores([failing])
    early.check()
    early.add(made[0])
    early.add(made[1])
    with pytest.raises(RewardError, match=said) as error:
        early._thread.join(60)  # an error ends it
        early.check()
    assert "'1.0'" in str(error.value) or "first sample" in str(error.value)
    early.add(made[2])
    early.close()
    with pytest.raises(RewardError, match=said):
        early.of(failing, made[0])


def test_functions_of_a_file_wait_for_the_whole_step_unless_the_profile_says_otherwise(tmp_path):
    (tmp_path / "mine.py").write_text("def fn(responses):\n    return [0.0] * len(responses)\n")
    mine = f"{tmp_path / 'mine.py'}:fn"
    sums = "reasoning_gym:chain_sum"
    by_default, _ = load_rewards(config(sums, reward={"function": mine}))
    by_group, _ = load_rewards(config(sums, reward={"function": mine, "batch": "group"}))
    own, _ = load_rewards(config(sums, reward={"function": "reasoning_gym"}))
    assert (by_default.by_group, by_group.by_group, own.by_group) == (False, True, True)
