"""Ray, started on this machine or joined where it runs. Nothing here asks it for a GPU: `hybrid.pool` does."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Read by the import. Under `uv run` workers would run a copy of the working directory.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"

import ray

from hybrid.config.cgroups import process_limit
from hybrid.config.machine import cpu_cores
from hybrid.errors import PlacementError
from hybrid.joining import Target, await_cluster, find_cluster
from hybrid.leftovers import (
    clear_abandoned,
    clear_folder,
    clear_session,
    failed_start,
    make_temp_folder,
    own,
    temporary_files_in,
)
from hybrid.package import own_package_found
from hybrid.surroundings import GIVEN, OBJECT_STORE_BYTES, check_surroundings, raise_file_limit, ray_cores, temp_folder
from hybrid.waiting import bounded, told

STOP_TIMEOUT_S = 10
"""For giving a pool back, and again for ending Ray."""

ENDING = "ending Ray"
"""Name of the thread that does."""

BUSY = 1.5
"""Load over cores from which on other work is to blame."""
FEW_PROCESSES = 1000
"""The driver, GCS, raylet and an agent had 107 threads in a run on two logical GPUs, and workers come to it."""
MIN_JOIN_S = 10.0
"""For joining a cluster that answers; what is left of the time may be less."""

NODE_ENV = {
    # Ray puts the working directory first on its workers' path: a folder of this package's name there would hide it. See hybrid.package.
    "RAY_preload_python_modules": "hybrid",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # On a crash Ray's default leaves grandchildren (tensor-parallel workers) alive with their GPU memory.
    "RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    # Ray's default of 15 lets all else on the machine, its own dashboard too, go before the workers. They are as nice as the command is.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}

COMMON = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}


@dataclass(frozen=True)
class OwnRay:
    """A Ray that this process started, the folder in which it keeps logs and sockets, and that of its processes' temporary files."""

    session: Path
    temp: Path


@contextmanager
def running_ray(*, logs: Path | None = None, **options: Any) -> Iterator[None]:
    """`start_ray` with `options`, and at the end, whatever happens, what it started ends; see `end_ray` for `logs`."""
    if ray.is_initialized():
        yield
        return
    own = start_ray(**options)
    try:
        yield
    except BaseException:
        end_ray(own, logs)
        raise
    end_ray(own)


def start_ray(
    *, address: str | None, gpus: int, processes: int, device: str, dashboard: bool, timeout_s: float
) -> OwnRay | None:
    """Join the cluster at `address`, or start one here with `gpus` GPUs, logical ones on "cpu", for `processes` on each; None when it was
    not started here. Raises `SurroundingsError` for what keeps Ray from starting, `PlacementError` when no cluster answers at `address`
    within `timeout_s` seconds, or none starts here."""
    if ray.is_initialized():
        return None
    check_surroundings(address)
    target = None if address is None else find_cluster(address)
    if removed := clear_abandoned():
        print(f"note: removed what runs that were killed had left: {', '.join(map(str, removed))}", flush=True)
    os.environ.update(NODE_ENV)
    raise_file_limit()
    with _own_signal_handlers(), told("starting Ray" if target is None else "joining Ray's cluster"):
        if target is not None:
            _join(target, timeout_s)
            return None
        return _start(gpus, ray_cores(gpus, processes, cpu_cores()), device, dashboard, timeout_s)


def end_ray(own: OwnRay | None, logs: Path | None = None) -> None:
    """Leave Ray, and end it when it is our `own`. Its folder goes too; before that, what it logged is copied to `logs`/ray, which is for
    runs that failed."""
    within(STOP_TIMEOUT_S, ray.shutdown)
    if own is not None:
        clear_session(own.session, logs)
        clear_folder(own.temp)


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
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGALRM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _join(target: Target, timeout_s: float) -> None:
    started = time.monotonic()
    await_cluster(target, timeout_s)
    late = PlacementError(
        f"{target.said}: the cluster answers, but this machine could not join it within cluster.start_timeout_s={timeout_s:g} s. Start a "
        "node of it here with `bash launch/ray_node.sh worker HEAD`, then this command again."
    )
    place = "auto" if target.found_here else target.place
    try:
        with bounded(max(MIN_JOIN_S, timeout_s - (time.monotonic() - started)), late):
            ray.init(address=place, **COMMON)
    except PlacementError:
        raise
    except Exception as error:  # Ray has several classes for it
        raise PlacementError(
            f"{target.said}: this machine cannot join the cluster ({_text(error)}). Start a node of it here with `bash "
            "launch/ray_node.sh worker HEAD`, with the same version of Ray, then this command again."
        ) from error


def _start(gpus: int, cores: int, device: str, dashboard: bool, timeout_s: float) -> OwnRay:
    began = time.time()
    late = PlacementError(
        f"Ray did not start on this machine within cluster.start_timeout_s={timeout_s:g} s. {_likely_cause()}"
    )
    temp = make_temp_folder()
    try:
        with bounded(timeout_s, late), own_package_found(), temporary_files_in(temp):
            context = ray.init(
                address="local",  # or Ray would join any cluster that it finds running on this machine
                num_cpus=cores,
                num_gpus=gpus if device == "cpu" else None,
                include_dashboard=dashboard,
                object_store_memory=OBJECT_STORE_BYTES,
                **COMMON,
            )
    except BaseException as error:
        within(STOP_TIMEOUT_S, ray.shutdown)
        said = failed_start(Path(temp_folder()[1]) / "ray", began)
        clear_folder(temp)
        if isinstance(error, PlacementError) or not isinstance(error, Exception):
            raise
        raise PlacementError(
            "\n".join(["Ray did not start on this machine: " + _text(error), *said, _likely_cause()])
        ) from error
    session = Path(context.address_info["session_dir"])
    own(session)
    return OwnRay(session, temp)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _likely_cause() -> str:
    """The reason why Ray, which gives itself 30 seconds, does not start, where its own error gives none."""
    load, cores, most = os.getloadavg()[0], cpu_cores(), process_limit()
    if most is not None and most < FEW_PROCESSES:
        return f"Its control group allows this process {most} processes and threads; Ray needs hundreds. Raise the limit (pids.max)."
    if load > BUSY * cores:
        return f"Other work keeps the cores busy (load {load:.0f} on {cores}): start again when it has ended."
    if names := [name for name in GIVEN if name in os.environ and name not in NODE_ENV]:
        unset = shlex.join(arg for name in names for arg in ("-u", name))
        return f"These variables of Ray are set: {', '.join(names)}. Try without them: env {unset} hybrid ..."
    return "Start again; if it fails again, try `ray start --head --block` by itself."
