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
    units = _units(rows, token_budget, share_prompts)
    heaviest_first = sorted(units, key=lambda unit: -_cost(rows, unit, share_prompts))
    loads = [0] * ranks
    of_rank: list[list[list[int]]] = [[] for _ in range(ranks)]
    for unit in heaviest_first:
        rank = loads.index(min(loads))
        loads[rank] += _cost(rows, unit, share_prompts)
        of_rank[rank].append(unit)
    micros = [_fill(rows, units, token_budget, share_prompts) for units in of_rank]
    count = max(len(m) for m in micros)
    return [[sorted(i for unit in micro for i in unit) for micro in _stretch(m, count)] for m in micros]


def _cost(rows: list[Lengths], unit: list[int], share_prompts: bool) -> int:
    """Tokens fed: the last token of a response predicts nothing."""
    responses = sum(max(0, rows[i].response - 1) for i in unit)
    return responses + rows[unit[0]].prompt * (1 if share_prompts else len(unit))


def _units(rows: list[Lengths], budget: int, share_prompts: bool) -> list[list[int]]:
    """Rows that stay together: groups cut to the budget, or single rows."""
    if not share_prompts:
        return [[i] for i in range(len(rows))]
    groups: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group, []).append(index)
    units: list[list[int]] = []
    for members in groups.values():
        unit: list[int] = []
        for index in members:
            if unit and _cost(rows, [*unit, index], True) > budget:
                units.append(unit)
                unit = []
            unit.append(index)
        units.append(unit)
    return units


def _fill(rows: list[Lengths], units: list[list[int]], budget: int, share_prompts: bool) -> list[list[list[int]]]:
    """First fit, heaviest unit first."""
    micros: list[list[list[int]]] = []
    loads: list[int] = []
    for unit in units:
        cost = _cost(rows, unit, share_prompts)
        slot = next((i for i, load in enumerate(loads) if load + cost <= budget), None)
        if slot is None:
            micros.append([unit])
            loads.append(cost)
        else:
            micros[slot].append(unit)
            loads[slot] += cost
    return micros


def _stretch(micros: list[list[list[int]]], count: int) -> list[list[list[int]]]:
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
