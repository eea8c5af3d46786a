"""Optimizer state that lives in host memory, stepped by the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from hybrid.config import RunConfig
from hybrid.planning.prediction import Prediction

HOST_COPIES = 2
"""Host bytes per byte of masters and moments: DeepSpeed keeps this rank's gradients and new weights beside them. Counted on two ranks,
stages 1 to 3: 1.5 to 1.9. They are pinned at their own size (`environment.PINNED_CACHED_MIB`), not rounded up to a power of two."""


def with_host_optimizers(prediction: Prediction, cfg: RunConfig) -> Prediction:
    """`prediction` of a config, with the optimizers that are on the CPU moved from the device to the host."""
    tenants, host = [], dict(prediction.host)
    for tenant in prediction.tenants:
        if tenant.part == "optimizer" and getattr(cfg, tenant.role).optimizer == "cpu":
            host[f"{tenant.role}/optimizer on the CPU"] = HOST_COPIES * prediction.gpus_per_node * tenant.device_bytes
        else:
            tenants.append(tenant)
    return replace(prediction, tenants=tuple(tenants), host=host)


def offloading(cfg: RunConfig) -> Iterator[RunConfig]:
    """`cfg` with optimizers that may move to the CPU moved: the fewest first."""
    trained = [role for role in ("actor", "critic") if role in cfg.roles]
    free = [role for role in trained if f"{role}.optimizer" in cfg.autos and getattr(cfg, role).zero_stage > 0]
    if cfg.cluster.device == "cpu":
        return
    for count in range(1, len(free) + 1):
        for roles in combinations(free, count):
            update = {role: getattr(cfg, role).model_copy(update={"optimizer": "cpu"}) for role in roles}
            yield cfg.model_copy(update=update)
