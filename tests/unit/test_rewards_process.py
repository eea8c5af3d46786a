"""A user's function in a process of its own: what it may do, what its mistakes look like, and that nothing of it stays (C09)."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hybrid.errors import RewardError
from hybrid.rewards import load_reward, score
from hybrid.rewards.score import spread
from tests.unit.data_files import sample

FILE = Path(__file__).with_name("user_rewards.py")
TWO = [sample("a", prompt="P"), sample("b", label="L2", prompt="Q")]


@contextmanager
def reward(name: str, timeout_s: float = 30.0, processes: int = 1):
    made = load_reward(f"{FILE}:{name}", timeout_s, processes=processes)
    try:
        yield made
    finally:
        made.close()


def scores(name: str, samples=None) -> list[float]:
    with reward(name) as made:
        return score(made, samples or TWO)


def failure(name: str, samples=None, timeout_s: float = 30.0) -> str:
    with reward(name, timeout_s) as made, pytest.raises(RewardError) as error:
        score(made, samples or TWO)
    assert f"user_rewards.py:{name} " in str(error.value)
    return str(error.value)


def gone(*pids: int) -> bool:
    """Whether none of them runs any more, after a while."""
    end = time.monotonic() + 20
    while (there := [p for p in pids if psutil.pid_exists(p)]) and time.monotonic() < end:
        time.sleep(0.02)
    return not there


def test_c09_a_function_that_calls_math_verify_itself_scores():
    samples = [sample("so \\boxed{4}", "4"), sample("\\boxed{5}", "4"), sample("\\boxed{\\frac{1}{2}}", "0.5")]
    assert scores("acc", samples) == [1.0, 0.0, 1.0]


def test_c09_alarms_work_and_end_with_the_call():
    assert scores("own_alarm") == [1.0, 1.0]
    with reward("alarm_left_behind") as made:
        assert score(made, TWO) == [0.0, 0.0]
        time.sleep(1.2)  # the alarm would have ended the process by now
        assert score(made, TWO) == [0.0, 0.0], "nothing is left of the timer of the first call"


def test_pools_work_also_such_that_import_the_file_again():
    assert scores("pool") == [1.0, 1.0]
    assert scores("spawned", [sample("abc")]) == [3.0]


def test_state_lasts_from_call_to_call_and_is_not_shared_between_functions(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_TEST_IMPORTS", str(tmp_path / "imports"))
    with reward("state") as made, reward("of_process") as other:
        assert [score(made, TWO)[0] for _ in range(3)] == [2.0, 4.0, 6.0]
        assert len(set(score(other, TWO) + score(other, TWO))) == 1
    assert (tmp_path / "imports").read_text() == "imported\n" * 2, "once in each process"


def test_what_a_function_does_to_its_surroundings_stays_with_it():
    random.seed(1)
    before = os.getcwd(), random.getstate(), dict(os.environ)
    assert scores("surroundings") == [1.0, 1.0], "called on a main thread"
    assert (os.getcwd(), random.getstate(), dict(os.environ)) == before
    assert scores("mutates") == [1.0, 0.5]
    assert (TWO[1].text, TWO[1].prompt.text, TWO[1].prompt.label) == ("b", "Q", "L2")


def test_async_functions_run_on_one_loop_and_lists_of_awaitables_are_awaited():
    with reward("awaited") as made:
        assert [score(made, TWO) for _ in range(3)] == [[1.0, 1.0]] * 3
    assert scores("awaitables", [sample("ab"), sample("c")]) == [2.0, 1.0]
    assert scores("sync_awaitables") == [2.0, 2.0]
    assert scores("yields") == [1.0, 1.0]


def test_arguments_go_by_name_and_by_place_and_token_ids_to_those_who_ask():
    assert scores("ids", [replace(sample(), token_ids=[3, 4]), sample()]) == [7.0, 2.0]
    assert scores("positional", [sample(), sample(prompt="?")]) == [1.0, 0.0]
    assert scores("needs_level", [sample(level=2.5), sample(level=True)]) == [2.5, 1.0]


@pytest.mark.parametrize(
    ("name", "said", "number"),
    [
        ("leaves", r"raised SystemExit: 3 at .*user_rewards.py:\d+ \(raise SystemExit\(3\)\)", 0),
        ("exits", "crashed: its process ended with status 7", 1),
        ("exits_with_nothing", "ended with status 0", 0),
        ("segfaults", r"signal 11 \(SIGSEGV\) in .*ctypes.*string_at", 0),
        ("killed", r"signal 9 \(SIGKILL\).*memory runs out", 0),
        ("reads", "raised EOFError", 0),
        ("in_a_library", r"JSONDecodeError: .*decoder.py.*called at .*user_rewards.py:\d+ \(return \[json", 0),
    ],
)
def test_what_ends_a_call_is_an_error_with_its_place_and_the_sample(name, said, number):
    message = failure(name)
    first, *rest = message.splitlines()
    assert re.search(said, first), first
    assert rest[0] == f"  sample: number {number} of 2 in the batch"
    assert repr(TWO[number].text) in rest[2] and repr(TWO[number].prompt.label) in rest[3]


def test_a_call_that_hangs_says_where_and_the_next_one_gets_a_new_process():
    with reward("spins", 0.3) as made:
        with pytest.raises(RewardError, match=r"did not return within 0.3 s: it is in .*user_rewards.py:\d+ \(spins\)"):
            score(made, TWO)
        made.timeout_s = 30
        assert score(made, TWO[:1]) == [1.0]


def test_a_coroutine_that_hangs_is_cancelled_and_its_process_goes_on():
    with reward("waits", 0.3) as made:
        with pytest.raises(RewardError, match=r"it waits at .*user_rewards.py:\d+ \(waits\)"):
            score(made, TWO)
        made.timeout_s = 30
        assert score(made, TWO[:1]) == [1.0], "it heard the cancellation"


def test_prints_and_warnings_are_shown_here(capfd):
    assert scores("prints") == [0.0, 0.0]
    out, err = capfd.readouterr()
    assert out == "½ printed\nat exit\n"
    assert "UserWarning: careful" in err and "to stderr" in err


def test_a_function_that_forks_and_returns_twice_answers_once():
    with reward("forks_and_returns") as made:
        assert [score(made, TWO) for _ in range(2)] == [[1.0, 1.0]] * 2


def test_nothing_that_a_function_started_outlives_it():
    with reward("leaves_processes") as made:
        pids = [int(pid) for pid in score(made, TWO)]
        assert all(map(psutil.pid_exists, pids))
    assert gone(*pids)


def test_nothing_stays_when_the_run_is_killed_while_a_function_holds_the_interpreter(tmp_path):
    said = tmp_path / "pid"
    code = (
        "from hybrid.rewards import load_reward\n"
        f"load_reward({f'{FILE}:holds_the_interpreter'!r}, 60).ask([{{'responses': [{str(said)!r}]}}])"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=FILE.parents[2])
    end = time.monotonic() + 60
    while not (said.is_file() and said.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    child = psutil.Process(int(said.read_text()))
    keeper = child.parent()
    assert keeper.ppid() == run.pid
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert gone(child.pid, keeper.pid)


def test_several_processes_share_the_prompts_of_a_call_and_scores_stay_in_order():
    samples = [
        replace(sample(str(10 * group + i), prompt=f"p{group}"), group=group)
        for i in range(3)
        for group in (2, 0, 1, 5)
    ]
    with reward("below_the_best", processes=2) as two, reward("below_the_best") as one:
        assert score(two, samples) == score(one, samples) == [-2.0] * 4 + [-1.0] * 4 + [0.0] * 4
    with reward("of_process", processes=2) as made:
        pids = score(made, samples)
    assert len(set(pids)) == 2 and pids.count(pids[0]) == 6
    assert len({pid for pid, one in zip(pids, samples) if one.group == 5}) == 1
    with reward("exits", processes=2) as made, pytest.raises(RewardError, match="number 1 of 3 in the batch"):
        score(made, [replace(sample(text), group=i) for i, text in enumerate("abc")])


def test_groups_are_spread_whole_and_evenly():
    assert spread([0, 0, 1, 1, 2], 2) == [[0, 1, 4], [2, 3]]
    assert spread([3, 1, 3], 5) == [[0, 2], [1]]
