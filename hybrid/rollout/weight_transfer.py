"""The engine half of weight transfer through shared memory, for machines without CUDA IPC.

The trainer half (`sender.py`) writes buckets in safetensors format into anonymous shared memory; every worker of the engine maps its
node's copy and loads from it. Importing this module registers backend `shm` with vLLM, in whichever process a worker lives.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from hybrid.rollout import cpu_layers


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One bucket: its file on each node, by host name, and what it holds (checked by `Engine` before it is loaded)."""

    paths: dict[str, str] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class ShmWeightTransferEngine(WeightTransferEngine):
    """Loads buckets layer by layer: CPU linear layers pack their weights, so each layer is unpacked, loaded and packed again."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """No rendezvous."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        cpu_layers.prepare(self.model)

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        with safe_open(update_info.paths[socket.gethostname()], "pt") as bucket:
            self.model.load_weights([(name, bucket.get_tensor(name)) for name in update_info.names])
        cpu_layers.note_direct_copies(self.model)

    def finish_weight_update(self) -> None:
        silent = layers_without_weights(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in shares_loaded_weights(self.model, silent):
            # A head tied to the embeddings has a packed copy of its own on CPU, which vLLM's reload leaves stale.
            if hasattr(
                layer, "quant_method"
            ):  # a mixture of experts may share its router's bias with its experts, and packs nothing
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def layers_without_weights(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Layers that an open update has not given any of their weights; vLLM will put their old ones back."""
    silent = {}
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        waits = info.can_load() and info.load_numel == 0 and info.kernel_tensors is not None and info.kernel_tensors[0]
        if waits and not is_deferred_attention_layer(layer):
            silent[name] = layer
    return silent


def shares_loaded_weights(model: torch.nn.Module, silent: dict[str, torch.nn.Module]) -> list[torch.nn.Module]:
    """Those of the `silent` layers whose weights belong to another layer too, which was loaded. Asked after the update."""
    got_none = set(map(id, silent.values()))
    loaded = {id(p) for layer in model.modules() if id(layer) not in got_none for p in layer._parameters.values()}
    return [
        layer for layer in silent.values() if all(id(p) in loaded for p in layer._parameters.values() if p is not None)
    ]


if "shm" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("shm", ShmWeightTransferEngine)
