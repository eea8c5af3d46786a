"""Which models keep packed segments apart: all that one token learns of another must come through the packed attention.

`config.architectures` refuses the known ones by their config. Here the modules themselves are looked at, so that models with code of their
own are refused too.
"""

from __future__ import annotations

from torch import nn

from hybrid.config.architectures import ANOTHER, STATE
from hybrid.errors import NotExact

STATES = ("A_log", "dt_bias", "time_decay")
"""Parameters of state-space and other recurrent layers."""


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list with most parameters; their number, since ZeRO-3 leaves them no elements."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return max(lists, key=lambda m: len(list(m.parameters())))


def check_apart(model: nn.Module) -> None:
    """Raise `NotExact` when a decoder layer of `model` holds a recurrence or a convolution along the sequence."""
    for number, layer in enumerate(decoder_layers(model)):
        for module in layer.modules():
            inside = [name for name, child in module.named_children() if isinstance(child, nn.Conv1d)]
            inside += [name for name in STATES if isinstance(getattr(module, name, None), nn.Parameter)]
            if inside:
                kind = f"layer {number} ({type(module).__name__}, with {inside[0]})"
                raise NotExact(f"{kind} of {model.config.model_type} would {STATE}. {ANOTHER}")


def check_ran(model: nn.Module, ran: set[int]) -> None:
    """Raise `NotExact` when a decoder layer of `model` has no module in `ran`, the ids of those whose attention ran packed."""
    for number, layer in enumerate(decoder_layers(model)):
        if not any(id(module) in ran for module in layer.modules()):
            parts = ", ".join(type(child).__name__ for child in layer.children())
            raise NotExact(
                f"layer {number} ({parts}) of {model.config.model_type} computes attention past transformers' interface, so packed rows "
                f"cannot be kept apart. {ANOTHER}"
            )
