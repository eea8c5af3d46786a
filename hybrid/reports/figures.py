"""A report's charts, from its summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid.reports.bands import OVERHEAD, ROLE_COLOURS, WORKING, Band, bands
from hybrid.reports.charts import Column, Ticks, band_chart, line_chart
from hybrid.reports.read import PlanPhase
from hybrid.reports.spans import Span
from hybrid.reports.summary import Summary
from hybrid.telemetry.summary import clock

OTHER_LINE = "#0072B2"
RUN_COLUMNS = 320
"""Columns of the whole run's chart: each shows the fullest moment of its time."""


@dataclass(frozen=True)
class Figure:
    title: str
    caption: str
    svg: str
    bands: tuple[Band, ...] = ()


def figures(summary: Summary) -> tuple[Figure, ...]:
    """Those that the ledger has the numbers for."""
    made = (_step(summary), _run(summary), _plan(summary), _residue(summary))
    return tuple(figure for figure in made if figure is not None)


def _step(s: Summary) -> Figure | None:
    spans = [span for span in s.timeline.spans if span.step == s.typical_step]
    if s.typical_step is None:
        return None
    columns = []
    for span in spans:
        label = f"{span.phase} {_short(span.seconds)}" if span.kind == "phase" else ""
        predicted = s.plan.phase(span.phase) if s.plan and span.kind == "phase" else None
        columns.append(
            Column(
                span.start,
                span.end,
                _bytes(span),
                label,
                shaded=span.kind == "move",
                measured=span.measured if span.kind == "phase" else None,
                predicted=predicted.peak_bytes if predicted else None,
            )
        )
    phases = [c.start for c in columns if c.label] + [columns[-1].end]
    seconds = columns[-1].end - columns[0].start
    title = f"One step: number {s.typical_step}, {_short(seconds)}"
    names = _names(s)
    order = ", ".join(f"{span.phase} ({_short(span.seconds)})" for span in spans if span.kind == "phase")
    svg = band_chart(
        columns,
        names,
        title=title,
        description=f"Memory of one GPU by tenant over step {s.typical_step}, through the phases {order}.",
        capacity=s.capacity,
        ticks=Ticks(title="time, to scale; shaded: tenants move", rules=tuple(phases)),
        prefix="step",
    )
    marks = "Heavy line: measured." + (" Dotted line: predicted." if s.plan else "")
    return Figure(title, f"The step of median length, on the fullest GPU. {marks}", svg, names)


def _run(s: Summary) -> Figure | None:
    spans = [span for span in s.timeline.spans if span.seconds > 0]
    if not spans:
        return None
    names = _names(s)
    title = f"The whole run: {s.steps} steps in {clock(s.seconds)}"
    starts: dict[int, float] = {}
    for span in spans:
        starts.setdefault(span.step, span.start)
    every = _round_number(len(starts) / 12)
    labelled = [
        (at, "start" if step == 0 else f"step {step}" if step == 1 else str(step))
        for step, at in starts.items()
        if step <= 1 or step % every == 0
    ]
    rules = tuple(starts.values()) if len(starts) <= 60 else tuple(at for at, _ in labelled)
    svg = band_chart(
        merged(spans, RUN_COLUMNS),
        names,
        title=title,
        description=f"Memory of one GPU by tenant over {s.steps} steps; each column is the fullest moment of its time.",
        capacity=s.capacity,
        ticks=Ticks(tuple(labelled), "time, to scale; a rule where a step begins", rules),
        prefix="run",
    )
    return Figure(title, "Each column shows the fullest moment of its time, so that no peak is lost.", svg, names)


def _plan(s: Summary) -> Figure | None:
    if s.plan is None:
        return None
    columns: list[Column] = []
    ticks: list[tuple[float, str]] = []
    measured = {p.phase: p for p in s.phases if p.measured is not None}
    for number, phase in enumerate(s.plan.phases):
        sides = [("plan", _planned(phase))]
        if phase.phase in measured:
            line = measured[phase.phase]
            sides.append(("run", line.tenants | {WORKING: line.working, OVERHEAD: line.overhead}))
        at = number + 0.08
        columns.append(Column(number, at, {}))
        width = 0.84 / len(sides)
        for name, sizes in sides:
            columns.append(Column(at, at + width - 0.02, sizes, name if measured else ""))
            columns.append(Column(at + width - 0.02, at + width, {}))
            at += width
        columns.append(Column(at, number + 1, {}))
        ticks.append((number + 0.5, phase.phase))
    names = bands([name for phase in s.plan.phases for name in phase.tenants] + [t.tenant for t in s.tenants])
    title = "Plan beside run, by phase" if measured else "Plan, by phase"
    svg = band_chart(
        columns,
        names,
        title=title,
        description="Predicted bytes of one GPU by tenant in each phase"
        + (", beside those of the run." if measured else "."),
        capacity=s.capacity,
        ticks=Ticks(tuple(ticks), "phases at their fullest moment"),
        prefix="plan",
    )
    return Figure(
        title,
        "Predicted before the run from the models' shapes."
        + (" Right of it the fullest moment of the run." if measured else ""),
        svg,
        names,
    )


def _residue(s: Summary) -> Figure | None:
    lines = [line for line in s.residue if len(line.points) >= 2]
    if not lines:
        return None
    series = [(line.role, ROLE_COLOURS.get(line.role, OTHER_LINE), line.points) for line in lines]
    title = "What processes hold beside their tenants"
    description = "Residue in bytes by step: " + "; ".join(
        f"{line.role} from {line.points[0][1]} to {line.points[-1][1]}" for line in lines
    )
    svg = line_chart(series, title=title, description=description, prefix="residue")
    return Figure(title, "Measured less counted, when tenants had just moved. A line that keeps rising is a leak.", svg)


def merged(spans: Sequence[Span], count: int) -> list[Column]:
    """`count` columns of equal time at most, each with the bytes of the fullest span in it; equal neighbours are one column."""
    start, end = spans[0].start, spans[-1].end
    width = (end - start) / count
    columns: list[Column] = []
    first = 0
    for number in range(count):
        low, high = start + number * width, start + (number + 1) * width
        while spans[first].end <= low and first + 1 < len(spans):
            first += 1
        last = first
        while last + 1 < len(spans) and spans[last + 1].start < high:
            last += 1
        sizes = _bytes(max(spans[first : last + 1], key=lambda span: span.total))
        if columns and columns[-1].bytes == sizes:
            columns[-1] = Column(columns[-1].start, high, sizes)
        else:
            columns.append(Column(low, high, sizes))
    return columns


def _names(s: Summary) -> tuple[Band, ...]:
    return bands(t.tenant for t in s.tenants if t.counted)


def _bytes(span: Span) -> dict[str, int]:
    return span.tenants | {OVERHEAD: span.overhead, WORKING: span.working}


def _planned(phase: PlanPhase) -> dict[str, int]:
    return phase.tenants | {WORKING: sum(phase.working.values()), OVERHEAD: sum(phase.overhead.values())}


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.95 else f"{seconds * 1000:.0f} ms"


def _round_number(least: float) -> int:
    """1, 2 or 5 times a power of ten, not below `least`."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if factor * size >= least:
                return factor * size
        size *= 10
