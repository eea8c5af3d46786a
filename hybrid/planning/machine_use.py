"""What processes take on a GPU and on a node whatever the model, from facts about the machine."""

from __future__ import annotations

from hybrid.config import RunConfig
from hybrid.planning.facts import MIB, MachineFacts
from hybrid.surroundings import OBJECT_STORE_BYTES

HOST_ROLE, HOST_ENGINE, HOST_DRIVER = 1300 * MIB, 1800 * MIB, 900 * MIB
"""Host memory of a process of a CUDA run and of the driver; stated, not measured."""
CUSTOM_ALL_REDUCE = 34 * MIB
"""Of vLLM's all-reduce on one GPU (custom_all_reduce.py): results between its two passes 8 MiB, inputs 16, addresses 8, and signals."""
RAY_BYTES = 1000 * MIB
"""Ray's own processes on a node (GCS, raylet, dashboard)."""


def overhead(cfg: RunConfig, machine: MachineFacts) -> dict[str, int]:
    """Bytes on one GPU in every phase. On CPU an engine that spans GPUs has a worker on each, and one process more."""
    roles, engine = len(cfg.roles), int(cfg.uses_engines)
    if cfg.cluster.device == "cuda":
        groups = (roles if cfg.world_size > 1 else 0) + (engine if cfg.rollout.tensor_parallel_size > 1 else 0)
        found = {
            "CUDA contexts": roles * machine.role.private + engine * machine.engine.private,
            "NCCL communicators": groups * machine.communicator,
        }
        if engine and cfg.rollout.tensor_parallel_size > 1 and cfg.rollout.custom_all_reduce:
            found["custom all-reduce"] = CUSTOM_ALL_REDUCE
        return {name: size for name, size in found.items() if size}
    tp = cfg.rollout.tensor_parallel_size
    engine_processes = engine * (1 if tp == 1 else 1 + 1 / tp)
    shared = max(machine.role.shared, machine.engine.shared if engine else 0)
    return {
        "role processes": roles * machine.role.private,
        "engine processes": int(engine_processes * machine.engine.private),
        "libraries": shared // cfg.cluster.gpus_per_node,
    }


def host_use(cfg: RunConfig, exported: int) -> dict[str, int]:
    """Host memory of a node besides tenants; on CPU the processes are the device's. `exported`: bytes of the model that is written."""
    found = {"Ray's object store": OBJECT_STORE_BYTES, "Ray": RAY_BYTES, "driver": HOST_DRIVER}
    if cfg.cluster.device == "cuda":
        gpus = cfg.cluster.gpus_per_node
        found["role processes"] = gpus * len(cfg.roles) * HOST_ROLE
        if cfg.uses_engines:
            found["engine processes"] = gpus * HOST_ENGINE
        if cfg.checkpoint.export:
            found["exported weights"] = exported
    return found
