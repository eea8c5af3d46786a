"""Who trains on what: rows split over ranks and cut into micro-batches. Pure functions of lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.roles.packing import Row


@dataclass(frozen=True)
class Lengths:
    """One row's group, prompt tokens and response tokens."""

    group: int
    prompt: int
    response: int


Plan = list[list[list[int]]]
"""Row indices by rank, then micro-batch. Every rank has the same number of micro-batches; a short one is empty."""


def lengths_of(rows: Sequence[Row]) -> list[Lengths]:
    return [Lengths(row.group, len(row.prompt), len(row.response)) for row in rows]


def plan_micro_batches(rows: list[Lengths], ranks: int, token_budget: int, share_prompts: bool) -> Plan:
    """Split `rows` over `ranks` evenly by tokens, then into micro-batches of at most `token_budget` packed tokens.

    Rows of a group stay together where `share_prompts` (the prompt is then encoded once), unless the group alone exceeds the budget.
    A single row longer than the budget gets a micro-batch of its own. The result depends on lengths and order only.
    """
    units = sorted(_units(rows, token_budget, share_prompts), key=lambda unit: -unit.cost)
    loads = [0] * ranks
    of_rank: list[list[_Unit]] = [[] for _ in range(ranks)]
    for unit in units:
        rank = loads.index(min(loads))
        loads[rank] += unit.cost
        of_rank[rank].append(unit)
    micros = [_fill(heaviest_first, token_budget) for heaviest_first in of_rank]
    count = max(len(m) for m in micros)
    return [[sorted(i for unit in micro for i in unit.rows) for micro in _stretch(m, count)] for m in micros]


@dataclass
class _Unit:
    """Rows that stay together. `cost`: tokens fed; the last token of a response predicts nothing."""

    rows: list[int]
    cost: int


def _units(rows: list[Lengths], budget: int, share_prompts: bool) -> list[_Unit]:
    """Groups cut to the budget, or single rows."""
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group if share_prompts else index, []).append(index)
    units: list[_Unit] = []
    for members in groups.values():
        unit = None
        for index in members:
            fed = max(0, rows[index].response - 1)
            if unit is None or unit.cost + fed > budget:
                unit = _Unit([], rows[index].prompt)
                units.append(unit)
            unit.rows.append(index)
            unit.cost += fed
    return units


def _fill(heaviest_first: list[_Unit], budget: int) -> list[list[_Unit]]:
    """Micro-batches by first fit."""
    micros: list[list[_Unit]] = []
    loads: list[int] = []
    first = 0  # micro-batches before it have no room, even for the smallest unit
    for unit in heaviest_first:
        while first < len(loads) and loads[first] + heaviest_first[-1].cost > budget:
            first += 1
        slot = next((i for i in range(first, len(loads)) if loads[i] + unit.cost <= budget), None)
        if slot is None:
            micros.append([unit])
            loads.append(unit.cost)
        else:
            micros[slot].append(unit)
            loads[slot] += unit.cost
    return micros


def _stretch(micros: list[list[_Unit]], count: int) -> list[list[_Unit]]:
    """`micros` cut into exactly `count`: halve those with most units first, then add empty ones."""
    micros = list(micros)
    while len(micros) < count:
        widest = max(range(len(micros)), key=lambda i: len(micros[i]), default=None)
        if widest is None or len(micros[widest]) < 2:
            micros.append([])
            continue
        units = micros.pop(widest)
        micros[widest:widest] = [units[: len(units) // 2], units[len(units) // 2 :]]
    return micros
