"""A report's tables as text: one form for HTML and Markdown."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.reports.summary import Summary
from hybrid.telemetry.summary import human_bytes

NONE = "–"


@dataclass(frozen=True)
class Head:
    """A column: `words` are set left, figures right; `long` may wrap."""

    name: str
    words: bool = False
    long: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    intro: str
    columns: tuple[Head, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(s: Summary) -> tuple[Table, ...]:
    """Those that the ledger has the numbers for."""
    made = [predicted_and_measured(s)]
    if s.timeline.spans:
        made += [counted_and_measured(s), tenants(s), transitions(s), times(s), residue(s)]
    elif s.plan:
        made += [tenants(s), planned_moves(s)]
    return tuple(made)


def predicted_and_measured(s: Summary) -> Table:
    """Per phase, with the error."""
    if s.plan is None:
        return Table(
            "Predicted and measured", "No plan recorded: this ledger has no prediction to compare with.", (), ()
        )
    rows = [(p.phase, _bytes(p.predicted), _bytes(p.measured), _signed(p.error)) for p in s.phases]
    intro = "The fullest moment of each phase on one GPU. Error: predicted over measured, less 1; negative: the plan was too low."
    return Table("Predicted and measured", intro, _heads("phase", "predicted", "measured", "error"), tuple(rows))


def counted_and_measured(s: Summary) -> Table:
    """Per phase, with the unattributed rest."""
    rows = [
        (p.phase, _bytes(p.counted), _bytes(p.overhead), _bytes(p.working), _bytes(p.measured), _bytes(p.unattributed))
        for p in s.phases
        if p.count
    ]
    heads = _heads("phase", "counted tenants", "processes at rest", "work of the phase", "measured", "unattributed")
    intro = "The fullest moment of each phase. Unattributed is measured less counted: processes at rest and the work of the phase."
    return Table("Counted and measured", intro, heads, tuple(rows))


def tenants(s: Summary) -> Table:
    """Each tenant's largest size."""
    intro = "The largest that each tenant was counted at" + (", and what the plan said." if s.plan else ".")
    if s.plan is None:
        rows = [(t.tenant, _bytes(t.counted)) for t in s.tenants]
        return Table("Tenants", intro, _heads("tenant", "counted"), tuple(rows))
    rows = [
        (
            t.tenant,
            _bytes(t.predicted),
            _bytes(t.counted),
            _signed(t.predicted / t.counted - 1 if t.predicted is not None and t.counted else None),
        )
        for t in s.tenants
    ]
    return Table("Tenants", intro, _heads("tenant", "predicted", "counted", "error"), tuple(rows))


def transitions(s: Summary) -> Table:
    """What moved between which phases, how fast, and what it cost."""
    intro = (
        "Ways into a phase on which something moved; means of all times. Copied: to or from the slow tier; the rest is freed or rebuilt. "
        "GB/s: copied over the wall time of all ranks, checks included."
    )
    if not s.transitions:
        return Table("Transitions", "Nothing moved.", (), ())
    heads = [Head("from → into", words=True), Head("out", words=True, long=True), Head("in", words=True, long=True)]
    heads += [Head(name) for name in ("times", "copied", "seconds", "GB/s", "share of step")]
    if s.plan:
        heads.append(Head("seconds by plan"))
    rows = []
    for t in s.transitions:
        row = [
            f"{t.previous} → {t.phase}",
            _listed(t.out),
            _listed(t.into),
            str(t.count),
            _bytes(t.copied),
            f"{t.seconds:.2f}",
            NONE if t.rate is None else f"{t.rate / 1e9:.2f}",
            _share(t.share),
        ]
        if s.plan:
            row.append(NONE if t.predicted_seconds is None else f"{t.predicted_seconds:.2f}")
        rows.append(tuple(row))
    return Table("Transitions", intro, tuple(heads), tuple(rows))


def planned_moves(s: Summary) -> Table:
    """Moves of a plan without a run."""
    rows = [
        (
            f"{t.previous} → {t.phase}",
            m.tenant,
            "out" if m.kind == "leave" else "in",
            _bytes(m.bytes),
            f"{m.seconds:.2f}",
        )
        for t in s.plan.transitions
        for m in t.moves
    ]
    intro = f"By plan, moving takes {s.plan.seconds_per_step:.1f} s of a step." if rows else "Nothing moves."
    heads = (
        Head("from → into", words=True),
        Head("tenant", words=True),
        Head("way", words=True),
        Head("bytes"),
        Head("seconds"),
    )
    return Table("Transitions", intro, heads, tuple(rows))


def times(s: Summary) -> Table:
    """Seconds by phase."""
    rows = [
        (p.phase, str(p.count), f"{p.seconds:.2f}", f"{p.total_seconds:.1f}", _share(p.share))
        for p in s.phases
        if p.count
    ]
    moving = sum(t.seconds * t.count for t in s.transitions)
    share = s.moving_seconds / s.step_seconds if s.step_seconds else None
    rows.append(("transitions", str(sum(t.count for t in s.transitions)), NONE, f"{moving:.1f}", _share(share)))
    if s.step_seconds:
        rows.append(("between phases", NONE, NONE, NONE, _share(s.between_seconds / s.step_seconds)))
    step = f" A step takes {s.step_seconds:.2f} s on average." if s.step_seconds else " No step came to its end."
    heads = _heads("phase", "times", "seconds each", "seconds in all", "share of step")
    return Table("Time", f"Shares are those of a whole step.{step}", heads, tuple(rows))


def residue(s: Summary) -> Table:
    """What processes keep, at the start and at the end."""
    if not s.residue:
        return Table(
            "Residue", "Nothing moved and no process was measured at rest, so there is no residue to follow.", (), ()
        )
    rows = []
    for line in s.residue:
        (first, low), (last, high) = line.points[0], line.points[-1]
        growth = NONE if line.growth is None else f"{line.growth / 2**20:+.2f} MiB"
        rows.append((line.role, f"{first}", _bytes(low), f"{last}", _bytes(high), growth))
    heads = _heads("role", "first step", "held then", "last step", "held then", "growth per step")
    intro = (
        "What a process holds beside its tenants just after they moved; growth is that of the second half of the steps."
    )
    return Table("Residue", intro, heads, tuple(rows))


def _heads(*names: str) -> tuple[Head, ...]:
    """First column of words, the others of figures."""
    return tuple(Head(name, words=number == 0) for number, name in enumerate(names))


def _bytes(size: int | None) -> str:
    return NONE if size is None else human_bytes(size)


def _share(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}"


def _signed(share: float | None) -> str:
    return NONE if share is None else f"{share:+.1%}"


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items() if size) or NONE
