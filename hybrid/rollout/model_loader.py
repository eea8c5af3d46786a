"""A loader of vLLM that leaves out tensors of a checkpoint that are no part of the model. vLLM's models refuse those that they do not know.

Importing this module registers the loader, in whichever process a worker lives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from typing import Any

import torch
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader, register_model_loader

FORMAT = "hybrid_safetensors"
"""The name of the loader in vLLM's options."""
LEFT_OUT = "left_out"


class PartialLoader(DefaultModelLoader):
    """Reads safetensors as vLLM does, without the tensors that its options name."""

    def __init__(self, load_config: LoadConfig):
        self.left_out = frozenset(load_config.model_loader_extra_config[LEFT_OUT])
        super().__init__(dataclasses.replace(load_config, load_format="safetensors", model_loader_extra_config={}))

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        found = super().get_all_weights(model_config, model)
        return ((name, tensor) for name, tensor in found if name not in self.left_out)


def load_options(left_out: Collection[str]) -> dict[str, Any]:
    """Options of vLLM that load safetensors without the tensors `left_out`."""
    if not left_out:
        return {"load_format": "safetensors"}
    return {"load_format": FORMAT, "model_loader_extra_config": {LEFT_OUT: sorted(left_out)}}


try:
    get_model_loader(LoadConfig(load_format=FORMAT, model_loader_extra_config={LEFT_OUT: []}))
except ValueError:  # vLLM warns where a loader is registered twice
    register_model_loader(FORMAT)(PartialLoader)
