"""A small model and a profile that trains it, for plans."""

from __future__ import annotations

from pathlib import Path

from hybrid.config import RunConfig, resolve
from launch.tiny_models import tiny_config

MIB, GIB = 2**20, 2**30
VOCABULARY = 8192


def planned_model(folder: Path) -> str:
    """Write the model's configuration to `folder`; returns its path."""
    tiny_config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def config(path: str, **changes) -> RunConfig:
    """The resolved profile on CPU that trains the model at `path`, with `changes` of its sections."""
    sections = {
        "cluster": {"device": "cpu", "gpus_per_node": 2},
        "model": {"path": path, "dtype": "bfloat16", "attention": "sdpa"},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 128, "kv_cache": 8 * MIB},
        "train": {"steps": 1, "prompts_per_step": 32, "micro_batch_tokens": 1024},
        "data": {"train": "reasoning_gym:chain_sum", "max_prompt_tokens": 128},
        "reward": {"function": "reasoning_gym"},
        "memory": {"device_bytes": 4 * GIB},
    }
    for name, keys in changes.items():
        sections[name] = sections.get(name, {}) | keys
    return resolve(RunConfig.model_validate(sections))
