"""What processes take on a GPU and on a node whatever the model, from facts about the machine."""

from __future__ import annotations

from hybrid.config import RunConfig
from hybrid.planning.facts import MIB, MachineFacts
from hybrid.surroundings import OBJECT_STORE_BYTES

HOST_ROLE, HOST_ENGINE, HOST_DRIVER = 1300 * MIB, 1800 * MIB, 900 * MIB
"""Host memory of a process of a CUDA run and of the driver; stated, not measured."""
ENGINE_COMMUNICATORS = 2
"""Published are 1.35 GiB with two H100s, twice a communicator's."""
CUSTOM_ALL_REDUCE = 34 * MIB
"""Of vLLM's all-reduce on one GPU (custom_all_reduce.py): results between its two passes 8 MiB, inputs 16, addresses 8, and signals."""
RAY_BYTES = 1000 * MIB
"""Ray's own processes on a node (GCS, raylet, dashboard)."""


def overhead(cfg: RunConfig, machine: MachineFacts) -> dict[str, int]:
    """Bytes on one GPU in every phase. On CPU an engine that spans GPUs has a worker on each, and one process more."""
    roles, engine = len(cfg.roles), int(cfg.uses_engines)
    if cfg.cluster.device == "cuda":
        found = {
            "CUDA contexts": roles * machine.role.private + engine * machine.engine.private,
            "NCCL communicators": communicators(cfg) * machine.communicator,
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


def communicators(cfg: RunConfig) -> int:
    """NCCL communicators on a GPU. A process group has one from its first collective on CUDA tensors on.

    DeepSpeed 0.19.8 gives a role two groups of all its ranks and uses one: ZeRO-3 the first, which gathers its weights and reduces its
    gradients, the other stages a copy of it. What runs forward only exchanges nothing below ZeRO-3. Ours go over gloo. An engine over
    several GPUs has torch's and vLLM's own.
    """
    engine = ENGINE_COMMUNICATORS if cfg.uses_engines and cfg.rollout.tensor_parallel_size > 1 else 0
    frozen = [role for role in cfg.roles if role in ("reference", "reward")]
    exchanging = [role for role in cfg.roles if role not in frozen or getattr(getattr(cfg, role), "zero_stage", 0) == 3]
    return engine + (len(exchanging) if cfg.world_size > 1 else 0)


def host_use(cfg: RunConfig, exported: dict[str, int]) -> dict[str, int]:
    """Host memory of a node besides tenants; on CPU the processes are the device's. `exported`: bytes while the model is written."""
    found = {"Ray's object store": OBJECT_STORE_BYTES, "Ray": RAY_BYTES, "driver": HOST_DRIVER}
    if cfg.cluster.device == "cuda":
        gpus = cfg.cluster.gpus_per_node
        found["role processes"] = gpus * len(cfg.roles) * HOST_ROLE
        if cfg.uses_engines:
            found["engine processes"] = gpus * HOST_ENGINE
        if cfg.checkpoint.export:
            found |= exported
    return found
