"""The rank of `dispatch.py`: takes what every role takes, answers as much, and computes nothing. In a file of its own, for its processes
import it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from hybrid.roles.objective import Fed, UpdateResult
from hybrid.roles.packing import Row
from hybrid.roles.shards import flat


class StandIn:
    def __init__(self, **kwargs):
        """A `RoleGroup` says who the rank is; it is all the same here."""
        self.made = torch.ones(0)

    def ready(self) -> None:
        """Answers when everything is imported."""

    def logprobs(self, micros: Iterable[Sequence[Row]], *args) -> np.ndarray:
        return self.values(micros)

    def values(self, micros: Iterable[Sequence[Row]]) -> np.ndarray:
        return flat([self.numbers(sum(len(row.response) for row in rows)) for rows in micros])

    def train(self, micros: Iterable[Sequence], *args) -> UpdateResult:
        return UpdateResult(True, {}, {}, Fed(sum(len(row.row.response) for rows in micros for row in rows)))

    def echo(self, sent: np.ndarray, answer_bytes: int) -> np.ndarray:
        """What Ray alone needs: it has put `sent` and got it here, and puts the answer for the controller to get."""
        return self.numbers(answer_bytes // 4).numpy()

    def numbers(self, count: int) -> torch.Tensor:
        """What a model would have computed; made once, as making them is no dispatch."""
        if len(self.made) < count:
            self.made = torch.ones(count)
        return self.made[:count]
