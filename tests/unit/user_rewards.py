"""A user's reward file, of which tests start functions by `path:name`: the usual kinds, and what goes wrong in them.

Each start imports it, so that imports which take long stand in the functions.
"""

import atexit
import functools
import os
import random
import signal
import sys
import threading
import time
import warnings

CALLS = []
COUNTED = [os.environ.get("HYBRID_TEST_IMPORTS")]
if COUNTED[0]:
    with open(COUNTED[0], "a") as file:
        file.write("imported\n")


def acc(prompts, responses, labels, **columns):
    from math_verify import parse, verify

    return [float(verify(parse(f"\\boxed{{{label}}}"), parse(text))) for text, label in zip(responses, labels)]


def state(responses):
    CALLS.append(len(responses))
    return [float(sum(CALLS)) for _ in responses]


def alarm_left_behind(responses):
    signal.alarm(1)
    left, _ = signal.setitimer(signal.ITIMER_VIRTUAL, 100)
    return [left for _ in responses]


def own_alarm(responses):
    heard = []
    signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while not heard:
        time.sleep(0.01)
    return [1.0 for _ in responses]


def pool(responses):
    import multiprocessing

    with multiprocessing.get_context("fork").Pool(2) as workers:
        return workers.map(float, [1] * len(responses))


def length(text):
    return float(len(text))


def spawned(responses):
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1) as workers:
        return workers.map(length, responses)


def surroundings(responses):
    os.chdir("/")
    os.environ["HYBRID_TEST_REWARD"] = "changed"
    random.seed(0)
    return [float(threading.current_thread() is threading.main_thread()) for _ in responses]


def mutates(prompts, responses, labels):
    prompts.clear(), labels.clear()
    return [float(responses.pop() == "b"), 0.5]


def leaves(responses):
    raise SystemExit(3)


def exits(responses):
    if "b" in responses:
        os._exit(7)
    return [0.0 for _ in responses]


def exits_with_nothing(responses):
    os._exit(0)


def segfaults(responses):
    import ctypes

    ctypes.string_at(0)


def killed(responses):
    os.kill(os.getpid(), signal.SIGKILL)


def spins(responses):
    while "b" in responses:
        pass
    return [1.0 for _ in responses]


def holds_the_interpreter(responses):
    with open(responses[0], "w") as file:
        file.write(str(os.getpid()))
    import re

    re.match(r"(a+)+$", "a" * 60 + "b")


def leaves_processes(responses):
    import subprocess

    other = subprocess.Popen(["setsid", "sleep", "600"])
    forked = os.fork()
    if forked == 0:
        os.setsid()
        time.sleep(600)
    return [float(other.pid), float(forked)]


def forks_and_returns(responses):
    os.fork()
    return [1.0 for _ in responses]


async def awaited(responses):
    import asyncio

    LOOPS.add(asyncio.get_running_loop())
    return [float(len(LOOPS)) for _ in await asyncio.gather(*(asyncio.sleep(0) for _ in responses))]


LOOPS = set()


async def awaitables(responses):
    async def one(text):
        return float(len(text))

    return [one(text) for text in responses]


def sync_awaitables(responses):
    import asyncio

    async def one():
        return 2.0

    return [asyncio.run(one()), one()]


async def yields(responses):
    for _ in responses:
        yield 1.0


async def waits(responses):
    import asyncio

    try:
        await asyncio.sleep(600 if "b" in responses else 0)
    except asyncio.CancelledError:
        CALLS.append("cancelled")
        raise
    return [float(len(CALLS)) for _ in responses]


def prints(responses):
    print("½ printed")
    warnings.warn("careful", stacklevel=1)
    print("to stderr", file=sys.stderr)
    atexit.register(print, "at exit")
    return [0.0 for _ in responses]


def reads(responses):
    return [float(input()) for _ in responses]


def in_a_library(responses):
    import json

    return [json.loads(text) for text in responses]


def ids(responses, token_ids):
    return [float(sum(tokens)) for tokens in token_ids]


def positional(prompts, responses, /, labels):
    return [float(prompt == "2 + 2?" and label == "4") for prompt, label in zip(prompts, labels)]


def needs_level(responses, level):
    return level


def of_process(responses):
    return [float(os.getpid()) for _ in responses]


def below_the_best(prompts, responses):
    """Wrong as soon as the samples of a prompt are scored apart."""
    best = {}
    for prompt, text in zip(prompts, responses):
        best[prompt] = max(best.get(prompt, 0.0), float(text))
    return [float(text) - best[prompt] for prompt, text in zip(prompts, responses)]


class Judge:
    def __init__(self, points=0.25):
        self.points = points

    def __call__(self, responses, **columns):
        return [self.points for _ in responses]


judge = Judge()
part = functools.partial(lambda k, responses, **columns: [k for _ in responses], 0.5)
try:
    import nothing_like_this  # noqa: F401
except ImportError:
    if True:
        by_lambda = lambda responses: [1.0 for _ in responses]  # noqa: E731
number = 3


def trl_style(completions, solution=None, **columns):
    return [0.0 for _ in completions]


def verl_style(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def blind(prompts):
    return [0.0 for _ in prompts]
