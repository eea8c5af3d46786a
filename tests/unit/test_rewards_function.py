"""Scoring: how functions are called, and that whatever they do wrong is an error that shows it."""

from __future__ import annotations

import threading
import time

import pytest

from hybrid.errors import RewardError
from hybrid.rewards import RewardFunction, accuracy, score
from tests.unit.data_files import sample


def reward(function, timeout_s: float = 10.0) -> RewardFunction:
    return RewardFunction(function, "mine.py:fn", timeout_s)


def failure(function, samples=None, timeout_s: float = 10.0) -> str:
    with pytest.raises(RewardError) as error:
        score(reward(function, timeout_s), samples or [sample("first"), sample("second", label="L2", prompt="P2")])
    return str(error.value)


def test_a_function_is_called_once_with_the_whole_batch_by_name():
    calls = []

    def fn(prompts, responses, labels, **columns):
        calls.append((prompts, responses, labels, columns))
        return [0, 1.5]

    scores = score(reward(fn), [sample("a", 1, "p", level=3, only="x"), sample("b", None, "q", level=4)])
    assert scores == [0.0, 1.5] and all(type(s) is float for s in scores)
    assert calls == [
        (["p", "q"], ["a", "b"], [1, None], {"token_ids": [[2], [2]], "level": [3, 4], "only": ["x", None]})
    ]


def test_a_function_gets_only_what_it_has_parameters_for():
    def fn(responses, *, level, other=7):
        return [len(r) + n + other for r, n in zip(responses, level)]

    assert score(reward(fn), [sample("ab", level=1, noise=0)]) == [10.0]


def test_c31_token_ids_come_to_those_who_ask_and_no_column_replaces_them():
    seen = []

    def fn(responses, token_ids):
        seen.append(token_ids)
        return [0.0]

    score(reward(fn), [sample(token_ids="z")])
    assert seen == [[[2]]]


def test_a_column_called_like_an_argument_does_not_replace_it():
    def fn(responses, labels):
        return [float(r == "a" and x == "4") for r, x in zip(responses, labels)]

    assert score(reward(fn), [sample("a", responses="z", labels="y")]) == [1.0]


@pytest.mark.parametrize("value", [None, float("nan"), "1.0", [1.0], 10**400])
def test_a_score_that_is_no_finite_number_shows_the_sample(value):
    message = failure(lambda responses: [1.0, value])
    assert "mine.py:fn" in message and "finite number" in message and "as score 1" in message
    assert "'second'" in message and "'L2'" in message and "'P2'" in message and "'first'" not in message


def test_a_wrong_number_of_scores_is_refused():
    message = failure(lambda responses: [1.0])
    assert "1 scores for 2 responses" in message and "'second'" in message
    assert "3 scores for 2 responses" in failure(lambda responses: [1.0] * 3)


def test_no_score_is_not_taken_for_leaving_a_response_out():
    assert "return 0.0 for one that it says nothing about" in failure(lambda responses: [1.0, None])


@pytest.mark.parametrize("result", [None, 1.0, {0: 1.0, 1: 2.0}])
def test_what_is_no_list_is_refused(result):
    assert "Return a list of 2 numbers" in failure(lambda responses: result)


def test_an_exception_shows_line_and_the_sample_that_causes_it():
    def fn(responses, labels):
        return [1 / (r == "first") for r in responses]

    message = failure(fn)
    assert "ZeroDivisionError" in message and "test_rewards_function.py" in message and 'r == "first"' in message
    assert "'second'" in message and "number 1 of 2" in message


def test_an_exception_that_only_the_batch_causes_shows_the_first_sample():
    def fn(responses):
        if len(responses) > 1:
            raise KeyError("judge")
        return [0.0]

    message = failure(fn)
    assert "KeyError: 'judge'" in message and "no sample alone" in message and "'first'" in message


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), TimeoutError("judge timed out")])
def test_unusual_exceptions_are_failures_too(error):
    def fn(responses):
        raise error

    assert type(error).__name__ in failure(fn)


def test_a_parameter_that_the_data_lacks_is_named():
    message = failure(lambda responses, difficulty: [0.0], [sample(level=1)])
    assert "difficulty" in message and "level" in message


def test_a_hanging_function_is_an_error_that_says_where_it_hangs():
    release = threading.Event()
    message = failure(lambda responses: release.wait(30), timeout_s=0.2)
    assert "within 0.2 s" in message and "test_rewards_function.py" in message and "'first'" in message
    release.set()


def test_after_a_hang_the_function_can_be_asked_again():
    release = threading.Event()
    once = reward(lambda responses: [1.0] if responses == ["ok"] else release.wait(30), 0.2)
    with pytest.raises(RewardError):
        score(once, [sample("hang")])
    assert score(once, [sample("ok")]) == [1.0]
    release.set()


def test_long_prompts_are_shown_by_their_end():
    message = failure(lambda responses: [None], [sample(prompt="x" * 5000 + "the end?")])
    assert "the end?" in message and len(message) < 1500


def test_many_batches_leave_no_threads():
    before = threading.active_count()
    fns = [reward(lambda responses: [1.0] * len(responses)) for _ in range(5)]
    for fn in fns * 40:
        score(fn, [sample()])
    assert threading.active_count() <= before + 5
    del fns, fn
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_no_samples_no_call():
    assert score(reward(lambda responses: 1 / 0), []) == []


def test_accuracy_is_the_share_of_full_scores():
    assert accuracy([1.0, 0.99, 1.2, 0.0]) == 0.5
