"""From last hidden states to logits as the model itself does it: the head's matrix, and scales and soft caps around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput


def trunk_of(hf: nn.Module) -> nn.Module:
    """The causal language model `hf` without its head."""
    if hf.base_model is not hf:
        return hf.base_model
    return next(child for child in hf.children() if isinstance(child, PreTrainedModel))  # Llama 4 names it otherwise


def whole_head(hf: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from C x H last hidden states to C x V logits: the forward method of the causal language model `hf` without its trunk.

    So whatever it does to logits is done here (Granite divides them, HyperCLOVA X multiplies them, Gemma 2 caps them), with its
    gradient. The modules behind the trunk are called as modules, so their hooks run.
    """
    shell, trunk, found = copy.copy(hf), _Given(), trunk_of(hf)
    shell._modules = {name: trunk if module is found else module for name, module in hf._modules.items()}

    def head(hidden_CH: torch.Tensor) -> torch.Tensor:
        trunk.hidden_1CH = hidden_CH[None]
        ids = torch.zeros(1, len(hidden_CH), dtype=torch.long, device=hidden_CH.device)
        try:
            return shell.forward(input_ids=ids, use_cache=False)[0].squeeze(0)
        finally:
            trunk.hidden_1CH = None

    return head


class _Given(nn.Module):
    """Stands for the trunk: gives the hidden states that it is given."""

    hidden_1CH: torch.Tensor | None = None

    @property
    def decoder(self) -> _Given:
        """OPT calls what is inside its trunk."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        return _Output(last_hidden_state=self.hidden_1CH)


@dataclass
class _Output(ModelOutput):
    """`last_hidden_state`, and None for all else that a model may ask of its trunk."""

    last_hidden_state: torch.Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None
