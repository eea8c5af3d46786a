"""Methods added to every vLLM worker, on CPU and CUDA, called through `collective_rpc`.

Names carry the prefix `hybrid_` because vLLM refuses an extension that shadows a method of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from vllm.config import set_current_vllm_config
from vllm.device_allocator import get_mem_allocator_instance
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.utils.torch_utils import set_random_seed

from hybrid.memory.probe import release_free_memory
from hybrid.rollout.residency import held_bytes, peak_bytes
from hybrid.rollout.weight_transfer import layers_without_weights, shares_loaded_weights

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


class WorkerExtension:
    """Mixed into vLLM's worker class; `self` has `model_runner` and `weight_transfer_engine`."""

    def hybrid_counted_bytes(self) -> dict[str, int]:
        """Bytes of the storages of each part in this worker."""
        kv_cache = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.model_runner.kv_caches}
        return {"weights": _weight_bytes(self.model_runner.model), "kv_cache": sum(kv_cache.values())}

    def hybrid_held_bytes(self) -> int:
        """Bytes of the GPU that this worker holds (CUDA); its context and what libraries allocate by themselves are not among them."""
        sleeper = get_mem_allocator_instance()
        pools = [pool for pools in sleeper.allocator_and_pools.values() for pool, _ in pools]
        segments = [segment for pool in pools for segment in pool.snapshot()]
        return held_bytes(torch.cuda.memory_reserved(), segments, sleeper.pointer_to_data.values())

    def hybrid_take_peak(self) -> tuple[int, int]:
        """Highest bytes of the GPU that this worker held since this was last asked, and what it holds now (CUDA)."""
        held = self.hybrid_held_bytes()
        peak = peak_bytes(held, torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        return peak, held

    def hybrid_release_free_memory(self) -> None:
        """Hand free memory of this worker back, so that what is measured next is in use."""
        release_free_memory(self.device.type)

    def hybrid_seed(self, seed: int) -> None:
        """Seed the sampler's generator; ranks of a tensor-parallel group must be given the same seed."""
        set_random_seed(seed)

    def hybrid_finish_weight_update(self) -> None:
        """`finish_weight_update`, but a layer that got no weights is an error, where vLLM only logs "Failed to load weights".

        Layers without parameters (rotary tables) and those whose parameters another layer got (tied heads) are in order.
        """
        model = self.weight_transfer_engine.model
        silent = layers_without_weights(model)
        with _no_reload_log():
            self.finish_weight_update()
        if self.device.type == "cuda":
            release_free_memory("cuda", collect=False)  # copies of buckets, which the next phase's tenants need
        tied = shares_loaded_weights(model, silent)
        failed = [name for name, layer in silent.items() if layer not in tied]
        if failed:
            raise RuntimeError(f"{len(failed)} layers got no weights and keep the old ones: {', '.join(failed[:5])}")

    def hybrid_takes(self, names: list[str], shapes: list[list[int]]) -> list[str]:
        """Return those of the weights `names` that the model loads. Call it in an open update, which breaks where there are any.

        vLLM's loaders know which tensors of a checkpoint they leave out. Each is given zeros under the name; where a layer counts them, it
        takes them.
        """
        model = self.weight_transfer_engine.model
        taken = []
        with set_current_vllm_config(self.vllm_config):
            for name, shape in zip(names, shapes, strict=True):
                before = _loaded_elements(model)
                with suppress(Exception):  # no such layer: vLLM raises whatever its loaders raise
                    model.load_weights([(name, torch.zeros(shape))])
                if _loaded_elements(model) != before:
                    taken.append(name)
        return taken

    def hybrid_abort_weight_update(self) -> None:
        """Put the old tensors back into the layers of a broken session, so that a new one starts from nothing."""
        engine = self.weight_transfer_engine
        for layer in engine.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = 0
                info.loaded_weights.clear()
        with _no_reload_log():
            finalize_layerwise_reload(engine.model, engine.model_config)
        engine.reset_weight_update_target()
        self._weight_update_active = False


def _loaded_elements(model: torch.nn.Module) -> list[tuple[int, bool]]:
    """Elements by layer: those that the open update has brought, and whether it waits for more."""
    infos = [get_layerwise_info(layer) for layer in model.modules()]
    return [(info.load_numel, info.can_load()) for info in infos]


def _weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters and buffers, each storage once, and of the copies that CPU linear layers pack for their kernels. A packed copy
    hides in the kernel's handle: it counts as much as the weight it was made from, which the layer may have dropped since.
    """
    storages: dict[int, int] = {}
    packed = 0
    for layer in model.modules():
        for tensor in (*layer._parameters.values(), *layer._buffers.values()):
            if tensor is not None and tensor.numel():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        if getattr(layer, "cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear:
            packed += get_layerwise_info(layer).restore_metadata[0]["weight"].nbytes
    return sum(storages.values()) + packed


@contextmanager
def _no_reload_log() -> Iterator[None]:
    """Keep the reload's log from the console inside the block: it complains of tied heads and rotary tables at every sync."""
    logger = logging.getLogger(RELOAD_LOGGER)
    logger.addFilter(_drop)
    try:
        yield
    finally:
        logger.removeFilter(_drop)


def _drop(_record: logging.LogRecord) -> bool:
    return False
