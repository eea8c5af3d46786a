"""A pool of processes: one that does not answer is named, and shown at what it does; and the process that opened it stays itself."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from hybrid.cluster import dashboard_url, within
from hybrid.errors import DeadlineExceeded, PlacementError, RewardError
from hybrid.joining import await_cluster, find_cluster
from hybrid.pool import open_pool


class Sleeper:
    def leave(self, parts):
        if parts:
            self.waits_for_godot()

    def waits_for_godot(self):
        time.sleep(60)

    def counts(self, numbers, then_waits=False):
        for number in range(numbers):  # noqa: UP028  Ray sends values into it, which a range does not take
            yield number
        if then_waits:
            self.waits_for_godot()


@pytest.fixture
def pool(tmp_path):
    made = open_pool(
        num_nodes=1, gpus_per_node=2, processes_per_bundle=1, device="cpu", log_dir=tmp_path / "logs", dashboard=False
    )
    yield made
    made.stop()


def test_a_missed_barrier_names_the_rank_and_dumps_its_stack(pool):
    workers = [pool.spawn(Sleeper, role="actor", rank=b.rank, bundle=b) for b in pool.bundles]
    pool.wait([w.submit("leave", []) for w in workers], "warm-up", 60)
    with pytest.raises(DeadlineExceeded) as error:
        pool.wait([w.submit("leave", ["weights"] if w.rank else []) for w in workers], "actor.leave", 2)
    message = str(error.value)
    assert "actor.leave: no answer within 2 s from" in message
    assert "actor rank 1 on node" in message and "actor rank 0 on node" not in message
    assert "waits_for_godot" in message or "SYS_PTRACE" in message
    assert "memory.barrier_timeout_s" in message


def test_c48_a_stale_address_is_left_after_the_timeout():
    with socket.socket() as taken:  # bound, not listening: nothing answers, and nobody else takes it
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PlacementError) as error:
            await_cluster(find_cluster("auto", {"RAY_ADDRESS": place}), 5)
    assert f"RAY_ADDRESS={place}" in str(error.value) and "cluster.start_timeout_s=5 s" in str(error.value)


def test_what_a_generator_yields_is_there_before_it_ends(pool):
    workers = [pool.spawn(Sleeper, role="actor", rank=b.rank, bundle=b) for b in pool.bundles]
    came = []

    def arrived(call, item):
        came.append((call.worker.rank, item))

    pool.stream([w.submit("counts", 3) for w in workers], "warm-up", 60, arrived)
    assert sorted(came) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    came.clear()
    with pytest.raises(DeadlineExceeded, match="actor rank 1 on node"):
        pool.stream([w.submit("counts", 2, w.rank == 1) for w in workers], "generate", 3, arrived)
    assert sorted(came) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_wait_ends_when_what_runs_beside_it_fails(pool):
    """Scoring that fails must not wait for the engines."""
    (worker, _) = [pool.spawn(Sleeper, role="actor", rank=b.rank, bundle=b) for b in pool.bundles]
    came = []

    def check():
        if came:
            raise RewardError("no judge")

    started = time.monotonic()
    with pytest.raises(RewardError, match="no judge"):
        pool.stream([worker.submit("counts", 1, True)], "generate", 60, lambda call, item: came.append(item), check)
    assert time.monotonic() - started < 30


def test_a_command_run_beside_a_pool_keeps_its_exit_status(pool):
    """Ray would ignore SIGCHLD, and a reward that runs programs would see every one succeed."""
    assert subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode == 3


def test_sigterm_means_beside_a_pool_what_it_meant_before(tmp_path):
    """A handler of Ray's would end an interrupted run with another status and without a word."""
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    before_all = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        before = [signal.getsignal(number) for number in signals]
        made = open_pool(num_nodes=1, gpus_per_node=1, processes_per_bundle=1, device="cpu", log_dir=tmp_path)
        try:
            dashboard_url()
            assert [signal.getsignal(number) for number in signals] == before
        finally:
            made.stop()
    finally:
        signal.signal(signal.SIGTERM, before_all)


def test_an_ending_that_hangs_is_left_alone():
    answer, ended = threading.Event(), []
    started = time.monotonic()
    within(0.05, answer.wait)
    within(0.05, lambda: ended.append("beside it"))
    assert time.monotonic() - started < 1 and ended == []
    answer.set()
    deadline = time.monotonic() + 5
    while ended == [] and time.monotonic() < deadline:
        within(1, lambda: ended.append("after it"))
    assert ended[0] == "after it"


def test_an_ending_that_fails_is_no_error():
    within(5, lambda: 1 / 0)
