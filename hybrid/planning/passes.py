"""Traces of the passes that roles make, by config: which model, which rows, which attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hybrid.data.batches import Lengths
from hybrid.errors import ConfigError
from hybrid.planning.flash import FLASH
from hybrid.planning.shapes import build, model_errors, read_config
from hybrid.planning.working_set import Trace, trace
from hybrid.roles import attention
from hybrid.roles.packing import Row, pack

TYPES_OF_LAYERS = ("layer_types", "mlp_layer_types")
"""Keys of configs that hold an entry for each layer."""
FIRST_DENSE = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")
"""Keys of configs that say how many layers come before the first with experts."""


@lru_cache(maxsize=64)
def packed_pass(
    path: str,
    kind: str,
    rows: tuple[Lengths, ...],
    *,
    dtype: torch.dtype,
    implementation: str,
    checkpointing: bool,
    backward: bool,
    device: str,
    trust_remote_code: bool,
    dropout: bool = False,
    fp32_gradients: bool = False,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_gradient: bool = False,
) -> Trace:
    """One micro-batch of `rows` through the "policy" or "critic" that `path`'s config describes, as `roles.models` runs it.

    `implementation` is model.attention: sdpa and varlen, whose groups share their prompt, or flash_attention_2. The rest is the policy's.
    """
    config = read_config(path, trust_remote_code)
    shared = implementation in attention.NAMES
    name = attention.NAMES.get(implementation, FLASH)

    def make(layers: int) -> nn.Module:
        model = build(with_layers(config, layers), kind, dtype, name, trust_remote_code, dropout)
        if checkpointing:
            trunk = model.hf if kind == "policy" else model.trunk
            if not trunk.supports_gradient_checkpointing:
                why = f"{type(trunk).__name__} of {path} cannot recompute its activations"
                raise ConfigError(
                    f"model.gradient_checkpointing: true is invalid: {why}. Set it to false, or name another model."
                )
            trunk.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if fp32_gradients:
            for p in model.parameters():
                p.grad_dtype = torch.float32
        return model.train(backward)

    def run(model: nn.Module) -> torch.Tensor:
        batch = pack([Row(row.group, [0] * row.prompt, [0] * row.response) for row in rows], shared)
        if kind != "policy":
            return model(batch)
        logprobs, entropies = model(batch, temperature, with_entropy, entropy_gradient)
        return logprobs + entropies if with_entropy and entropy_gradient else logprobs

    with model_errors(path), _grouped_product(dtype), attention.planned_for(device):
        return trace(make, config.get_text_config().num_hidden_layers, run, backward, device)


@lru_cache(maxsize=16)
def padded_pass(path: str, rows: int, width: int, *, dtype: torch.dtype, device: str, trust_remote_code: bool) -> Trace:
    """`rows` x `width` tokens through a reward model, forward only. Masks are of no effect on the memory of one that needs none."""
    config = read_config(path, trust_remote_code)
    config.pad_token_id = config.pad_token_id or 0

    def run(model: nn.Module) -> torch.Tensor:
        ids = torch.zeros(rows, width, dtype=torch.long)
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits

    def make(layers: int) -> nn.Module:
        return build(with_layers(config, layers), "reward", dtype, None, trust_remote_code).eval()

    with model_errors(path), _grouped_product(dtype):
        return trace(make, config.get_text_config().num_hidden_layers, run, False, device)


def with_layers(config: Any, layers: int) -> Any:
    """`config` with so many layers; of a model that begins with some dense ones before its experts, layers with experts."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    if layers == text.num_hidden_layers:
        return changed
    text.num_hidden_layers = layers
    for key in TYPES_OF_LAYERS:
        if getattr(text, key, None):
            setattr(text, key, getattr(text, key)[-layers:])
    for key in FIRST_DENSE:
        if getattr(text, key, None):
            setattr(text, key, 0)
    return changed


class _Grouped(torch.autograd.Function):
    """The memory that the product of experts with their tokens keeps and allocates, without computing."""

    @staticmethod
    def forward(ctx, rows, weights):
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(rows.shape[0], weights.shape[2])

    @staticmethod
    def backward(ctx, _gradient):
        rows, weights = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(weights)


@contextmanager
def _grouped_product(dtype: torch.dtype) -> Iterator[None]:
    """torch multiplies experts in fp32 on CPU, but knows the shapes of that product in bf16 only."""
    if dtype == torch.bfloat16:
        yield
        return
    with patch.object(torch.nn.functional, "grouped_mm", lambda rows, weights, *, offs: _Grouped.apply(rows, weights)):
        yield
