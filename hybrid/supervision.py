"""Waiting for workers: every wait has a deadline, every death a name.

Only workers that are being waited for tell by themselves that they died. The others are idle while somebody else works, so they are
pinged meanwhile: a dead one ends the wait.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybrid.errors import DeadlineExceeded, HybridError, WorkerDied, WorkerFailed
from hybrid.stacks import stacks_here

PING_EVERY_S = 5.0
GRACE_FOR_DEATH_S = 5.0
"""A rank whose peer died often fails first, in a collective: wait this long for the true cause to show."""
LOG_TAIL_LINES = 20
NODE_TIMEOUT_S = 45.0
"""Seconds that another node may take to show what its silent processes do."""


@dataclass(frozen=True, eq=False)
class Worker:
    """One process of the pool."""

    role: str
    rank: int
    node: str
    handle: Any
    log_file: Path

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} on node {self.node}"

    def submit(self, method: str, *args, **kwargs) -> Call:
        """Start `method` in the worker; the result comes from `Pool.wait`."""
        return Call(self, method, getattr(self.handle, method).remote(*args, **kwargs))


@dataclass(frozen=True, eq=False)
class Call:
    """A call under way."""

    worker: Worker
    method: str
    ref: Any


def collect(calls: list[Call], workers: list[Worker], what: str, timeout_s: float) -> list[Any]:
    """Results of `calls` in order; see `Pool.wait` for what it raises. `what` names the wait in messages ("train_actor")."""
    results = {}

    def take(call: Call) -> bool:
        results[call] = ray.get(call.ref)
        return True

    _watch(calls, workers, what, timeout_s, take)
    return [results[call] for call in calls]


def stream(
    calls: list[Call],
    workers: list[Worker],
    what: str,
    timeout_s: float,
    arrived: Callable[[Call, Any], None],
    check: Callable[[], None] | None,
) -> None:
    """Hand each item that `calls` of generators yield to `arrived`, until all have ended; see `Pool.stream`."""

    def take(call: Call) -> bool:
        try:
            ref = next(call.ref)
        except StopIteration:
            return True
        arrived(call, ray.get(ref))
        return False

    _watch(calls, workers, what, timeout_s, take, check)


def _watch(
    calls: list[Call],
    workers: list[Worker],
    what: str,
    timeout_s: float,
    take: Callable[[Call], bool],
    check: Callable[[], None] | None = None,
) -> None:
    """`take` a call whenever it has something, until it says that this was all; `check` at least every PING_EVERY_S."""
    deadline = time.monotonic() + timeout_s
    waiting = {call.ref: call for call in calls}
    pings: dict[Any, Worker] = {}
    busy = {id(call.worker) for call in calls}
    next_ping = time.monotonic() + PING_EVERY_S
    while waiting:
        if check is not None:
            check()
        now = time.monotonic()
        if now >= deadline:
            raise DeadlineExceeded(_silence(list(waiting.values()), what, timeout_s))
        if now >= next_ping:
            idle = [w for w in workers if id(w) not in busy and w not in pings.values()]
            pings |= {w.handle.ping.remote(): w for w in idle}
            next_ping = now + PING_EVERY_S
        refs = [*waiting, *pings]
        ready, _ = ray.wait(refs, num_returns=1, timeout=min(deadline, next_ping) - now if now < next_ping else 0)
        for ref in ready:
            worker = pings.pop(ref) if ref in pings else waiting[ref].worker
            try:
                if ref not in waiting:
                    ray.get(ref)
                elif take(waiting[ref]):
                    waiting.pop(ref)
            except RayActorError as error:
                raise WorkerDied(_death(worker, what, error)) from None
            except RayTaskError as error:
                _raise_cause(error, worker, waiting[ref].method, what, workers)


def kill_all(workers: list[Worker]) -> None:
    """End the processes at once; those that are gone already are no error."""
    for worker in workers:
        ray.kill(worker.handle, no_restart=True)


def _raise_cause(error: RayTaskError, worker: Worker, method: str, what: str, workers: list[Worker]) -> None:
    dead = _find_dead(workers)
    if dead is not None:
        raise WorkerDied(_death(dead, what, None)) from None
    if isinstance(error.cause, HybridError):
        raise error.cause from None
    raise WorkerFailed(f"{worker} failed in `{method}` ({what}):\n{error}\nIts output: {worker.log_file}") from None


def _find_dead(workers: list[Worker]) -> Worker | None:
    pings = {w.handle.ping.remote(): w for w in workers}
    deadline = time.monotonic() + GRACE_FOR_DEATH_S
    while pings and time.monotonic() < deadline:
        ready, _ = ray.wait(list(pings), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        for ref in ready:
            worker = pings.pop(ref)
            try:
                ray.get(ref)
            except RayActorError:
                return worker
            except RayTaskError:
                continue
    return None


def _death(worker: Worker, what: str, error: RayActorError | None) -> str:
    exit_type = re.search(r"Worker exit type: (\w+)", str(error))
    reason = f" (Ray: {exit_type[1]})" if exit_type else ""
    return (
        f"{worker} died during {what}{reason}. A process that ends without a Python error was killed, often by the kernel for want of "
        f"memory (`dmesg | grep -i oom`).\nLast lines of {worker.log_file}:\n{_tail(worker.log_file)}"
    )


def _tail(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError:
        return "  (not on this node)"
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"


def _silence(calls: list[Call], what: str, timeout_s: float) -> str:
    lines = [f"{what}: no answer within {timeout_s:.0f} s from"]
    for call, stack in zip(calls, _stacks([c.worker for c in calls]), strict=True):
        lines += [f"  {call.worker}, in `{call.method}`", *(f"    {line}" for line in stack.splitlines())]
    limit = "memory.barrier_timeout_s" if _is_move(calls) else "cluster.call_timeout_s"
    return "\n".join([*lines, f"If the work is simply long, raise {limit}."])


def _is_move(calls: list[Call]) -> bool:
    return {call.method for call in calls} <= {"leave", "come"}


def _stacks(workers: list[Worker]) -> list[str]:
    """What each worker is doing, in order. On another node a task looks, pinned to it; nothing here raises or takes longer than
    NODE_TIMEOUT_S per node."""
    here = ray.util.get_node_ip_address()
    ids = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    logs: dict[str, list[Path]] = {}
    for worker in workers:
        logs.setdefault(worker.node, []).append(worker.log_file)
    tasks = {node: _look(ids[node], files) for node, files in logs.items() if node != here and node in ids}
    found: dict[Path, str] = {}
    for node, files in logs.items():
        texts = _looked(tasks[node], node, files) if node in tasks else stacks_here(files)
        found |= dict(zip(files, texts, strict=True))
    return [found[worker.log_file] for worker in workers]


def _look(node_id: str, files: list[Path]) -> ray.ObjectRef:
    pinned = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(stacks_here).options(scheduling_strategy=pinned).remote(files)


def _looked(task: ray.ObjectRef, node: str, files: list[Path]) -> list[str]:
    try:
        return ray.get(task, timeout=NODE_TIMEOUT_S)
    except (GetTimeoutError, RayError) as error:
        return [f"node {node} gave no stack ({type(error).__name__}); its output: {file}" for file in files]
