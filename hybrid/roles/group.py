"""N ranks of a role driven as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray

from hybrid.memory.tenants import RankMoved, Tenant
from hybrid.pool import Pool


class RoleGroup:
    """The ranks of one role, one per bundle. Implements the scheduler's `Mover`."""

    def __init__(
        self,
        pool: Pool,
        role: str,
        cls: type,
        parts: tuple[str, ...],
        timeout_s: float,
        env: dict[str, str],
        **kwargs: Any,
    ):
        """Start one `cls` per bundle of `pool`; `kwargs` go to every rank beside its place in the group."""
        self.pool, self.role, self.parts, self.timeout_s = pool, role, parts, timeout_s
        self.counted: dict[str, int] = {}
        world = len(pool.bundles)
        self.workers = [
            pool.spawn(
                cls,
                role=role,
                rank=bundle.rank,
                bundle=bundle,
                env=env,
                kwargs={
                    "role": role,
                    "rank": bundle.rank,
                    "world_size": world,
                    "node": bundle.node,
                    "node_ranks": [other.rank for other in pool.bundles if other.node == bundle.node],
                    "timeout_s": timeout_s,
                    **kwargs,
                },
            )
            for bundle in pool.bundles
        ]

    def rendezvous(self) -> None:
        """Form the process group of the role on rank 0's node."""
        first = self.workers[0]
        (port,) = self.pool.wait([first.submit("host_store")], f"{self.role}: opening the rendezvous", self.timeout_s)
        self.call("join", first.node, port)

    def call(self, method: str, *args: Any) -> list[Any]:
        """`method(*args)` on every rank at once; results by rank."""
        return self._wait(method, [w.submit(method, *args) for w in self.workers], self.timeout_s)

    def put(self, shards: Iterable[Any]) -> list[ray.ObjectRef]:
        """Send `shards` once for several calls, of this role and of others: each node then holds them once."""
        return [ray.put(shard) for shard in shards]

    def call_sharded(self, method: str, shards: Iterable[Any], *args: Any) -> list[Any]:
        """`method(shard, *args)` on every rank at once, each with its own of `shards`, or of what `put` made of them; results by rank.

        Shards that are iterated over are sent one by one, so that the first rank works while the others' are made.
        """
        calls = [w.submit(method, shard, *args) for w, shard in zip(self.workers, shards, strict=True)]
        return self._wait(method, calls, self.timeout_s)

    def load(self, *args: Any) -> None:
        """Form the process group, then load the model on every rank."""
        self.rendezvous()
        per_rank = self.call("load", *args)
        self.counted = {part: max(counted.get(part, 0) for counted in per_rank) for part in self.parts}

    def tenants(self) -> list[Tenant]:
        return [Tenant(self.role, part, True, self.counted.get(part)) for part in self.parts]

    def leave(self, parts: list[str], deadline_s: float) -> list[RankMoved]:
        return self._move("leave", parts, deadline_s)

    def come(self, parts: list[str], deadline_s: float) -> list[RankMoved]:
        return self._move("come", parts, deadline_s)

    def _move(self, method: str, parts: list[str], deadline_s: float) -> list[RankMoved]:
        per_rank = self._wait(method, [w.submit(method, parts) for w in self.workers], deadline_s)
        return [moved for rank in per_rank for moved in rank]

    def _wait(self, method: str, calls: list, timeout_s: float) -> list[Any]:
        return self.pool.wait(calls, f"{self.role}.{method}", timeout_s)
