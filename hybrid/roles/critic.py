"""The critic: values of states, trained beside the actor when advantages come from GAE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from hybrid.algorithms.losses import value_loss
from hybrid.roles.models import ModelOptions, load_critic
from hybrid.roles.objective import UpdateResult, ValueRow
from hybrid.roles.packing import Row, column, lengths_mask, to_rows
from hybrid.roles.reduction import Totals
from hybrid.roles.worker import ModelWorker
from hybrid.roles.zero import TrainedModel, ZeroOptions, load_partitioned


class CriticWorker(ModelWorker):
    """A language model's trunk with a scalar head."""

    def load(self, options: ModelOptions, zero: ZeroOptions) -> dict[str, int]:
        """Load the model under DeepSpeed and return the bytes of each part."""
        self.share_prompts = options.share_prompts
        critic = load_partitioned(zero.stage, options.dtype, lambda: load_critic(options))
        self.model = TrainedModel(critic, zero)
        return self.settle()

    def values(self, micros: Iterable[Sequence[Row]]) -> np.ndarray:
        """float32 values of the states before each response token of all rows, flat, in the order of `micros`."""
        return self.forward_rows(micros, self.model.forward)

    def train(
        self, micros: Iterable[Sequence[ValueRow]], clip: float | None, normalizer: float, learning_rate: float
    ) -> UpdateResult:
        """One optimizer step on the clipped value loss; `normalizer` counts the response tokens of the whole step."""
        totals = Totals()
        losses = [lambda model, rows=rows: self._loss(model, rows, clip, normalizer, totals) for rows in micros]

        def check() -> None:
            self.counted = self.count()
            totals.all_reduce()

        step = self.model.step(losses, learning_rate, check)
        metrics = {"loss/value": totals.sum("loss"), "grad_norm/critic": step.grad_norm}
        return UpdateResult(step.applied, metrics, self.counted)

    def _loss(self, model, rows: list[ValueRow], clip: float | None, normalizer: float, totals: Totals) -> torch.Tensor:
        batch = self.pack([r.row for r in rows])
        values_R = model(batch)
        if not rows:
            return values_R.sum() * 0.0
        width = max(batch.row_lengths)
        mask_BT = lengths_mask(batch.row_lengths, width, self.device)
        values_BT = to_rows(values_R, batch.row_lengths, width)
        old_BT, returns_BT = column(rows, "old_values", batch), column(rows, "returns", batch)
        loss = value_loss(values_BT, old_BT, returns_BT, mask_BT, clip, normalizer=normalizer)
        totals.add("loss", loss.detach()[None])
        return loss
