"""Decides what is resident in which phase, and is the only one who moves memory.

Entering a phase: what must leave leaves, role by role; when every rank has answered, measured memory must have fallen; then what must
come comes. Knows no Ray: it drives movers (see `tenants.Mover`), each of which speaks for all ranks of one role.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from hybrid.errors import MemoryScheduleError, WorkerDied
from hybrid.memory.ledger import Ledger
from hybrid.memory.residency import Residency
from hybrid.memory.tenants import (
    ARRIVAL_ORDER,
    FOLLOWS,
    LEAVES_WITH,
    NEEDS,
    REBUILT_IN,
    Key,
    Mover,
    RankMoved,
    RankPeak,
    Tenant,
)
from hybrid.memory.trend import ResidueTrend

ABORT_TIMEOUT_S = 10.0

_CAUSES = {
    "cpu": "a second reference to the same memory outside the storages it lists, garbage made meanwhile, or swap files in memory",
    "cuda": "a second reference to the same memory outside the storages it lists, a block that another stream still holds, weights "
    "exported to another process, or large blocks cut up by small tensors",
}


class MemoryScheduler:
    """State machine over phases. `resident` is the set of (role, part) on the device now, `phase` the phase entered last.

    `residency` says what is there in which phase; a phase that it does not name keeps what it needs, and one that needs nothing moves
    nothing. `residue_slack` in bytes. `peaks` asks all processes for their highest memory since they were last asked; called when a
    phase begins after a move, and when it ends. Before the latter, `tidy` lets them give back what the phase left in caches. `warn` is
    told of residue that grows from step to step. `span` is entered around every phase's work and every move, by name.
    """

    def __init__(
        self,
        residents: Mapping[str, Mover],
        *,
        residency: Residency,
        ledger: Ledger,
        device: str = "cpu",
        residue_tolerance: float = 0.10,
        residue_slack: int = 64 * 2**20,
        barrier_timeout_s: float = 300,
        peaks: Callable[[], Sequence[RankPeak]] = tuple,
        tidy: Callable[[], object] = lambda: None,
        warn: Callable[[str], None] = print,
        span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ):
        self.residency = residency
        self.ledger = ledger
        self.device = device
        self.residue_tolerance = residue_tolerance
        self.residue_slack = residue_slack
        self.barrier_timeout_s = barrier_timeout_s
        self.peaks = peaks
        self.tidy = tidy
        self.warn = warn
        self.span = span
        self.trend = ResidueTrend(residue_slack)
        self.phase = "init"
        self.resident: set[Key] = set()
        self.in_doubt: set[Key] = set()
        self._movers: dict[str, Mover] = {}
        self._tenants: dict[Key, Tenant] = {}
        for role, mover in residents.items():
            self._register(role, mover)

    def adopt(self, role: str, mover: Mover) -> None:
        """Take over `role`, which has just started, in phase init; what does not stay in init leaves at once, for the next to load.

        Raises `MemoryScheduleError` after init, and as `enter` when leaving fails.
        """
        if self.phase != "init":
            raise MemoryScheduleError(f"{role} starts in phase {self.phase}: roles start in phase init only.")
        self._register(role, mover)
        leaving = {key for key in self._leaving(self.residency["init"]) if key[0] == role}
        if leaving:
            with self._failing("init"):
                start = time.perf_counter()
                self._move("leave", leaving, "init")
                self.ledger.transition("init", "init", time.perf_counter() - start, 0.0)

    def enter(self, phase: str) -> None:
        """Make resident what the residency says for `phase`, and nothing else that can move.

        Raises `MemoryScheduleError` when `phase` may not follow the present one, when it would wake weights that only a sync can fill,
        when memory did not fall after a part left, or when an earlier move failed half-way; `DeadlineExceeded` or `WorkerDied` from
        the movers when a rank does not answer within `barrier_timeout_s`.
        """
        self._refuse_illegal(phase)
        needed = {key for key in NEEDS[phase] if key in self._tenants}
        wanted = self.residency.get(phase, needed or self.resident)
        leaving = self._leaving(wanted | needed)
        coming = self._coming(phase, needed, wanted)
        self._refuse_empty(phase, coming)
        with self._failing(phase):
            start = time.perf_counter()
            self._move("leave", leaving, phase)
            middle = time.perf_counter()
            self._move("come", coming, phase)
            self.ledger.transition(self.phase, phase, middle - start, time.perf_counter() - middle)
        self.phase = phase

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        """`enter(phase)`, then time the body and record peaks. When the body raises, the engines are put to sleep (`abort`)."""
        before = self.resident
        self.enter(phase)
        with self._failing(phase):
            arrival = self.peaks() if self.resident != before else ()  # What just left is no peak of this phase.
            start = time.perf_counter()
            with self.span(phase):
                yield
            seconds = time.perf_counter() - start
            self.tidy()
            self.ledger.phase(phase, seconds, self.peaks(), arrival)

    def abort(self) -> None:
        """Bring the engines into a known state, asleep, as well as that goes: never raises. What stays in every phase stays here."""
        self.phase = "failed"
        stays = frozenset.intersection(*self.residency.values())
        there = self.resident | self.in_doubt
        awake = {key for key in there - stays if key[0] == "rollout" and self._tenants[key].movable}
        if not awake:
            return
        try:
            self._movers["rollout"].leave(self._parts(awake), min(ABORT_TIMEOUT_S, self.barrier_timeout_s))
        except Exception as error:
            self.in_doubt |= awake
            self.ledger.failed("failed", error)
            return
        self.resident -= awake
        self.in_doubt -= awake

    def _register(self, role: str, mover: Mover) -> None:
        if role not in ARRIVAL_ORDER:
            raise MemoryScheduleError(f"Unknown role {role}: roles are {', '.join(ARRIVAL_ORDER)}.")
        self._movers[role] = mover
        for tenant in mover.tenants():
            self._tenants[tenant.key] = tenant
            self.resident.add(tenant.key)
            self.ledger.tenant(tenant)

    def _leaving(self, wanted: Set[Key]) -> set[Key]:
        return {key for key in self.resident - wanted if self._tenants[key].movable}

    def _coming(self, phase: str, needed: set[Key], wanted: Set[Key]) -> set[Key]:
        """What is needed, and of what else is wanted, what can come: on the schedule's own way that is all."""
        coming = {key for key in needed | (wanted & self._tenants.keys()) if key not in self.resident}
        lost = {key for key in coming - needed if REBUILT_IN.get(key, phase) != phase}
        alone = {other for key, other in LEAVES_WITH.items() if key not in (self.resident | coming) - lost}
        return coming - lost - (alone - needed)

    def _refuse_illegal(self, phase: str) -> None:
        allowed = FOLLOWS[self.phase]
        if phase not in allowed:
            raise MemoryScheduleError(
                f"Phase {phase} may not follow {self.phase}; after {self.phase} come: {', '.join(allowed)}."
            )
        if self.in_doubt:
            names = ", ".join(sorted("/".join(key) for key in self.in_doubt))
            raise MemoryScheduleError(
                f"Phase {phase} cannot be entered: a move of {names} failed half-way. Start the run again."
            )

    def _refuse_empty(self, phase: str, coming: set[Key]) -> None:
        for key in coming:
            if REBUILT_IN.get(key, phase) != phase:
                raise MemoryScheduleError(
                    f"Phase {phase} after {self.phase} would wake {'/'.join(key)}, which lost its contents when it left: "
                    f"enter {REBUILT_IN[key]} first, which fills it."
                )

    def _move(self, kind: Literal["leave", "come"], keys: set[Key], phase: str) -> None:
        """Move `keys` role by role, every call ending when all ranks have answered; after leaving, check that memory fell."""
        deadline = time.monotonic() + self.barrier_timeout_s
        order = ARRIVAL_ORDER if kind == "come" else ARRIVAL_ORDER[::-1]
        moved: dict[str, Sequence[RankMoved]] = {}
        for role in order:
            mine = {key for key in keys if key[0] == role}
            if not mine:
                continue
            self.in_doubt |= mine
            call = self._movers[role].leave if kind == "leave" else self._movers[role].come
            parts = self._parts(mine)
            with self.span(f"{kind} {role}/{'+'.join(parts)}"):
                moved[role] = call(parts, max(0.0, deadline - time.monotonic()))
            self.in_doubt -= mine
            self.resident = self.resident - mine if kind == "leave" else self.resident | mine
            self.ledger.moves(kind, phase, role, moved[role])
        if kind == "leave":
            for role, rows in moved.items():
                self._check_residue(role, rows)
                self._follow_residue(role, phase, rows)

    def _parts(self, keys: set[Key]) -> list[str]:
        """Parts in the order in which the role named them."""
        return [key[1] for key in self._tenants if key in keys]

    def _check_residue(self, role: str, rows: Sequence[RankMoved]) -> None:
        for rank in sorted({row.rank for row in rows}):
            mine = [row for row in rows if row.rank == rank]
            counted = sum(row.counted_bytes for row in mine)
            fell = mine[0].before_bytes - mine[-1].after_bytes
            if fell >= counted * (1 - self.residue_tolerance) - self.residue_slack:
                continue
            parts = ", ".join(f"{row.part} ({_mib(row.counted_bytes)})" for row in mine)
            raise MemoryScheduleError(
                f"{role} rank {rank} on node {mine[0].node}: {parts} left, {_mib(counted)} counted, but the process fell by only "
                f"{_mib(fell)} (from {_mib(mine[0].before_bytes)} to {_mib(mine[-1].after_bytes)}). Likely causes: {_CAUSES[self.device]}. "
                f"Allowed: memory.residue_tolerance={self.residue_tolerance:g} of the counted bytes and memory.residue_slack="
                f"{_mib(self.residue_slack)}."
            )

    def _follow_residue(self, role: str, phase: str, rows: Sequence[RankMoved]) -> None:
        last = {row.rank: row for row in rows}
        for rank, row in last.items() if self.ledger.step else ():
            growth = self.trend.add(self.ledger.step, role, rank, row.node, phase, row.after_bytes)
            if growth is not None:
                self.ledger.growth(growth)
                self.warn(str(growth))

    @contextmanager
    def _failing(self, phase: str) -> Iterator[None]:
        try:
            yield
        except WorkerDied as error:  # The run is over: nobody is there to be brought into a known state.
            self.phase = "failed"
            self.ledger.failed(phase, error)
            raise
        except Exception as error:
            self.ledger.failed(phase, error)
            self.abort()
            raise


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"
