"""What moving cost: a line per pair of phases between which something moved."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid.reports.read import Row, Run
from hybrid.reports.spans import Timeline


@dataclass(frozen=True)
class TransitionLine:
    """From `previous` into `phase`. Bytes of one move of the fullest GPU's ranks: `out` and `into` counted by tenant, `copied` what went
    to or from the slow tier. `seconds` is the mean wall time of all ranks, with checks. `share` is that of a step, of whole steps only.
    """

    previous: str
    phase: str
    count: int
    out: dict[str, int]
    into: dict[str, int]
    copied: int
    seconds: float
    seconds_per_step: float
    share: float | None
    highest: int | None
    predicted_seconds: float | None

    @property
    def rate(self) -> float | None:
        """Bytes per second of what was copied; None where nothing was."""
        return self.copied / self.seconds if self.copied and self.seconds else None


@dataclass
class _Found:
    count: int = 0
    seconds: float = 0.0
    in_steps: float = 0.0
    copied: int = 0
    out: dict[str, int] = field(default_factory=dict)
    into: dict[str, int] = field(default_factory=dict)


def transition_lines(
    run: Run, line: Timeline, whole: set[int], step_seconds: float | None
) -> tuple[TransitionLine, ...]:
    """In the order in which they first happened. `whole` are the steps that came to their end."""
    found: dict[tuple[str, str], _Found] = {}
    moves: list[Row] = []
    for row in run.rows:
        if row["kind"] in ("leave", "come"):
            moves.append(row)
        elif row["kind"] == "transition":
            if moves:
                _add(found.setdefault((row["previous"], row["phase"]), _Found()), row, moves, line, whole)
            moves = []
    planned = {(t.previous, t.phase): t.seconds for t in run.plan.transitions} if run.plan else {}
    lines = []
    for (previous, phase), f in found.items():
        peaks = [s.measured for s in line.spans if s.kind == "move" and s.phase == phase and s.measured]
        per_step = f.in_steps / len(whole) if whole else 0.0
        lines.append(
            TransitionLine(
                previous=previous,
                phase=phase,
                count=f.count,
                out=f.out,
                into=f.into,
                copied=f.copied // f.count,
                seconds=f.seconds / f.count,
                seconds_per_step=per_step,
                share=per_step / step_seconds if step_seconds and f.in_steps else None,
                highest=max(peaks, default=None),
                predicted_seconds=planned.get((previous, phase)),
            )
        )
    return tuple(lines)


def _add(found: _Found, row: Row, moves: list[Row], line: Timeline, whole: set[int]) -> None:
    seconds = row["leave_seconds"] + row["come_seconds"]
    found.count += 1
    found.seconds += seconds
    if row["step"] in whole and row["phase"] not in ("evaluate", "checkpoint"):
        found.in_steps += seconds
    for move in moves:
        if not line.place.holds(move):
            continue
        side = found.out if move["kind"] == "leave" else found.into
        name = f"{move['role']}/{move['part']}"
        side[name] = max(line.place.share(move["role"], move["counted_bytes"]), side.get(name, 0))
        found.copied += line.place.share(move["role"], move["copied_bytes"])
