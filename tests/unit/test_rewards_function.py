"""Reward functions: how they are called, and that whatever they do wrong is an error that shows it."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from hybrid.errors import RewardError
from hybrid.rewards import RewardFunction, accuracy, load_reward, load_rewards, score
from tests.unit.data_files import config, sample


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
    assert calls == [(["p", "q"], ["a", "b"], [1, None], {"level": [3, 4], "only": ["x", None]})]


def test_a_function_gets_only_what_it_has_parameters_for():
    def fn(responses, *, level, other=7):
        return [len(r) + n + other for r, n in zip(responses, level)]

    assert score(reward(fn), [sample("ab", level=1, noise=0)]) == [10.0]


def test_a_column_called_like_an_argument_does_not_replace_it():
    def fn(responses, labels):
        return [float(r == "a" and x == "4") for r, x in zip(responses, labels)]

    assert score(reward(fn), [sample("a", responses="z", labels="y")]) == [1.0]


def test_async_functions_are_awaited_on_one_loop_for_the_whole_run():
    loops = set()

    async def fn(responses):
        loops.add(asyncio.get_running_loop())
        return list(await asyncio.gather(*(asyncio.sleep(0.01, float(r)) for r in responses)))

    fn_reward = reward(fn)
    assert [score(fn_reward, [sample("1"), sample("2")]) for _ in range(3)] == [[1.0, 2.0]] * 3
    assert len(loops) == 1


def test_a_sync_function_may_run_a_loop_of_its_own():
    async def one():
        return 2.0

    assert score(reward(lambda responses: [asyncio.run(one()) for _ in responses]), [sample()]) == [2.0]


@pytest.mark.parametrize("make", [tuple, np.array, torch.tensor, lambda x: np.array(x, dtype=np.float32)])
def test_tuples_arrays_and_tensors_are_lists_too(make):
    assert score(reward(lambda responses: make([1.0, 0.5])), [sample(), sample()]) == [1.0, 0.5]


def test_booleans_and_numbers_of_arrays_are_numbers():
    values = [True, np.bool_(False), np.float32(0.5), torch.tensor(2)]
    assert score(reward(lambda responses: values), [sample()] * 4) == [1.0, 0.0, 0.5, 2.0]


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("inf"), -float("inf"), "1.0", [1.0], 10**400, 1j, np.float64("nan")]
)
def test_a_score_that_is_no_finite_number_shows_the_sample(value):
    message = failure(lambda responses: [1.0, value])
    assert "mine.py:fn" in message and "finite number" in message and "as score 1" in message
    assert "'second'" in message and "'L2'" in message and "'P2'" in message and "'first'" not in message


def test_a_wrong_number_of_scores_is_refused():
    message = failure(lambda responses: [1.0])
    assert "1 scores for 2 responses" in message and "'second'" in message
    assert "3 scores for 2 responses" in failure(lambda responses: [1.0] * 3)


@pytest.mark.parametrize("result", [None, 1.0, "ab", {0: 1.0, 1: 2.0}, np.array(1.0)])
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


@pytest.mark.parametrize("error", [SystemExit(3), TimeoutError("judge timed out"), asyncio.CancelledError()])
def test_unusual_exceptions_are_failures_too(error):
    async def fn(responses):
        raise error

    assert type(error).__name__ in failure(fn)


def test_a_parameter_that_the_data_lacks_is_named():
    message = failure(lambda responses, difficulty: [0.0], [sample(level=1)])
    assert "difficulty" in message and "level" in message


def test_a_hanging_function_is_an_error_that_says_where_it_hangs():
    release = threading.Event()
    started = time.monotonic()
    message = failure(lambda responses: release.wait(30), timeout_s=0.2)
    assert time.monotonic() - started < 5
    assert "within 0.2 s" in message and "test_rewards_function.py" in message and "'first'" in message
    release.set()


def test_a_hanging_coroutine_is_cancelled_and_the_next_batch_is_scored():
    cancelled = []

    async def fn(responses):
        try:
            await asyncio.sleep(30 if responses == ["slow"] else 0)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise
        return [1.0]

    slow = reward(fn, 0.2)
    with pytest.raises(RewardError, match=r"test_rewards_function.py:\d+ \(fn\)"):
        score(slow, [sample("slow")])
    assert score(slow, [sample("fast")]) == [1.0]
    assert cancelled == [True]


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


SOURCE = """
from dataclasses import dataclass
from beside import POINTS

@dataclass
class Judge:
    points: float
    def __call__(self, responses, **columns):
        return [self.points for _ in responses]

def score_answers(prompts, responses, labels, **columns):
    return [POINTS for _ in responses]

judge = Judge(0.25)

def blind(prompts):
    return [0.0 for _ in prompts]
"""


@pytest.fixture
def rewards_file(tmp_path):
    (tmp_path / "beside.py").write_text("POINTS = 0.5\n")
    (tmp_path / "rewards.py").write_text(SOURCE)
    return tmp_path / "rewards.py"


def test_a_function_of_a_file_is_loaded_with_what_lies_beside_it(rewards_file):
    assert score(load_reward(f"{rewards_file}:score_answers", 10), [sample()]) == [0.5]
    assert score(load_reward(f"{rewards_file}:judge", 10), [sample()]) == [0.25]


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("{}:score_answer", "did you mean score_answers"),
        ("{}:blind", "does not take responses"),
        ("{}.py:x", "does not exist"),
        ("reasoning_gim", "neither reasoning_gym"),
        ("reasoning_gym", "the data is none"),
    ],
)
def test_a_function_that_is_not_there_is_explained(rewards_file, spec, hint):
    with pytest.raises(RewardError, match=hint):
        load_reward(spec.format(rewards_file), 10)


def test_a_file_that_does_not_run_is_explained(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_like_this\n")
    with pytest.raises(RewardError, match=r"broken.py does not run: ModuleNotFoundError.*nothing_like_this"):
        load_reward(f"{tmp_path / 'broken.py'}:fn", 10)


def test_training_and_evaluation_each_get_their_function(rewards_file):
    sums, mine = "reasoning_gym:chain_sum", f"{rewards_file}:score_answers"
    train, held_out = load_rewards(config(sums, reward={"function": mine}, eval_function="reasoning_gym"))
    assert (train.name, held_out.name) == (mine, "reasoning_gym")
    train, held_out = load_rewards(config(sums, reward={"function": "reasoning_gym"}))
    assert train is held_out
    train, held_out = load_rewards(config(sums, reward={"model": "m"}))
    assert train is None and held_out.name == "reasoning_gym"
    train, held_out = load_rewards(config("a.jsonl", reward={"function": mine}))
    assert train.name == mine and held_out is None


def test_an_evaluation_that_nothing_can_score_is_refused():
    with pytest.raises(RewardError, match=r"Set data.eval_function"):
        load_rewards(config("a.jsonl", eval="b.jsonl", reward={"model": "m"}))
    with pytest.raises(RewardError, match="the data is none"):
        load_rewards(config("reasoning_gym:chain_sum", eval="b.jsonl", reward={"function": "reasoning_gym"}))
