"""On CPU: what glibc's heap holds beside what is allocated in it, while a role trains and between phases."""

from __future__ import annotations

from dataclasses import replace

from hybrid.config import RunConfig
from hybrid.planning.facts import MIB
from hybrid.planning.prediction import PhaseUse

FREE_SHARE, FREE = 0.6, 60 * MIB
"""While a role trains: what the heap holds free beside the working set, as a share of it, and what kernels keep. Measured with two ranks
and models of 10 to 90 M parameters (tests/benchmarks/plan_vs_measured.py, then with other models): 0.3 to 1.1, 50 to 80 MiB. ZeRO-3,
which gathers and drops parameters all the while, leaves more: once the working set, and its gathered parameters twice."""
KEPT_SHARE = 0.85
"""Of the fullest moment of a role's phases, what stays in a heap that is kept: 0.7 to 1.1 with the settings of plan_vs_measured.py, whose
processes then held at their fullest 5 % less to 12 % more than planned. Blocks over 32 MiB do not stay."""
PHASES = {
    "actor": ("forward", "train_actor"),
    "critic": ("forward", "train_critic"),
    "reference": ("forward",),
    "reward": ("score",),
}


def on_heap(use: PhaseUse) -> PhaseUse:
    """`use` with what the heap holds free while the phase trains."""
    if not use.phase.startswith("train_"):
        return use
    gathered = use.parts.get("gathered parameters")
    free = use.working_bytes + 2 * gathered if gathered else int(FREE_SHARE * use.working_bytes) + FREE
    return replace(use, parts=use.parts | {"free in the heap": free})


def with_kept_heaps(phases: list[PhaseUse], cfg: RunConfig) -> list[PhaseUse]:
    """`phases`, each with what roles keep in their heaps from other phases (`memory.keep_heap`). A phase works in its own roles' heaps."""
    working = {use.phase: use.working_bytes for use in phases}
    kept = {role: int(KEPT_SHARE * max(working.get(phase, 0) for phase in PHASES[role])) for role in cfg.roles}
    return [_keeping(use, kept) for use in phases]


def _keeping(use: PhaseUse, kept: dict[str, int]) -> PhaseUse:
    if use.phase == "init":
        return use
    own = [size for role, size in kept.items() if use.phase in PHASES[role]]
    reused = min([use.working_bytes, *own]) if own else 0  # roles of a phase work one after another
    rest = sum(kept.values()) - reused
    return replace(use, parts=use.parts | {"kept in the heap": rest}) if rest else use
