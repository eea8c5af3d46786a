"""The verifiers that come with hybrid, on answers as models write them."""

from __future__ import annotations

import gc
import time

import psutil
import pytest

from hybrid.data.tasks import Task, entry
from hybrid.errors import RewardError
from hybrid.rewards import function as function_module
from hybrid.rewards import load_reward, score
from hybrid.rewards import verifiers as verifiers_module
from tests.unit.data_files import sample


def children() -> set[psutil.Process]:
    return {p for p in psutil.Process().children() if "answers/child.py" in " ".join(p.cmdline())}


def wait_until_gone(processes: set[psutil.Process]) -> None:
    deadline = time.monotonic() + 10
    while any(p.is_running() for p in processes):
        assert time.monotonic() < deadline, f"{processes} did not end"
        gc.collect()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def math_verify():
    return load_reward("math_verify", 60)


@pytest.mark.parametrize(
    ("label", "response", "expected"),
    [
        ("42", "The answer is 42.", 1.0),
        ("42", "First 41, so \\boxed{42}", 1.0),
        (42, "42", 1.0),
        ("1/2", "so it is 0.5", 1.0),
        ("\\frac{1}{2}", "$\\frac{2}{4}$", 1.0),
        ("2\\sqrt{3}", "\\boxed{\\sqrt{12}}", 1.0),
        ("$x^2+1$", "$1 + x^2$", 1.0),
        ("1,000", "1000", 1.0),
        ("She sells 16 - 3 - 4 = 9 eggs.\n#### 18", "18 dollars", 1.0),
        ("42", "43", 0.0),
        ("42", "no idea", 0.0),
        ("42", "", 0.0),
        ("-3", "3", 0.0),
    ],
)
def test_math_verify_compares_boxed_and_plain_answers(math_verify, label, response, expected):
    assert score(math_verify, [sample(response, label)]) == [expected]


@pytest.mark.parametrize(
    ("label", "hint"), [(None, "missing"), (" ", "empty"), ({"answer": 1}, "not a dict"), (float("nan"), "finite")]
)
def test_math_verify_refuses_a_label_that_is_not_one(math_verify, label, hint):
    with pytest.raises(RewardError, match=hint) as error:
        score(math_verify, [sample("1", "1"), sample("two", label)])
    assert "'two'" in str(error.value)


def test_an_endless_comparison_costs_one_response_not_the_run(monkeypatch):
    """A process that is stopped stands for one that computes for ever."""
    reward = load_reward("math_verify", 60)
    others = children()
    assert score(reward, [sample("1", "1")]) == [1.0]
    first = children() - others
    for process in first:
        process.suspend()
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match=r"gave up.*9\*\*9"):
        patch.setattr(verifiers_module, "COMPARISON_S", 0.05)
        assert score(reward, [sample("9**9**9**9", "10")]) == [0.0]
    assert score(reward, [sample("2", "2")]) == [1.0]
    wait_until_gone(first)


@pytest.mark.filterwarnings("ignore:math_verify gave up")
def test_a_batch_that_passed_its_deadline_does_not_mix_with_the_next(monkeypatch):
    monkeypatch.setattr(verifiers_module, "COMPARISON_S", 0.6)
    monkeypatch.setattr(function_module, "GRACE_S", 0.0)
    reward = load_reward("math_verify", 60)
    others = children()
    assert score(reward, [sample("1", "1")]) == [1.0]
    first = children() - others
    for process in first:
        process.suspend()
    reward.timeout_s = 0.1
    with pytest.raises(RewardError, match="did not return"):
        score(reward, [sample("late", "10")])
    reward.timeout_s = 60
    monkeypatch.setattr(verifiers_module, "COMPARISON_S", 60.0)
    assert score(reward, [sample("2", "2"), sample("3", "4"), sample("5", "5")]) == [1.0, 0.0, 1.0]
    wait_until_gone(first)


def test_a_process_that_was_killed_from_outside_is_replaced():
    reward = load_reward("math_verify", 60)
    others = children()
    assert score(reward, [sample("1", "1")]) == [1.0]
    for process in children() - others:
        process.kill()
        process.wait()
    assert score(reward, [sample("2", "2")]) == [1.0]


def test_math_verify_leaves_no_process():
    reward = load_reward("math_verify", 60)
    others = children()
    assert score(reward, [sample("1", "1")]) == [1.0]
    made = children() - others
    assert len(made) == 1
    del reward
    wait_until_gone(made)


def test_a_task_scores_with_its_own_scorer():
    task = Task("chain_sum")
    reward = load_reward("reasoning_gym", 10, task)
    problem = entry(task, "test", 0)
    answers = [f" {problem['answer']}\n", "", f"It is {problem['answer']}"]
    right, empty, wordy = score(reward, [sample(answer, entry=problem) for answer in answers])
    assert (right, empty) == (1.0, 0.0) and 0 < wordy < 1


def test_an_answer_that_a_scorer_cannot_read_is_wrong_and_said_so():
    task = Task("prime_factorization")
    reward = load_reward("reasoning_gym", 10, task)
    problem = entry(task, "test", 0)
    with pytest.warns(UserWarning, match="cannot read"):
        assert score(reward, [sample("no idea", entry=problem), sample(problem["answer"], entry=problem)]) == [0.0, 1.0]


def test_a_scorer_that_fails_on_the_right_answer_is_an_error():
    task = Task("prime_factorization")
    with pytest.raises(RewardError, match="on the task's own answer") as error:
        score(load_reward("reasoning_gym", 10, task), [sample("mine", entry={"answer": "junk"})])
    assert "'mine'" in str(error.value)


def test_data_without_entries_cannot_be_scored_by_a_task():
    with pytest.raises(RewardError, match="a parameter entry"):
        score(load_reward("reasoning_gym", 10, Task("chain_sum")), [sample()])
