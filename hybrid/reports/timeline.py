"""One GPU over time, put together from a ledger: which tenants it held from when to when, and what was measured beside them.

Bytes of tenants are counted. A phase's measured bytes are the highest of each process on the GPU, added up; on CUDA what the device had in
use. What lies between is split in two: `working`, what the processes added to their rest during the phase, and `overhead`, their rest
without tenants (interpreters, libraries, CUDA contexts).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybrid.memory.tenants import NEEDS
from hybrid.reports.read import Row, Run
from hybrid.reports.spans import ENGINE, INIT, Place, Rest, Span, Timeline, attribute, of_role

TRAINING = ("train_critic", "train_actor")
"""Phases in which tenants grow: what their processes hold at the end cannot be told apart."""


def timeline(run: Run) -> Timeline:
    """The fullest GPU's timeline."""
    place = _fullest(run.rows)
    builder = _Builder(
        place, _start(run.rows), on_cuda=run.settings.device == "cuda", keeps_heap=bool(run.settings.keep_heap)
    )
    for row in run.rows:
        builder.add(row)
    attribute(builder.spans)
    return Timeline(place, tuple(builder.spans), tuple(builder.rests), builder.failure)


def _start(rows: Iterable[Row]) -> float:
    """When the run began: its first phase takes longer than the ledger knows of it."""
    began = (row["time"] - (row["seconds"] if row["kind"] == "phase" else 0) for row in rows)
    return min(began, default=0.0)


def _fullest(rows: Sequence[Row]) -> Place:
    """The GPU whose processes held most in a phase. Roles have a rank per GPU; engines may have fewer, and span several."""
    ranks: dict[str, int] = {}
    for row in rows:
        for holder in (row, *row.get("peaks", ())):
            if "rank" in holder:
                ranks[holder["role"]] = max(ranks.get(holder["role"], 0), holder["rank"] + 1)
    gpus = max(ranks.values(), default=1)
    places = [Place(gpu, gpus, gpus // ranks.get(ENGINE, gpus)) for gpu in range(gpus)]
    phases = [row["peaks"] for row in rows if row["kind"] == "phase"]
    return max(places, key=lambda place: max((sum(_peaks(p, place).values()) for p in phases), default=0))


def _peaks(peaks: Iterable[Row], place: Place) -> dict[str, int]:
    """Highest bytes of each role's process on the GPU. Pages that processes share are counted once where the ledger knows them."""
    return {
        peak["role"]: place.share(peak["role"], peak["peak_bytes"] - peak.get("shared_bytes", 0))
        for peak in peaks
        if place.holds(peak)
    }


class _Builder:
    """Reads rows in order. `resident` is what is on the GPU now, `cursor` until when spans exist."""

    def __init__(self, place: Place, start: float, on_cuda: bool, keeps_heap: bool):
        self.place, self.start, self.on_cuda, self.keeps_heap = place, start, on_cuda, keeps_heap
        self.has_trained = False
        self.spans: list[Span] = []
        self.rests: list[Rest] = []
        self.failure: Row | None = None
        self.resident: dict[str, int] = {}
        self.rest: dict[str, int] = {}
        self.leaving: dict[str, int] = {}
        self.phase, self.cursor = INIT, 0.0
        self.moves: list[Row] = []

    def add(self, row: Row) -> None:
        add = getattr(self, f"_add_{row['kind']}", None)
        if add is not None:
            add(row, row["time"] - self.start)

    def _add_tenant(self, row: Row, time: float) -> None:
        self._until(time, "between", row)
        self.resident[f"{row['role']}/{row['part']}"] = self.place.share(row["role"], row["counted_bytes"] or 0)

    def _add_leave(self, row: Row, time: float) -> None:
        if self.place.holds(row):
            self.moves.append(row)

    _add_come = _add_leave

    def _add_transition(self, row: Row, time: float) -> None:
        self._until(time - row["leave_seconds"] - row["come_seconds"], "between", row)
        self._apply("leave", row)
        self._until(time - row["come_seconds"], "move", row, before_leaving=True)
        self._apply("come", row)
        self._until(time, "move", row)
        self.moves = []
        self.phase = row["phase"]

    def _add_phase(self, row: Row, time: float) -> None:
        self.has_trained |= row["phase"] in TRAINING
        if row["phase"] != INIT:
            self._until(time - row["seconds"], "between", row)
        if row.get("arrival"):
            self._arrive(row)
        self._until(time, "phase", row)
        if row["phase"] == INIT:
            for span in self.spans:
                span.kind = "phase"
                self._measure(span, row["peaks"])
        else:
            if not row.get("arrival") and row["phase"] not in TRAINING:
                self._rest_at(row["step"], row["peaks"])
                self.spans[-1].rests = dict(self.rest)
            self._measure(self.spans[-1], row["peaks"])

    def _arrive(self, row: Row) -> None:
        """What was measured when the phase's tenants were there and its work had not begun."""
        self._rest_at(row["step"], row["arrival"])
        for span in reversed(self.spans):
            if span.kind == "phase":
                break
            self._measure(span, row["arrival"])

    def _rest_at(self, step: int, processes: Iterable[Row]) -> None:
        for process in processes:
            if self.place.holds(process) and "held_bytes" in process:
                self._note_rest(step, process["role"], process["held_bytes"])

    def _measure(self, span: Span, peaks: Iterable[Row]) -> None:
        span.peaks = _peaks(peaks, self.place)
        device_wide = span.peaks.get(ENGINE) if self.on_cuda else None
        span.measured = device_wide or sum(span.peaks.values())

    def _add_counted(self, row: Row, time: float) -> None:
        """What training counted at its height; gradients are gone again when the phase has ended."""
        for part, size in row["parts"].items():
            tenant = f"{row['role']}/{part}"
            self._grew(row["phase"], tenant, size)
            if part != "gradients" and tenant in self.resident:
                self.resident[tenant] = size

    def _add_failed(self, row: Row, time: float) -> None:
        self._apply("leave", row)
        self._apply("come", row)
        self._until(time, "move" if self.moves else "phase", row)
        self.moves = []
        self.failure = self.failure or row

    def _apply(self, kind: str, row: Row) -> None:
        self.leaving = dict(self.resident)
        moves = [move for move in self.moves if move["kind"] == kind]
        for move in moves:
            tenant, size = f"{move['role']}/{move['part']}", self.place.share(move["role"], move["counted_bytes"])
            if kind == "leave":
                self._grew(self.phase, tenant, size)
                self.leaving[tenant] = max(size, self.leaving.get(tenant, 0))
                self.resident.pop(tenant, None)
            else:
                self.resident[tenant] = size
        for role in {move["role"] for move in moves}:
            last = [move for move in moves if move["role"] == role][-1]
            self._note_rest(row["step"], role, last["after_bytes"])

    def _note_rest(self, step: int, role: str, held: int) -> None:
        if self.on_cuda and role == ENGINE:
            return  # an engine's measure is the whole device there
        rest = max(0, self.place.share(role, held) - of_role(self.resident, role))
        if not (self.keeps_heap and self.has_trained):  # a heap that is kept is work of the phases, not rest
            self.rest[role] = rest
        self.rests.append(Rest(step, role, rest))

    def _grew(self, phase: str, tenant: str, size: int) -> None:
        """`tenant` turned out to be larger than when it came: it grew in the phase that works with it."""
        role, part = tenant.split("/", 1)
        for span in reversed(self.spans):
            if tenant not in span.tenants or (span.kind == "move" and span.phase != phase):
                return
            span.tenants[tenant] = max(size, span.tenants[tenant])
            if span.kind == "phase" and (role, part) in NEEDS.get(span.phase, ()):
                return

    def _until(self, time: float, kind: str, row: Row, before_leaving: bool = False) -> None:
        if time <= self.cursor:
            return
        phase = self.phase if kind == "between" else row["phase"]
        tenants = dict(self.leaving if before_leaving else self.resident)
        self.spans.append(Span(kind, phase, row["step"], self.cursor, time, tenants, rests=dict(self.rest)))
        self.cursor = time
