"""A model in training without dropout, layer drop and router noise, whatever its code and config say of them.

With them a policy's log-probs in training are not those that it sampled with: ratios part from 1 before anything has been learned.
"""

from __future__ import annotations

import copy

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

NAME = "drop"
"""In the names of all rates that layers apply by themselves: dropout, hidden_dropout, resid_pdrop, layerdrop, ..."""


class QuietInTraining(nn.Module):
    """A module whose `train()` leaves out what only training does at random, unless `dropout` is True."""

    dropout = False

    def train(self, mode: bool = True) -> QuietInTraining:
        """All modules stay in eval mode but those that recompute their activations: in eval mode they would not."""
        super().train(mode)
        if mode and not self.dropout:
            for module in self.modules():
                module.training = _recomputes(module)
                if module.training:
                    _zero_rates(module)
        return self


def _recomputes(module: nn.Module) -> bool:
    return getattr(module, "gradient_checkpointing", False) is True


def _zero_rates(module: nn.Module) -> None:
    """Layers that recompute are in training mode, so rates that they apply themselves become 0. The model's own config, which is exported,
    keeps its values."""
    for name in _rates(module):
        setattr(module, name, 0.0)
    if isinstance(module, GradientCheckpointingLayer) and hasattr(module, "config") and _rates(module.config):
        module.config = copy.copy(module.config)
        for name in _rates(module.config):
            setattr(module.config, name, 0.0)


def _rates(of: object) -> list[str]:
    return [name for name, value in vars(of).items() if NAME in name and isinstance(value, float) and value > 0]
