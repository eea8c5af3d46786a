"""Layers that vLLM 0.32 on CPU does not load a second time by itself, made ready for a layer-wise reload.

Three kinds: experts, whose packing vLLM does on the first load only; the latent attention's `kv_b_proj`, whose weight vLLM drops; and
layers of models that copy into parameters past the loaders that the reload watches.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer

DIRECT_COPIES = {"GptOssForCausalLM": ("sinks", "w13_weight", "w2_weight")}
"""By model class: parameters whose layers `load_weights` fills itself."""


def prepare(model: nn.Module) -> None:
    """Make the layers of `model` ready, after `initialize_layerwise_reload`."""
    direct = DIRECT_COPIES.get(type(model).__name__, ())
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
            layer.quant_method.moe_kernel = None  # the next load packs the experts as the first did
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            kept = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in info.restore_metadata[0].items()}
            parameters, buffers = info.kernel_tensors
            dropped = {
                name: nn.Parameter(t, requires_grad=False) for name, t in kept.items() if not parameters[name].numel()
            }
            info.kernel_tensors = (parameters | dropped, buffers)
        if any(name in layer._parameters for name in direct):
            materialize_layer(layer, info)
            for parameter in layer._parameters.values():
                parameter.data.fill_(torch.nan)


def note_direct_copies(model: nn.Module) -> None:
    """Tell the reload of the layers that `load_weights` has filled meanwhile: those without a NaN left."""
    direct = DIRECT_COPIES.get(type(model).__name__)
    if direct is None:
        return
    for layer in model.modules():
        info = get_layerwise_info(layer)
        is_open = info.can_load() and info.load_numel == 0 and any(name in layer._parameters for name in direct)
        if is_open and not any(p.isnan().any() for p in layer._parameters.values()):
            info.load_numel = 1  # some, and not all: `finalize_layerwise_reload` processes such layers
