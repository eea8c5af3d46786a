"""Whole rollouts on disk: recorded with `rollout.record`, trained on again with `rollout.replay`.

One JSON object per line and step: {"step", "prompts": [...], "samples": [...]}. A sample names its prompt by position in `prompts`.
What comes back equals what was written: floats to the last bit, tuples and integer keys of columns included.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hybrid.config import RunConfig
from hybrid.data.samples import Prompt, Sample
from hybrid.errors import DataError
from hybrid.telemetry.jsonl import JsonLines, read_lines

_TUPLE, _PAIRS = "__tuple__", "__pairs__"
_PROMPT = tuple(f.name for f in fields(Prompt))
_SAMPLE = tuple(f.name for f in fields(Sample))
_LATER = {"score", "greedy", "where"}
"""Fields that older recordings lack; they have defaults."""


class RolloutRecorder:
    """Appends steps to a new file. Raises `DataError` when `path` holds something already."""

    def __init__(self, path: str | Path):
        path = Path(path)
        if path.exists() and path.stat().st_size > 0:
            raise DataError(
                f"rollout.record={path} exists, and recordings are not mixed: name another file, or remove it."
            )
        self._lines = JsonLines(path)

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Append the rollout of `step`. Raises `DataError` when a prompt's label or column cannot be written as JSON."""
        prompts = {id(s.prompt): s.prompt for s in samples}
        position = {key: i for i, key in enumerate(prompts)}
        row = {
            "step": step,
            "prompts": [_prompt_row(prompt) for prompt in prompts.values()],
            "samples": [{**_sample_row(s), "prompt": position[id(s.prompt)]} for s in samples],
        }
        self._lines.append(json.dumps(row))

    def close(self) -> None:
        self._lines.close()


def load_rollouts(path: str | Path) -> dict[int, list[Sample]]:
    """Recorded rollouts by step. Raises `DataError` naming file and line of what is malformed."""
    steps: dict[int, list[Sample]] = {}
    for number, row in read_lines(path):
        try:
            prompts = [_prompt(p) for p in row["prompts"]]
            samples = [_sample(s, prompts) for s in row["samples"]]
            step = row["step"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise DataError(
                f"{path}:{number} is not a recorded rollout: {reason}. Record it again with rollout.record."
            ) from error
        if step in steps:
            raise DataError(f"{path}:{number} records step {step} a second time: two runs wrote into one file.")
        steps[step] = samples
    if not steps:
        raise DataError(f"{path} holds no whole rollout: record one with rollout.record.")
    return steps


def require_recordable(prompt: Prompt) -> None:
    """Raise `DataError` when the label or a column of `prompt` is of a type that a recording cannot hold."""
    _prompt_row(prompt)


def _prompt_row(prompt: Prompt) -> dict[str, Any]:
    start = f"{prompt.where}: " if prompt.where else ""
    encoded = {name: _encode(getattr(prompt, name), f"{start}{name}") for name in ("label", "columns")}
    return {name: getattr(prompt, name) for name in _PROMPT} | encoded


def _sample_row(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in _SAMPLE if name != "prompt"}


def _prompt(row: dict[str, Any]) -> Prompt:
    _check_names(row, _PROMPT, "prompt")
    return Prompt(**{**row, "label": _decode(row["label"]), "columns": _decode(row["columns"])})


def _sample(row: dict[str, Any], prompts: list[Prompt]) -> Sample:
    _check_names(row, _SAMPLE, "sample")
    if len(row["token_ids"]) != len(row["logprobs"]):
        raise ValueError(f"a sample has {len(row['token_ids'])} tokens but {len(row['logprobs'])} log-probs")
    return Sample(**{**row, "prompt": prompts[row["prompt"]]})


def _check_names(row: dict[str, Any], names: tuple[str, ...], what: str) -> None:
    if set(row) | _LATER != set(names) | _LATER:
        raise ValueError(f"a {what} must have the fields {', '.join(names)}, not {', '.join(row)}")


def _encode(value: Any, where: str) -> Any:
    """`value` as JSON that `_decode` turns back. Tasks of reasoning-gym have tuples and integer keys in their records."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list):
        return [_encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(v, f"{where}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(k, str) and k not in (_TUPLE, _PAIRS) for k in value):
            return {k: _encode(v, f"{where}.{k}") for k, v in value.items()}
        return {_PAIRS: [[_encode(k, where), _encode(v, f"{where}.{k}")] for k, v in value.items()]}
    raise DataError(
        f"rollout.record cannot write {where} of a prompt: it is a {type(value).__module__}.{type(value).__qualname__}, "
        "and a recording holds numbers, strings, lists, tuples and dicts."
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_decode(value[_TUPLE]))
    if _PAIRS in value:
        return {_decode(k): _decode(v) for k, v in value[_PAIRS]}
    return {k: _decode(v) for k, v in value.items()}


def check_recorded(cfg: RunConfig, steps: dict[int, list[Sample]]) -> None:
    """Raise `DataError` when a recorded step has not the prompts and samples that the profile says, or cannot be trained on."""
    prompts, each = cfg.train.prompts_per_step, cfg.rollout.samples_per_prompt
    for step, samples in steps.items():
        where = f"rollout.replay={cfg.rollout.replay}, step {step}"
        sizes = Counter(sample.group for sample in samples if not sample.greedy)
        if sizes != dict.fromkeys(range(prompts), each):
            found = f"{len(sizes)} prompts with {min(sizes.values(), default=0)} to {max(sizes.values(), default=0)} samples"
            raise DataError(
                f"{where} has {found}, but train.prompts_per_step={prompts} and rollout.samples_per_prompt={each}: "
                "set both to what was recorded."
            )
        greedy = sorted(sample.group for sample in samples if sample.greedy)
        if greedy != (list(range(prompts)) if cfg.uses_greedy_answers else []):
            raise DataError(
                f"{where} has {len(greedy)} greedy answers to {prompts} prompts, and algorithm.advantage={cfg.algorithm.advantage} "
                f"{'compares with one each' if cfg.uses_greedy_answers else 'has no use for them'}: record it with the same estimator."
            )
        least, shortest = cfg.rollout.min_new_tokens, min(len(sample.token_ids) for sample in samples)
        if 0 < shortest < least:
            raise DataError(
                f"rollout.min_new_tokens: {least} is invalid: {where} has a response of {shortest} tokens. Set it to what was "
                "recorded with."
            )
        if not all(sample.token_ids and math.isfinite(sum(sample.logprobs)) for sample in samples):
            raise DataError(
                f"{where} has a sample without tokens or with log-probs that are not finite: record it again."
            )
