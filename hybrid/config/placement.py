"""What lies on which GPU: derived from the config alone, before Ray is asked."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.config.run import RunConfig


@dataclass(frozen=True)
class Place:
    """One GPU of the pool and the processes on it."""

    rank: int
    """Of every role that has a process here."""
    node: int
    gpu: int
    """Place on the node; which GPU ids these are is Ray's to say."""
    roles: tuple[str, ...]
    engine: int | None
    """None when rollouts are replayed."""
    tp_rank: int

    @property
    def processes(self) -> int:
        """Processes that share this GPU."""
        return len(self.roles) + (self.engine is not None)


def placement(cfg: RunConfig) -> list[Place]:
    """The GPUs of a resolved `cfg` in rank order: each has a rank of every role, and a part of one engine; an engine takes
    `tensor_parallel_size` consecutive GPUs of a node."""
    gpus, tp = cfg.cluster.gpus_per_node, cfg.rollout.tensor_parallel_size
    return [
        Place(rank, rank // gpus, rank % gpus, cfg.roles, rank // tp if cfg.uses_engines else None, rank % tp)
        for rank in range(cfg.world_size)
    ]
