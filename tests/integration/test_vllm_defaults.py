"""What plans take from vLLM's defaults, asked of vLLM itself."""

from __future__ import annotations

import pytest
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext

from hybrid.planning.facts import CPU_BATCHED_TOKENS, batched_tokens
from hybrid.planning.known_gpus import known_gpus


class Platform:
    """A machine as vLLM sees it."""

    def __init__(self, name: str, nbytes: int):
        self.name, self.nbytes = name, nbytes

    def get_device_total_memory(self) -> int:
        return self.nbytes

    def get_device_name(self) -> str:
        return self.name

    def is_tpu(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return self.name == "cpu"


@pytest.mark.parametrize("name", known_gpus())
def test_a_gpus_batched_tokens_are_vllms(monkeypatch, name):
    gpu = known_gpus()[name]
    monkeypatch.setattr(arg_utils, "current_platform", Platform(f"NVIDIA {name}", gpu.nbytes))
    of_vllm, _ = arg_utils.EngineArgs.get_batch_defaults(1)
    assert batched_tokens(gpu) == of_vllm[UsageContext.LLM_CLASS]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cpus_batched_tokens_are_vllms(monkeypatch, ranks):
    monkeypatch.setattr(arg_utils, "current_platform", Platform("cpu", 2**35))
    of_vllm, _ = arg_utils.EngineArgs.get_batch_defaults(ranks)
    assert CPU_BATCHED_TOKENS * ranks == of_vllm[UsageContext.LLM_CLASS]
