"""A sound profile for the tests of the configuration, and the message that overrides are refused with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid.config import load_run
from hybrid.errors import ConfigError

PROFILE = """
cluster: {device: cpu, gpus_per_node: 2}
model: {path: models/tiny}
actor: {learning_rate: 4e-5}
reward: {function: reasoning_gym}
train: {steps: 3, prompts_per_step: 8}
data: {train: "reasoning_gym:chain_sum", max_prompt_tokens: 64}
rollout: {max_new_tokens: 16}
"""


def refusal(profile: Path, *overrides: str) -> str:
    """The message that `overrides` are refused with."""
    with pytest.raises(ConfigError) as caught:
        load_run(profile, list(overrides))
    return str(caught.value)
