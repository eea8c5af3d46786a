"""A person can follow a run on a terminal, in a log file, and through a pipe that closes."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.telemetry.console import Console
from hybrid.telemetry.summary import SummaryData, clock, first_and_last, human_bytes

ROOT = Path(__file__).parents[2]


def metrics(step, reward=0.25, **more):
    return {
        "step": step,
        "reward/mean": reward,
        "time/step": 16.0,
        "tokens/per_second": 1312.4,
        "response/length_mean": 11.25,
        **more,
    }


def lines_of(use, **kwargs):
    file = io.StringIO()
    with Console(file=file, **kwargs) as console:
        use(console)
    return file.getvalue().splitlines()


def test_plain_lines_where_there_is_no_terminal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def use(console):
        console.start("hybrid first", tmp_path / "runs" / "first", 12, "http://127.0.0.1:8265")
        console.stage("starting 2 engines")
        console.phase("generate")
        console.step(metrics(1, **{"eval/accuracy": 0.125, "eval/reward": 0.2}))
        console.warn("a gradient [of the actor] was not finite")
        console.step(metrics(12, 0.5, **{"eval/accuracy": 0.5}))

    assert lines_of(use) == [
        "hybrid first",
        "  run folder     runs/first",
        "  Ray dashboard  http://127.0.0.1:8265",
        "starting 2 engines ...",
        "held-out accuracy before training: 0.125, reward 0.200",
        "step  1/12  reward 0.250  length 11.2  1,312 tokens/s  16.0 s  left 2:56",
        "warning: a gradient [of the actor] was not finite",
        "step 12/12  reward 0.500  length 11.2  1,312 tokens/s  16.0 s  left 0 s",
        "held-out accuracy after step 12: 0.500",
    ]


def test_a_long_stage_says_that_it_lasts_and_how_long(monkeypatch):
    tickers = []

    class Ticker:
        def __init__(self, say):
            self.say, self.stopped = say, False
            tickers.append(self)

        def stop(self):
            self.stopped = True

    def use(console):
        console.stage("starting 2 engines")
        tickers[0].say(20.3)
        tickers[0].say(40.2)
        console.stage("loading the actor")
        assert tickers[0].stopped and not tickers[1].stopped
        console.phase("generate")
        assert tickers[1].stopped

    monkeypatch.setattr("hybrid.telemetry.console.Ticker", Ticker)
    assert lines_of(use) == [
        "starting 2 engines ...",
        "starting 2 engines ... 20 s",
        "starting 2 engines ... 40 s",
        "loading the actor ...",
    ]


def test_a_step_without_figures_is_still_a_line():
    (line,) = lines_of(lambda c: c.step({"step": 3, "reward/mean": None, "time/step": 2.0}), mode="lines")
    assert line.startswith("step 3/")


SUMMARY = SummaryData(
    title="hybrid first",
    seconds=600.0,
    rewards=[0.0, 0.1, 0.2, 0.3, 0.4, 0.0, 0.6, 0.7, 0.8, 0.9, 1.0],
    accuracy_start=0.125,
    accuracy_end=0.5,
    phase_seconds={"generate": 300.0, "score": 0.0, "train_actor": 187.0, "transitions": 60.0},
    peak_bytes={"actor": int(1.75 * 2**30), "rollout": 528 * 2**20},
    written={"run folder": Path("/runs/first"), "model": Path("/runs/first") / ("long" * 30)},
    next_commands=[("hybrid train " + "p" * 100, "the same again")],
)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_summary(width):
    lines = lines_of(lambda c: c.summary(SUMMARY), width=width)
    text = "\n".join(lines)

    def row(name):
        return re.search(rf"(?m)\b{name}\b(.*)", text)[1].split("  ")

    def cells(name):
        return [cell.strip() for cell in row(name) if cell.strip()]

    assert "hybrid first  11 steps in 10:00" in lines
    assert cells("reward") == ["(mean of 5 steps)", "0.200", "0.800", "+0.600"]
    assert cells("held-out accuracy")[:3] == ["0.125", "0.500", "+0.375"]
    assert cells("generate")[:2] == ["5:00", "50%"]
    assert cells("transitions")[:2] == ["1:00", "10%"]
    assert cells("other")[:2] == ["53 s", "9%"]
    assert "score" not in text
    assert cells("actor")[-1] == "1.75 GiB" and cells("rollout")[-1] == "528 MiB"
    assert "/runs/first/" + "long" * 30 in text and "hybrid train " + "p" * 100 in text, (
        "paths and commands can be copied"
    )
    tables = lines[: lines.index("written")]
    assert max(map(len, tables)) <= width


def test_summary_of_what_there_is():
    text = "\n".join(lines_of(lambda c: c.summary(SummaryData("hybrid first", 3.0, rewards=[0.5]))))
    assert "steps)" not in text and "0.500" in text
    for absent in ("accuracy", "phase", "peak", "written", "next"):
        assert absent not in text


def test_an_evaluation_at_one_end_only():
    text = "\n".join(lines_of(lambda c: c.summary(SummaryData("t", 3.0, accuracy_end=0.5))))
    assert re.search(r"held-out accuracy +- +0\.500 +-", text)


def test_first_and_last_steps_do_not_overlap():
    assert first_and_last([0.0, 1.0, 2.0]) == (0.0, 2.0)
    assert first_and_last([0.0, 1.0, 2.0, 3.0]) == (0.5, 2.5)
    assert first_and_last([float(i) for i in range(20)]) == (2.0, 17.0)


@pytest.mark.parametrize(
    "seconds, shown", [(0, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (187, "3:07"), (3787, "1:03:07")]
)
def test_clock(seconds, shown):
    assert clock(seconds) == shown


@pytest.mark.parametrize(
    "count, shown",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (528 << 20, "528 MiB"),
        (18 << 30, "18.0 GiB"),
        (3 << 40, "3.00 TiB"),
    ],
)
def test_human_bytes(count, shown):
    assert human_bytes(count) == shown


RUN = """
import os, sys, time
pause = float(os.environ.get("PAUSE", 0))
from hybrid.telemetry.console import Console
with Console(sys.argv[1]) as console:
    console.start("hybrid first", "runs/first", 3)
    console.stage("starting 2 engines")
    time.sleep(pause)
    for step in (1, 2, 3):
        console.phase("generate")
        time.sleep(pause)
        console.step({"step": step, "reward/mean": 0.25, "tokens/per_second": 312.0, "time/step": 16.0})
    print("printed by someone else")
    if sys.argv[2:]:
        console.error("actor rank 1 died")
        sys.exit(3)
    console.note("the end")
"""


def environment(**env):
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}
    return {**plain, "PYTHONPATH": str(ROOT), "TERM": "xterm", **env}


def on_terminal(*args, **env):
    """(exit status, everything a terminal received)."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", RUN, *args]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(COLUMNS="80", **env)
    )
    os.close(theirs)
    received = b""
    try:
        while block := os.read(ours, 4096):
            received += block
    except OSError:  # The other end closed.
        pass
    os.close(ours)
    return process.wait(timeout=20), received.decode()


def test_bar_on_a_terminal():
    status, text = on_terminal("auto", PAUSE="0.3")  # longer than the bar waits between two pictures
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert status == 0
    assert re.search(r"step 1/3 +━.*elapsed, 32 s left", plain)
    assert re.search(r"generate +\d s +reward 0\.250 +312 tokens/s", plain)
    assert re.search(r"[\r\n]starting 2 engines  \d s", plain), "what was slow stays to be read"
    assert "printed by someone else" in plain
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"


def test_an_error_leaves_the_bar_where_it_was():
    status, text = on_terminal("auto", "fail")
    assert status == 3 and "actor rank 1 died" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize("mode, term", [("auto", "dumb"), ("bar", "dumb"), ("lines", "xterm")])
def test_lines_on_a_terminal_that_cannot_or_should_not_move(mode, term):
    status, text = on_terminal(mode, TERM=term, NO_COLOR="1")
    assert status == 0 and "\x1b[?25l" not in text and "step 3/3  reward 0.250" in text


def in_shell(command, **env):
    script = {"PYTHON": sys.executable, "RUN": RUN}
    return subprocess.run(
        ["bash", "-c", command], env=environment(**script, **env), capture_output=True, text=True, timeout=30
    )


def test_a_pipe_that_closes_does_not_end_the_run():
    done = in_shell('"$PYTHON" -c "$RUN" auto | head -1; echo "${PIPESTATUS[0]}"')
    assert done.stdout.splitlines() == ["hybrid first", "0"] and done.stderr == ""


def test_closed_stdout():
    done = in_shell('"$PYTHON" -c "$RUN" auto >&-')
    assert done.returncode == 0 and done.stderr == ""


def test_error_goes_to_stderr():
    done = in_shell('"$PYTHON" -c "$RUN" auto fail')
    assert done.returncode == 3 and done.stderr == "error: actor rank 1 died\n" and "died" not in done.stdout


def test_characters_that_the_output_lacks():
    done = in_shell('"$PYTHON" -c "$RUN" bar', PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == "" and "step 3/3" in done.stdout


def test_output_that_is_full_does_not_end_the_run():
    """/dev/full refuses every write."""
    assert in_shell('"$PYTHON" -c "$RUN" auto > /dev/full').returncode == 0
