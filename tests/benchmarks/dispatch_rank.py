"""The rank of `dispatch.py`: takes what every role takes, answers as much, and computes nothing. In a file of its own, for its processes
import it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybrid.roles.objective import Fed, UpdateResult
from hybrid.roles.packing import Row
from hybrid.roles.shards import flat


class StandIn:
    def __init__(self, **kwargs):
        """A `RoleGroup` says who the rank is; it is all the same here."""

    def ready(self) -> None:
        """Answers when everything is imported."""

    def logprobs(self, micros: Sequence[Sequence[Row]], *args) -> np.ndarray:
        return self.values(micros)

    def values(self, micros: Sequence[Sequence[Row]]) -> np.ndarray:
        return flat([torch.zeros(sum(len(row.response) for row in rows)) for rows in micros])

    def train(self, micros: Sequence[Sequence], *args) -> UpdateResult:
        return UpdateResult(True, {}, {}, Fed(sum(len(row.row.response) for rows in micros for row in rows)))
