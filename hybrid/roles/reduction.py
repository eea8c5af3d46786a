"""Sums over micro-batches and ranks, from which step metrics are made."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Totals:
    """Named sums, counts and maxima on this rank; `all_reduce` makes them those of the whole step.

    Every rank must have added the same names, or have none of a name that others have: names are united first.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        self.maxima: dict[str, float] = {}

    def add(self, name: str, values: torch.Tensor, weight: float = 1.0) -> None:
        """Add `values` (any shape), each counted `weight` times."""
        if values.numel() == 0:
            return
        values = values.double()
        self.sums[name] = self.sums.get(name, 0.0) + float(values.sum()) * weight
        self.counts[name] = self.counts.get(name, 0.0) + values.numel() * weight
        self.maxima[name] = max(self.maxima.get(name, -float("inf")), float(values.max()))

    def all_reduce(self) -> None:
        """Unite over the ranks of the process group, through its CPU backend."""
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self.sums, self.counts, self.maxima))
        self.sums, self.counts = (
            {n: sum(r[k].get(n, 0.0) for r in everyone) for n in _names(everyone, k)} for k in (0, 1)
        )
        self.maxima = {n: max(r[2].get(n, -float("inf")) for r in everyone) for n in _names(everyone, 2)}

    def sum(self, name: str) -> float | None:
        return self.sums.get(name)

    def mean(self, name: str) -> float | None:
        return self.sums[name] / self.counts[name] if self.counts.get(name) else None

    def maximum(self, name: str) -> float | None:
        return self.maxima.get(name)


def _names(everyone: list, which: int) -> list[str]:
    return sorted({name for rank in everyone for name in rank[which]})
