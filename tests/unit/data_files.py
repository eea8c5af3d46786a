"""Small data, a config and a tokenizer for the tests of data and rewards."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from hybrid.config import RunConfig
from hybrid.data.samples import Prompt, Sample
from launch.tiny_models import make_tokenizer


@cache
def tokenizer():
    return make_tokenizer()


def plain_tokenizer():
    """The same without a chat template, as base models come."""
    made = make_tokenizer()
    made.chat_template = None
    return made


def config(train: str, *, seed: int = 0, reward: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "none"},
            "reward": reward or {"function": "math_verify"},
            "train": {"steps": 1, "seed": seed},
            "data": {"train": train, **data},
        }
    )


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def sample(response: str = "4", label: Any = "4", prompt: str = "2 + 2?", **columns: Any) -> Sample:
    return Sample(
        prompt=Prompt(index=0, text=prompt, token_ids=[1], label=label, columns=columns),
        group=0,
        token_ids=[2],
        logprobs=[0.0],
        text=response,
        truncated=False,
        weight_version=1,
    )
