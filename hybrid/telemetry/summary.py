"""The closing table of a run."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

FIRST_AND_LAST = 5
"""Steps over which reward at the start and at the end is averaged."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass
class SummaryData:
    """What the closing table shows; what is None or empty is left out."""

    title: str
    seconds: float
    """Wall time of the run, from its start."""
    rewards: list[float] = field(default_factory=list)
    """Mean reward of every step."""
    accuracy_start: float | None = None
    accuracy_end: float | None = None
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, and of "transitions", over the whole run."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """Peak by role, of its process that held most."""
    written: dict[str, Path] = field(default_factory=dict)
    """Where things are, e.g. {"run folder": ..., "metrics": ..., "model": ...}."""
    next_commands: list[tuple[str, str]] = field(default_factory=list)
    """(command, what for)."""


def summary_parts(data: SummaryData, width: int) -> list[RenderableType]:
    """What to print, top to bottom, for a console of `width` columns. Paths and commands are never cut or wrapped."""
    title = Text.assemble((data.title, "bold"), f"  {count_of(len(data.rewards), 'step')} in {clock(data.seconds)}")
    tables = [t for t in (_learning(data), _time(data), _memory(data)) if t is not None]
    side_by_side = Table.grid(padding=(0, 3))
    side_by_side.add_row(*tables[1:])
    parts: list[RenderableType] = [Text(), title, Text()]
    if width >= 80 and len(tables) == 3:
        parts += [tables[0], Text(), side_by_side]
    else:
        parts += [part for table in tables for part in (table, Text())][:-1]
    if data.written:
        label = max(map(len, data.written))
        parts += [Text(), Text("written", style="bold")]
        parts += [Text(f"  {name:{label}}  {shown_path(path)}") for name, path in data.written.items()]
    if data.next_commands:
        parts += [Text(), Text("next", style="bold")]
        parts += [_command(command, why) for command, why in data.next_commands]
    return parts


def first_and_last(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean reward of the first five steps and of the last five; fewer in short runs, never a step in both but for a run of one."""
    count = _averaged(rewards)
    return sum(rewards[:count]) / count, sum(rewards[-count:]) / count


def clock(seconds: float) -> str:
    """`42 s`, `3:07` or `1:03:07`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def human_bytes(count: float) -> str:
    """Three figures in binary units: `1.75 GiB`."""
    power = min(len(UNITS) - 1, int(math.log(max(count, 1), 1024)))
    value = count / 1024**power
    digits = 0 if power == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {UNITS[power]}"


def count_of(number: int, what: str) -> str:
    """`1 engine`, `2 engines`."""
    return f"{number} {what}" + ("s" if number != 1 else "")


def shown_path(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    relative = os.path.relpath(path)
    absolute = str(Path(path).absolute())
    return relative if len(relative) < len(absolute) else absolute


def _table(*columns: str) -> Table:
    """First column of words, the others of figures."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position == 0 else "right", no_wrap=True)
    return table


def _learning(data: SummaryData) -> Table:
    table = _table("", "start", "end", "change")
    if data.rewards:
        count = _averaged(data.rewards)
        label = "reward" if count == 1 else f"reward (mean of {count} steps)"
        table.add_row(label, *_start_end_change(*first_and_last(data.rewards)))
    if (data.accuracy_start, data.accuracy_end) != (None, None):
        table.add_row("held-out accuracy", *_start_end_change(data.accuracy_start, data.accuracy_end))
    return table


def _averaged(rewards: Sequence[float]) -> int:
    return max(1, min(FIRST_AND_LAST, len(rewards) // 2))


def _start_end_change(start: float | None, end: float | None) -> tuple[str, str, Text]:
    shown = tuple("-" if value is None else f"{value:.3f}" for value in (start, end))
    return *shown, Text("-") if "-" in shown else _change(start, end)


def _change(start: float, end: float) -> Text:
    return Text(f"{end - start:+.3f}", style="green" if end > start else "red" if end < start else "")


def _time(data: SummaryData) -> Table | None:
    if not data.phase_seconds:
        return None
    table = _table("phase", "time", "share")
    known = sum(data.phase_seconds.values())
    rows = {**data.phase_seconds, "other": max(0.0, data.seconds - known)}
    rows = {name: seconds for name, seconds in rows.items() if round(seconds) > 0}
    whole = sum(rows.values())
    for name, seconds in rows.items():
        table.add_row(name, clock(seconds), f"{seconds / whole:.0%}")
    return table


def _memory(data: SummaryData) -> Table | None:
    if not data.peak_bytes:
        return None
    table = _table("role", "peak memory of a process")
    for role, peak in data.peak_bytes.items():
        table.add_row(role, human_bytes(peak))
    return table


def _command(command: str, why: str) -> Text:
    return Text.assemble("  ", (command, "cyan"), "\n" if why else "", (f"      {why}" if why else "", "dim"))
