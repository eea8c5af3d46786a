"""Residue that grows: what a process still holds after its tenants left, followed over the steps."""

from __future__ import annotations

from dataclasses import dataclass

POINTS = 5
"""Steps in a row, each with more than the one before, that make a trend."""


@dataclass(frozen=True)
class Growth:
    """What `role` `rank` holds after leaving for `phase` has grown by `grown_bytes` in `steps` steps, to `now_bytes`."""

    role: str
    rank: int
    node: str
    phase: str
    grown_bytes: int
    steps: int
    now_bytes: int

    @property
    def bytes_per_step(self) -> float:
        return self.grown_bytes / self.steps

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"{self.role} rank {self.rank} on node {self.node} holds {self.now_bytes / mib:.0f} MiB after leaving for {self.phase}, "
            f"{self.grown_bytes / mib:.0f} MiB more than {self.steps} steps ago ({self.bytes_per_step / mib:.1f} MiB a step, every step "
            "more): something is kept that should go."
        )


class ResidueTrend:
    """Measured bytes after leaving, by role, rank and phase: in a phase the same tenants are away each time, so that steps compare."""

    def __init__(self, slack: int):
        """`slack`: bytes by which a residue may grow before it is reported, and between two reports."""
        self.slack = slack
        self._rising: dict[tuple[str, int, str], list[tuple[int, int]]] = {}

    def add(self, step: int, role: str, rank: int, node: str, phase: str, after_bytes: int) -> Growth | None:
        """Note a residue. A `Growth` when it has risen in each of the last `POINTS` steps or more, by more than the slack."""
        rising = self._rising.setdefault((role, rank, phase), [])
        if rising and rising[-1][0] == step:
            rising.pop()
        if rising and after_bytes <= rising[-1][1]:
            rising.clear()
        rising.append((step, after_bytes))
        (first, low), (last, high) = rising[0], rising[-1]
        if len(rising) <= POINTS or high - low <= self.slack:
            return None
        del rising[:-1]  # From here on anew: the next report comes when as much again has been added.
        return Growth(role, rank, node, phase, high - low, last - first, high)
