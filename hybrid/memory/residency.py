"""What stays on the device in which phase: the words that the plan writes and the scheduler carries out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hybrid.memory.tenants import NEEDS, PHASES, Key

Residency = Mapping[str, frozenset[Key]]
"""Tenants on the device in each phase. `init`: what stays when its role has started. A phase that is not named moves nothing."""


def swap_all(tenants: Iterable[Key], movable: Iterable[Key]) -> Residency:
    """What a phase does not need leaves: of `tenants`, those that it needs and those that cannot move."""
    tenants, fixed = frozenset(tenants), frozenset(tenants) - frozenset(movable)
    needed = {phase: tenants.intersection(NEEDS[phase]) for phase in PHASES}
    return {phase: keys | fixed for phase, keys in needed.items() if keys or phase == "init"}


def all_resident(tenants: Iterable[Key]) -> Residency:
    """Nothing leaves."""
    return dict.fromkeys(PHASES, frozenset(tenants))
