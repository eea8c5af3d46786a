"""The tables of a report, from a run's timeline and plan. Bytes are those of one GPU, the fullest; shares are 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median_low

from hybrid.memory.tenants import PHASES
from hybrid.reports.read import Plan, Row, Run, Settings
from hybrid.reports.spans import Span, Timeline
from hybrid.reports.timeline import timeline
from hybrid.reports.transitions import TransitionLine, transition_lines

OUTSIDE_A_STEP = ("init", "evaluate", "checkpoint")


@dataclass(frozen=True)
class PhaseLine:
    """A phase at its fullest, and its time. `seconds` is the mean of one, `total_seconds` all of them, both without the way into it.

    `measured` is None where the ledger has no measure, `predicted` where there is no plan.
    """

    phase: str
    count: int
    seconds: float
    total_seconds: float
    share: float | None
    tenants: dict[str, int]
    counted: int
    overhead: int
    working: int
    measured: int | None
    predicted: int | None
    fullest_step: int

    @property
    def unattributed(self) -> int | None:
        return None if self.measured is None else self.measured - self.counted

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        if not self.measured or self.predicted is None:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class TenantLine:
    """A tenant's largest counted bytes, and what the plan said."""

    tenant: str
    counted: int | None
    predicted: int | None


@dataclass(frozen=True)
class ResidueLine:
    """What a role's process held beside its tenants, by step; `growth` in bytes per step (least squares), None for fewer than 3 steps."""

    role: str
    points: tuple[tuple[int, int], ...]
    growth: float | None


@dataclass(frozen=True)
class Summary:
    """Everything that a report shows."""

    name: str
    settings: Settings
    plan: Plan | None
    timeline: Timeline
    capacity: int | None
    steps: int
    step_seconds: float | None
    typical_step: int | None
    phases: tuple[PhaseLine, ...]
    between_seconds: float
    tenants: tuple[TenantLine, ...]
    transitions: tuple[TransitionLine, ...]
    residue: tuple[ResidueLine, ...]
    kv_cache_share: float | None
    failure: Row | None
    arrivals: bool
    """Peaks of a phase are its own: older ledgers took those of the way into it for the phase's."""
    unread: int = 0
    """Lines of the ledger that cannot be read, of `lines`."""
    lines: int = 0

    @property
    def seconds(self) -> float:
        return self.timeline.spans[-1].end if self.timeline.spans else 0.0

    @property
    def fullest(self) -> PhaseLine | None:
        return max((p for p in self.phases if p.measured), key=lambda p: p.measured, default=None)

    @property
    def policy(self) -> str | None:
        return self.plan.policy if self.plan else self.settings.policy

    @property
    def moving_seconds(self) -> float:
        """Of one step, the mean."""
        return sum(line.seconds_per_step for line in self.transitions)


def summarize(run: Run) -> Summary:
    """Tables of `run`."""
    line = timeline(run)
    whole = whole_steps(line.spans)
    step_seconds = mean(whole.values()) if whole else None
    steps = {step: [s for s in line.spans if s.step == step] for step in whole}
    return Summary(
        name=run.name,
        settings=run.settings,
        plan=run.plan,
        timeline=line,
        capacity=run.plan.capacity_bytes if run.plan else run.settings.capacity_bytes,
        steps=len(whole),
        step_seconds=step_seconds,
        typical_step=_typical(whole, steps),
        phases=_phase_lines(line.spans, run.plan, step_seconds, len(whole)),
        between_seconds=_per_step([s for spans in steps.values() for s in spans if s.kind == "between"], len(whole)),
        tenants=_tenant_lines(line.spans, run.plan),
        transitions=transition_lines(run, line, set(whole), step_seconds),
        residue=_residue_lines(line),
        kv_cache_share=_kv_share(run.rows),
        failure=line.failure,
        arrivals=all("arrival" in r for r in run.rows if r["kind"] == "phase" and r["phase"] != "init"),
        unread=run.unread,
        lines=run.lines,
    )


def whole_steps(spans: Sequence[Span]) -> dict[int, float]:
    """Seconds by step, for those that came to their end, without the final evaluation and export."""
    inside = [s for s in spans if s.step > 0 and s.phase not in OUTSIDE_A_STEP]
    last = max((s.step for s in spans), default=0)
    trained = {s.step for s in inside if s.kind == "phase" and s.phase == "sync"}
    done = {s.step for s in inside if s.step < last or s.step in trained}
    return {step: sum(s.seconds for s in inside if s.step == step) for step in sorted(done)}


def _typical(whole: dict[int, float], steps: dict[int, list[Span]]) -> int | None:
    """The step of median length; not the first, which warms up, nor one with an evaluation, where there are others."""
    plain = [n for n in whole if not any(s.phase in OUTSIDE_A_STEP for s in steps[n])] or list(whole)
    later = plain[1:] or plain
    if not later:
        return None
    middle = median_low(whole[n] for n in later)
    return next(n for n in later if whole[n] == middle)


def _phase_lines(
    spans: Sequence[Span], plan: Plan | None, step_seconds: float | None, steps: int
) -> tuple[PhaseLine, ...]:
    lines = []
    planned = [p.phase for p in plan.phases] if plan else []
    for name in PHASES:
        mine = [s for s in spans if s.kind == "phase" and s.phase == name]
        if not mine and name not in planned:
            continue
        predicted = plan.phase(name).peak_bytes if name in planned else None
        total = sum(s.seconds for s in mine)
        in_steps = sum(s.seconds for s in mine if s.step > 0)
        full = max(mine, key=lambda s: s.total, default=Span("phase", name, 0, 0, 0, {}))
        share = in_steps / steps / step_seconds if step_seconds and name not in OUTSIDE_A_STEP else None
        count = 1 if name == "init" else len(mine)
        lines.append(
            PhaseLine(
                phase=name,
                count=count if mine else 0,
                seconds=total / count if mine else 0.0,
                total_seconds=total,
                share=share,
                tenants=full.tenants,
                counted=full.counted,
                overhead=full.overhead,
                working=full.working,
                measured=max((s.measured for s in mine if s.measured is not None), default=None),
                predicted=predicted,
                fullest_step=full.step,
            )
        )
    return tuple(lines)


def _tenant_lines(spans: Sequence[Span], plan: Plan | None) -> tuple[TenantLine, ...]:
    counted: dict[str, int] = {}
    for span in spans:
        for tenant, size in span.tenants.items():
            counted[tenant] = max(size, counted.get(tenant, 0))
    predicted: dict[str, int] = {}
    for phase in plan.phases if plan else ():
        for tenant, size in phase.tenants.items():
            predicted[tenant] = max(size, predicted.get(tenant, 0))
    names = list(dict.fromkeys([*counted, *predicted]))
    return tuple(TenantLine(name, counted.get(name), predicted.get(name)) for name in names)


def _residue_lines(line: Timeline) -> tuple[ResidueLine, ...]:
    by_role: dict[str, dict[int, int]] = {}
    for rest in line.rests:
        by_role.setdefault(rest.role, {})[rest.step] = rest.bytes  # the step's last
    return tuple(ResidueLine(role, tuple(points.items()), _slope(points)) for role, points in by_role.items())


def _slope(points: dict[int, int]) -> float | None:
    """Least-squares growth per step, over the second half of the steps: the first ones fill caches."""
    late = list(points.items())[len(points) // 2 :]
    if len(late) < 3:
        return None
    x, y = mean(p[0] for p in late), mean(p[1] for p in late)
    return sum((a - x) * (b - y) for a, b in late) / sum((a - x) ** 2 for a, _ in late)


def _kv_share(rows: Sequence[Row]) -> float | None:
    shares = [peak["kv_cache_share"] for row in rows for peak in row.get("peaks", ()) if "kv_cache_share" in peak]
    return max(shares, default=None)


def _per_step(spans: Sequence[Span], steps: int) -> float:
    return sum(s.seconds for s in spans) / steps if steps else 0.0
