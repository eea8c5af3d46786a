"""vLLM's CUDA worker, which may fall asleep while other processes allocate."""

from __future__ import annotations

import logging

from vllm.v1.worker.gpu_worker import Worker

import hybrid.rollout.model_loader  # noqa: F401  registers the loader with vLLM where this worker lives

RISEN = "Memory usage increased after sleeping."
"""vLLM's assertion, the last statement of `sleep` but for a line of log."""


class SleepableCUDAWorker(Worker):
    """Sleeps as vLLM's worker does, but does not judge by the memory of the whole device."""

    def sleep(self, level: int = 1) -> None:
        """vLLM asserts that free memory of the device did not fall meanwhile: a process that opens its context then (0.3 to 0.75 GiB)
        outweighs a small model, and would end the run. All has left by then; what this worker holds is measured by its caller."""
        try:
            super().sleep(level)
        except AssertionError as error:
            if str(error) != RISEN:
                raise
            logging.getLogger(__name__).warning("Another process took memory of this GPU while the engine fell asleep.")
