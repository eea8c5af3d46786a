"""What torch's caching allocator holds on CUDA beside what is allocated in it: rounding, and free pieces between used ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hybrid.environment import FIXED
from hybrid.memory.tenants import NEEDS
from hybrid.planning.facts import MachineFacts
from hybrid.planning.prediction import LOADING, PhaseUse, TenantSize

WORKER = {
    "generate": "rollout",
    "evaluate": "rollout",
    "score": "reward",
    "train_actor": "actor",
    "train_critic": "critic",
    "sync": "actor",  # and an engine, which has fixed segments too
    "checkpoint": "actor",
}
"""By phase the role in whose process its working set lies. In `init` each loads by itself; `forward` is several roles' phase."""


def with_rounding(
    phases: Iterable[PhaseUse],
    forward: Mapping[str, Mapping[str, int]],
    tenants: Iterable[TenantSize],
    machine: MachineFacts,
) -> list[PhaseUse]:
    """`phases`, each with what allocators hold besides: a share of the working set and of the tenants that the phase needs, in the process
    that works. `forward`: the parts of that phase by role. An engine's tenants lie in pools of their own, as large as they are."""
    own = {t.key: t.device_bytes for t in tenants if t.role != "rollout"}

    def of(phase: str, role: str, working: int) -> int:
        there = sum(own.get(key, 0) for key in NEEDS[phase] if key[0] == role)
        return int(_share(role, machine) * (working + there))

    def rounded(use: PhaseUse) -> PhaseUse:
        if use.phase == "init":
            sizes = {name: int((1 + _share(name.removeprefix(LOADING), machine)) * n) for name, n in use.parts.items()}
            return replace(use, parts=sizes)
        works = {role: sum(parts.values()) for role, parts in forward.items()}
        works = works if use.phase == "forward" else {WORKER[use.phase]: use.working_bytes}
        extra = sum(of(use.phase, role, size) for role, size in works.items()) if use.parts else 0
        return replace(use, parts=use.parts | {"allocator rounding": extra}) if extra else use

    return [rounded(use) for use in phases]


def _share(role: str, machine: MachineFacts) -> float:
    return machine.allocator_share if role in FIXED else machine.expandable_share
