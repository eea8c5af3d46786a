"""Ray, started on this machine or joined where it runs. Nothing here asks it for a GPU: `hybrid.pool` does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray

from hybrid.errors import PlacementError

STOP_TIMEOUT_S = 10
"""For giving a pool back, and again for ending Ray."""

ENDING = "ending Ray"
"""Name of the thread that does."""

OBJECT_STORE_BYTES = 512 * 2**20
"""Batches are token ids and log-probs: a small store is enough, and on a laptop the default (30 % of RAM) is not free."""

NODE_ENV = {
    # On a crash Ray's default leaves grandchildren (tensor-parallel workers) alive with their GPU memory.
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray's default of 15 lets all else on the machine, its own dashboard too, go before the workers. They are as nice as the command is.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

COMMON = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}


@contextmanager
def running_ray(*, address: str | None, gpus: int, device: str, dashboard: bool) -> Iterator[None]:
    """`start_ray`, and at the end, whatever happens, what it started ends. Errors as `start_ray`."""
    if ray.is_initialized():
        yield
        return
    try:
        start_ray(address=address, gpus=gpus, device=device, dashboard=dashboard)
        yield
    finally:
        within(STOP_TIMEOUT_S, ray.shutdown)


def start_ray(*, address: str | None, gpus: int, device: str, dashboard: bool) -> bool:
    """Join the cluster at `address`, or start one here with `gpus` GPUs, logical ones on "cpu". True when this process started it, False
    too when Ray runs in it already. Raises `PlacementError` when no cluster answers at `address`, or none starts here."""
    os.environ.update(NODE_ENV)
    if ray.is_initialized():
        return False
    with _own_signal_handlers():
        return _init_ray(address, gpus, device, dashboard)


def dashboard_url() -> str | None:
    """Where the dashboard of the Ray that this process has joined is; None when it has none."""
    with _own_signal_handlers():
        url = ray.init(ignore_reinit_error=True, logging_level="ERROR").dashboard_url
    return f"http://{url}" if url else None


def within(seconds: float, end: Callable[[], Any]) -> None:
    """Call `end`, and wait no longer than `seconds`: a signal to the whole process group ends Ray before us, and calls to it then wait for
    a minute, or fail. Its workers end with it.

    Nothing is called while an earlier `end` still waits: when Ray is shut down beside it, its next call to Ray exits the process at once,
    with status 1 and without a word.
    """
    if any(thread.name == ENDING for thread in threading.enumerate()):
        return

    def attempt() -> None:
        with suppress(Exception):
            end()

    ending = threading.Thread(target=attempt, name=ENDING, daemon=True)
    ending.start()
    ending.join(seconds)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Every `ray.init` replaces the handler of SIGTERM, by one that exits with a status of Ray's, and ignores SIGCHLD, after which every
    command that this process runs, such as a reward function's, seems to end with status 0. Ours come back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _init_ray(address: str | None, gpus: int, device: str, dashboard: bool) -> bool:
    if address is not None:
        try:
            ray.init(address=address, **COMMON)
        except ConnectionError as error:
            raise PlacementError(
                f"cluster.address={address}: no Ray cluster answers there ({error}). Start one with `bash launch/ray_node.sh head` "
                "on the first node, or leave cluster.address unset to start Ray on this machine."
            ) from error
        return False
    try:
        ray.init(
            address="local",  # or Ray would join any cluster that it finds running on this machine
            num_cpus=max(os.cpu_count() or 1, gpus),
            num_gpus=gpus if device == "cpu" else None,
            include_dashboard=dashboard,
            object_store_memory=OBJECT_STORE_BYTES,
            **COMMON,
        )
    except Exception as error:  # Ray has no class for it
        raise PlacementError(
            f"Ray did not start on this machine: {str(error) or type(error).__name__}\nIt gives itself 30 seconds: look whether other work "
            "keeps all cores busy, then start again."
        ) from error
    return True
