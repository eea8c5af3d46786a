"""Whole runs inside a test: profile, overrides, and what they leave."""

from __future__ import annotations

from pathlib import Path

import yaml

from hybrid.config import load_run, resolve
from hybrid.config.run_folder import save_origin
from hybrid.preparation import prepared
from hybrid.telemetry.metrics import read_metrics
from hybrid.trainer import train

GRPO = {
    "cluster": {"device": "cpu", "gpus_per_node": 2, "dashboard": False},
    "model": {"dtype": "float32"},
    "actor": {"zero_stage": 2, "learning_rate": 1e-3},
    "rollout": {"samples_per_prompt": 4, "max_new_tokens": 12, "kv_cache": "32MiB", "max_num_seqs": 16},
    "reward": {"function": "reward.py:even"},
    "train": {"steps": 3, "prompts_per_step": 4, "micro_batch_tokens": 512},
    "data": {"train": "prompts.jsonl", "max_prompt_tokens": 64},
}
"""A small GRPO run; `profile` adds a tiny model, prompts and a reward."""

PROFILES = Path(__file__).resolve().parents[2] / "profiles"

REWARD = '''
import time


def even(prompts, responses, labels, **columns):
    """Share of characters with an even code: dense, so that groups differ."""
    return [sum(ord(c) % 2 == 0 for c in r) / max(1, len(r)) for r in responses]


def slow(prompts, responses, labels, **columns):
    time.sleep(0.05)
    return even(prompts, responses, labels)
'''


def profile(folder: Path, model: Path, **sections: dict) -> Path:
    """Write a runnable profile into `folder`: GRPO above with `sections` laid over it."""
    content = {name: {**GRPO.get(name, {}), **sections.get(name, {})} for name in (*GRPO, *sections)}
    content["model"] = {"path": str(model), **content["model"]}
    (folder / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "Say {word}", "label": "{word}"}}\n' for word in "abcdefgh")
    )
    (folder / "reward.py").write_text(REWARD)
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(path: Path, folder: Path, *overrides: str) -> list[dict]:
    """Train in `folder` and return the lines of metrics.jsonl."""
    with prepared(resolve(load_run(path, list(overrides)), folder)) as ready:
        folder.mkdir()
        save_origin(ready.cfg, folder, [])
        train(ready, folder)
    return read_metrics(folder / "metrics.jsonl")
