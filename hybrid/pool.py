"""The one placement group that every role and every engine shares, and the processes in it.

A pool is `num_nodes * gpus_per_node` bundles of one GPU each. Rank r of every role lives in bundle r; bundles are ordered by node, then
by GPU id, so consecutive ranks share a node. The node of the driver comes first: rank 0 writes the trained model there. Ray counts GPUs
that do not exist where there are none: a laptop runs the same pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybrid import leftovers
from hybrid.cluster import STOP_TIMEOUT_S, OwnRay, dashboard_url, end_ray, start_ray, within
from hybrid.environment import Place
from hybrid.errors import PlacementError
from hybrid.gpus import SLICE, rank_order
from hybrid.package import Package, check_same, look, own_package
from hybrid.process import as_process
from hybrid.supervision import Call, Worker, collect, kill_all, stream
from hybrid.waiting import told


@dataclass(frozen=True)
class Bundle:
    """One GPU of the pool. `rank` is its place in the pool's order, `slot` its index in Ray's placement group."""

    rank: int
    node: str
    gpu_id: str
    slot: int


@dataclass
class Pool:
    """Bundles in rank order and the workers placed on them. Made by `open_pool`, ended by `stop`."""

    group: PlacementGroup
    bundles: list[Bundle]
    processes_per_bundle: int
    device: str
    log_dir: Path
    own_ray: OwnRay | None
    """Where Ray was started for this pool alone."""
    temp: Path
    """Folder for temporary files of all processes."""
    bind_numa: bool = False
    """Processes with one GPU stay on the cores beside it."""
    dashboard_url: str | None = None
    package: Package = field(default_factory=own_package)
    workers: list[Worker] = field(default_factory=list)
    shared: set[Path] = field(default_factory=set)
    """Files of /dev/shm that processes of this node had mapped when that was last noted."""

    @property
    def gpu_share(self) -> float:
        """GPU fraction of one process: an equal part, rounded down so that the parts never exceed one GPU."""
        return int(10_000 / self.processes_per_bundle) / 10_000

    def spawn(
        self,
        cls: type,
        *,
        role: str,
        rank: int,
        bundle: Bundle,
        gpus: int = 1,
        env: dict[str, str] | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Worker:
        """Start `cls(*args, **kwargs)` as one process in `bundle`; its output goes to `<log_dir>/<role>-<rank>.log`. `gpus`: how many it
        uses, that of its bundle among them."""
        log_file = self.log_dir / f"{role}-{rank}.log"
        actor = as_process(cls).options(
            num_gpus=self.gpu_share,
            num_cpus=self.gpu_share,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle.slot),
        )
        several_nodes = len({each.node for each in self.bundles}) > 1
        place = Place(self.device, role, bundle.gpu_id, several_nodes, beside_gpu=self.bind_numa and gpus == 1)
        handle = actor.remote(str(log_file), env or {}, place, str(self.temp), self.package, *args, **(kwargs or {}))
        worker = Worker(role=role, rank=rank, node=bundle.node, handle=handle, log_file=log_file)
        self.workers.append(worker)
        return worker

    def wait(self, calls: list[Call], what: str, timeout_s: float) -> list[Any]:
        """Results of `calls` in order.

        Raises `WorkerDied` when any worker of the pool ends meanwhile, `WorkerFailed` when a call raises, `DeadlineExceeded` after
        `timeout_s` seconds, with what the silent workers were doing.
        """
        return collect(calls, self.workers, what, timeout_s)

    def stream(
        self,
        calls: list[Call],
        what: str,
        timeout_s: float,
        arrived: Callable[[Call, Any], None],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Call `arrived(call, item)` with what `calls` of generator methods yield, as it comes, until all have ended.

        Raises as `wait`, and what `check` raises, which is called now and then.
        """
        stream(calls, self.workers, what, timeout_s, arrived, check)

    def note_shared(self) -> None:
        """Note what the processes of this node have mapped of /dev/shm: whoever dies later cannot be asked."""
        self.shared |= leftovers.shared_files(leftovers.family(w.log_file for w in self.workers))

    def stop(self) -> None:
        """Kill every worker, give the bundles back, and end Ray when it was started for this pool. Nothing of the pool stays in temporary
        folders or shared memory of this node. Safe to call twice."""
        processes = leftovers.family(w.log_file for w in self.workers)
        self.shared |= leftovers.shared_files(processes)
        if ray.is_initialized():
            within(STOP_TIMEOUT_S, self._stop)
        if self.own_ray is not None:
            end_ray(self.own_ray)
        leftovers.remove(processes, self.shared, self.temp)

    def _stop(self) -> None:
        kill_all(self.workers)
        self.workers.clear()
        remove_placement_group(self.group)


class Holder:
    """Occupies a bundle: keeps the share of an engine that spans several."""


def open_pool(
    *,
    num_nodes: int,
    gpus_per_node: int,
    processes_per_bundle: int,
    device: str,
    log_dir: Path,
    address: str | None = None,
    timeout_s: float = 120,
    dashboard: bool = True,
    bind_numa: bool = False,
) -> Pool:
    """Start or join Ray and reserve the bundles.

    Raises `PlacementError` with a table of what each node offers when the cluster lacks the GPUs, when the group is not placed within
    `timeout_s` seconds, or when it does not lie on exactly `num_nodes` nodes with `gpus_per_node` bundles each.
    """
    own_ray = start_ray(
        address=address,
        gpus=gpus_per_node,
        processes=processes_per_bundle,
        device=device,
        dashboard=dashboard,
        timeout_s=timeout_s,
    )
    pool = None
    try:
        deadline = time.monotonic() + timeout_s
        _await_gpus(num_nodes, gpus_per_node, deadline, wait=address is not None)
        strategy = "STRICT_PACK" if num_nodes == 1 else "PACK"
        group = placement_group([{"GPU": 1, "CPU": 1}] * (num_nodes * gpus_per_node), strategy=strategy)
        with told("waiting for the cluster to place the run"):
            placed = group.wait(timeout_seconds=max(1.0, deadline - time.monotonic()))
        if not placed:
            remove_placement_group(group)
            raise PlacementError(_short_of(num_nodes, gpus_per_node, f"no placement within {timeout_s:.0f} s"))
        url = dashboard_url() if dashboard else None
        temp = leftovers.make_temp_folder()
        pool = Pool(group, [], processes_per_bundle, device, log_dir.absolute(), own_ray, temp, url)
        pool.bundles = _order_bundles(pool, num_nodes, gpus_per_node, max(10.0, deadline - time.monotonic()))
        pool.bind_numa = bind_numa
        return pool
    except BaseException:
        if pool is not None:
            pool.stop()
        elif own_ray is not None:
            end_ray(own_ray)
        raise


def _offers() -> list[dict[str, Any]]:
    """Living nodes with the GPUs they have, most GPUs first."""
    nodes = [n for n in ray.nodes() if n["Alive"]]
    return sorted(nodes, key=lambda n: -n["Resources"].get("GPU", 0))


def _await_gpus(num_nodes: int, gpus_per_node: int, deadline: float, wait: bool) -> None:
    """Nodes of a cluster join one after another: wait for them until the deadline, but not on a machine of our own."""
    while sum(n["Resources"].get("GPU", 0) >= gpus_per_node for n in _offers()) < num_nodes:
        if not wait or time.monotonic() > deadline:
            raise PlacementError(_short_of(num_nodes, gpus_per_node, "the cluster does not have them"))
        time.sleep(1)


def _short_of(num_nodes: int, gpus_per_node: int, why: str) -> str:
    free = ray.available_resources()
    rows = [
        f"  {n['NodeManagerAddress']:<16} {int(n['Resources'].get('GPU', 0))} GPUs, {int(n['Resources'].get('CPU', 0))} CPUs"
        for n in _offers()
    ]
    return "\n".join(
        [
            f"The pool needs {num_nodes} node(s) with {gpus_per_node} GPU(s) each: {why}. Nodes of the cluster:",
            *rows,
            f"  free in all: {free.get('GPU', 0):g} GPUs, {free.get('CPU', 0):g} CPUs",
            "Lower cluster.num_nodes or cluster.gpus_per_node, add nodes, or end the jobs that hold the GPUs.",
        ]
    )


def _order_bundles(pool: Pool, num_nodes: int, gpus_per_node: int, timeout_s: float) -> list[Bundle]:
    """Ask a small task in each bundle for its node, GPU and copy of this package, check them, and put them in rank order."""
    count = num_nodes * gpus_per_node
    node_of_slot = placement_group_table(pool.group)["bundles_to_node_id"]
    address = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
    probe = ray.remote(max_calls=0)(_probe())  # its process is used again
    placed = [PlacementGroupSchedulingStrategy(pool.group, placement_group_bundle_index=slot) for slot in range(count)]
    probes = [probe.options(num_gpus=0.01, num_cpus=0.01, scheduling_strategy=place).remote() for place in placed]
    try:
        gpu_ids, packages = zip(*ray.get(probes, timeout=timeout_s), strict=True)
    except GetTimeoutError as error:
        raise PlacementError(f"The processes that probe the bundles did not start within {timeout_s:.0f} s.") from error
    except RayError as error:
        raise PlacementError(
            f"Processes cannot start in the bundles; is hybrid installed on every node? {error}"
        ) from error
    for slot, found in enumerate(packages):
        check_same(pool.package, found, f"node {address[node_of_slot[slot]]}")
    if slices := [gpu for gpu in gpu_ids if gpu.startswith(SLICE)]:
        raise PlacementError(
            f"{slices[0]} is a part of a GPU (MIG), and CUDA shares no memory between processes there (IPC), which carries the weights to "
            "the engines. Turn MIG off on every node (nvidia-smi -mig 0)."
        )
    per_node: dict[str, int] = {}
    for slot in range(count):
        per_node[node_of_slot[slot]] = per_node.get(node_of_slot[slot], 0) + 1
    if sorted(per_node.values()) != [gpus_per_node] * num_nodes:
        remove_placement_group(pool.group)
        shape = ", ".join(f"{address[n]}: {c}" for n, c in per_node.items())
        raise PlacementError(_short_of(num_nodes, gpus_per_node, f"Ray placed the bundles as {shape}"))
    nodes = [node_of_slot[slot] for slot in range(count)]
    order = rank_order(nodes, gpu_ids, ray.get_runtime_context().get_node_id())
    return [Bundle(rank, address[node_of_slot[slot]], gpu_ids[slot], slot) for rank, slot in enumerate(order)]


def _probe() -> Callable[[], tuple[str, tuple[str, str]]]:
    """A task that needs nothing of hybrid, of which another copy may be found where it runs."""
    looked = look

    def probe() -> tuple[str, tuple[str, str]]:
        import ray

        return ray.get_runtime_context().get_accelerator_ids()["GPU"][0], looked()

    return probe
