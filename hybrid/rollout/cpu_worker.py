"""vLLM's CPU worker with a KV cache that can be taken away and given back.

vLLM has no sleep on CPU. Its selective `discard` / `wake_up` of the KV cache, the path CUDA takes as well, calls the two methods here.
"""

from __future__ import annotations

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

import hybrid.rollout.model_loader
import hybrid.rollout.weight_transfer  # noqa: F401  both register what they hold with vLLM where this worker lives
from hybrid.memory.probe import release_free_memory


class SleepableCPUWorker(CPUWorker):
    """Frees the KV cache's storages on `discard(("kv_cache",))`. Tensors keep their identity, so nothing in vLLM notices."""

    _freed: list[tuple[torch.UntypedStorage, int]]

    def compile_or_warm_up_model(self):
        times = super().compile_or_warm_up_model()
        for storage in (
            self._kv_storages()
        ):  # the kernel hands out zeroed pages on first touch: touch them, so that counted is measured
            storage.fill_(0)
        return times

    def discard(self, tags: tuple[str, ...]) -> None:
        if set(tags) != {"kv_cache"}:
            raise RuntimeError(f"On CPU only kv_cache can be discarded, not {tags}.")
        self._freed = [(storage, storage.nbytes()) for storage in self._kv_storages()]
        for storage, _ in self._freed:
            storage.resize_(0)
        release_free_memory("cpu", collect=False)

    def wake_up(self, tags: list[str] | None = None) -> None:
        for storage, nbytes in self._freed:
            storage.resize_(nbytes)
            storage.fill_(0)  # malloc may hand out old bytes, and 0 * NaN in a padded block is NaN

    def _kv_storages(self) -> list[torch.UntypedStorage]:
        return list({t.untyped_storage().data_ptr(): t.untyped_storage() for t in self.model_runner.kv_caches}.values())
