"""Waits say that they last, and end."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hybrid.errors import PlacementError
from hybrid.waiting import TELL_EVERY_S, Ticker, bounded, told

ROOT = Path(__file__).resolve().parents[2]


def test_a_wait_says_that_it_lasts(capsys):
    said = threading.Event()
    ticker = Ticker(lambda _: said.set(), every_s=0.01)
    assert said.wait(30)
    ticker.stop()
    ticker.stop()
    with told("starting Ray", every_s=0.01):
        while not (out := capsys.readouterr().err):
            time.sleep(0.01)
    assert out.startswith("starting Ray ... 0 s\n")


def test_a_short_wait_says_nothing(capsys):
    assert TELL_EVERY_S == 20
    with told("starting Ray"):
        pass
    assert capsys.readouterr().err == ""


def test_c48_a_wait_that_lasts_too_long_is_interrupted():
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(PlacementError, match="too late"), bounded(0.05, PlacementError("too late")):
        time.sleep(600)
    assert signal.getsignal(signal.SIGALRM) is before


def test_what_ends_in_time_is_left_alone():
    with bounded(600, PlacementError("too late")):
        pass
    with pytest.raises(KeyError), bounded(600, PlacementError("too late")):
        raise KeyError


def test_other_threads_wait_unbounded():
    done = []

    def body() -> None:
        with bounded(0.0, PlacementError("too late")):
            done.append(True)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(30)
    assert done


def test_c48_a_call_that_cannot_be_interrupted_ends_the_process_with_the_message():
    code = (
        "import threading\nfrom hybrid.errors import PlacementError\nfrom hybrid.waiting import bounded\n"
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"  # as a call that does not return
        "with bounded(0.05, PlacementError('no Ray at a:1'), grace_s=0.1):\n    threading.Event().wait(600)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=50)
    assert (done.returncode, done.stderr) == (1, "error: no Ray at a:1\n")
