"""A plan as rows, for tables, JSON and the ledger. Bytes are per GPU unless a name says otherwise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from hybrid.planning.footprint import Move, moves, peak, tier_bytes, working_parts
from hybrid.planning.plan import Plan


@dataclass(frozen=True)
class PhaseRow:
    """A phase at its fullest. `cause`: what is happening then, and the largest tenant or working set."""

    phase: str
    tenants: dict[str, int]
    working: dict[str, int]
    overhead: dict[str, int]
    peak_bytes: int
    cause: str


@dataclass(frozen=True)
class TransitionRow:
    """What moves from one phase to another, `times` per step (less than 1: at the start or the end of the run)."""

    previous: str
    phase: str
    times: float
    moves: list[Move]

    @property
    def nbytes(self) -> int:
        return sum(move.nbytes for move in self.moves)

    @property
    def seconds(self) -> float:
        return sum(move.seconds for move in self.moves)


def phase_rows(plan: Plan) -> list[PhaseRow]:
    """Phases in the order of a step. One that moves nothing has the tenants of the one before it."""
    rows, at = [], "init"
    for use in plan.prediction.phases:
        at = use.phase if use.phase in plan.residency and _moves(plan, use.phase) else at
        moment = peak(plan.prediction, plan.residency, at)[1]
        there = moment.keys(plan.residency)
        tenants = {"/".join(t.key): t.device_bytes for t in plan.prediction.tenants if t.key in there}
        overhead = dict(plan.prediction.overhead)
        working = working_parts(plan.prediction, moment) if use.phase == at else dict(use.parts)
        parts = tenants | working
        largest = max(parts, key=parts.__getitem__, default="overhead")
        alone = moment.what in (use.phase, largest) or at != use.phase
        cause = largest if alone else f"{moment.what}: {largest}"
        rows.append(
            PhaseRow(use.phase, tenants, working, overhead, sum(parts.values()) + sum(overhead.values()), cause)
        )
    return rows


def _moves(plan: Plan, phase: str) -> bool:
    return any(phase in pair for pair in plan.walk)


def transition_rows(plan: Plan) -> list[TransitionRow]:
    """Transitions in the order of a run, those at which nothing moves too. What leaves after loading is one from init to init."""
    order = {use.phase: place for place, use in enumerate(plan.prediction.phases)}
    rows = [TransitionRow("init", "init", 1 / plan.cfg.train.steps, _between(plan, "start", "init"))]
    pairs = sorted(plan.walk, key=lambda pair: (order.get(pair[0], 99), order.get(pair[1], 99)))
    return rows + [TransitionRow(p, q, plan.walk[p, q], _between(plan, p, q)) for p, q in pairs]


def _between(plan: Plan, previous: str, phase: str) -> list[Move]:
    return moves(plan.prediction, plan.residency, previous, phase, plan.speeds)


def host_rows(plan: Plan) -> dict[str, int]:
    """Bytes per node outside the devices, by name: the host's own and the copies of what leaves."""
    stays = frozenset.intersection(*plan.residency.values())
    copies = {
        f"{'/'.join(t.key)} ({plan.cfg.memory.tier})": t.host_bytes * plan.prediction.gpus_per_node
        for t in plan.prediction.tenants
        if t.movable and t.key not in stays and t.host_bytes
    }
    return dict(plan.prediction.host) | copies


def never_moving(plan: Plan) -> list[str]:
    """Tenants that are there in every phase."""
    stays = frozenset.intersection(*plan.residency.values())
    return ["/".join(t.key) for t in plan.prediction.tenants if t.key in stays]


def optimizer_places(plan: Plan) -> dict[str, str]:
    """By role: whether optimizer state is "resident", "swapped", or on the "cpu"."""
    stays = frozenset.intersection(*plan.residency.values())
    keys = [t.key for t in plan.prediction.tenants if t.part == "optimizer"]
    places = {key[0]: "resident" if key in stays else "swapped" for key in keys}
    return places | {role: "cpu" for role in ("actor", "critic") if role in plan.cfg.roles and role not in places}


def ledger_row(plan: Plan) -> dict[str, Any]:
    """The `plan` row of the ledger, without time, step, phase and kind."""
    return {
        "capacity_bytes": plan.limits.device_bytes,
        "policy": plan.cfg.memory.policy,
        "phases": [
            {
                "phase": row.phase,
                "tenants": row.tenants,
                "working": row.working,
                "overhead": row.overhead,
                "peak_bytes": row.peak_bytes,
            }
            for row in phase_rows(plan)
        ],
        "transitions": [
            {
                "from": row.previous,
                "to": row.phase,
                "moves": [
                    {"tenant": "/".join(move.key), "kind": move.kind, "bytes": move.nbytes, "seconds": move.seconds}
                    for move in row.moves
                ],
            }
            for row in transition_rows(plan)
        ],
        "seconds_per_step": plan.seconds_per_step,
    }


def as_json(plan: Plan) -> dict[str, Any]:
    """All that `hybrid plan` prints: the ledger's row and the choices, the host's bytes, the verdict."""
    row = ledger_row(plan)
    for phase, data in zip(phase_rows(plan), row["phases"], strict=True):
        data |= {"cause": phase.cause, "headroom_bytes": plan.limits.device_bytes - phase.peak_bytes}
    for transition, data in zip(transition_rows(plan), row["transitions"], strict=True):
        data |= {"times_per_step": transition.times, "bytes": transition.nbytes, "seconds": transition.seconds}
    return {
        "fits": plan.fits,
        "shortages": [{"where": s.where, "bytes": s.nbytes, "per": s.per} for s in plan.shortages],
        "gpus_per_node": plan.cfg.cluster.gpus_per_node,
        "num_nodes": plan.cfg.cluster.num_nodes,
        "kv_cache": asdict(plan.prediction.kv_cache) if plan.prediction.kv_cache else None,
        "micro_batch_tokens": plan.cfg.train.micro_batch_tokens,
        "optimizer": optimizer_places(plan),
        "never_moving": never_moving(plan),
        "tier_bytes": plan.limits.tier_bytes,
        "tier_bytes_used": tier_bytes(plan.prediction, plan.residency),
        "host_bytes_per_node": host_rows(plan),
        **row,
    }
