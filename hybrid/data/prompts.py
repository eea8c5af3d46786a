"""The run's prompts: a shuffled stream that can be resumed, and the held-out ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hybrid.config import RunConfig
from hybrid.data.chat import make_prompt
from hybrid.data.samples import Prompt
from hybrid.data.sources import is_task, make_task, read_records, task_record
from hybrid.errors import DataError

HELD_OUT_SEED = 2**31 - 1
"""Added to the run's seed for held-out problems."""
LOOK_AHEAD = 10_000
"""Entries of a task looked at in a row for one that can be used before giving up."""


class PromptSource:
    """Hands out prompts for ever. `dropped` counts those left out because they were too long."""

    def __init__(
        self, get: Callable[[int], Prompt | None], size: int | None, seed: int, shuffle: bool, dropped: int = 0
    ):
        """`get(i)` is item i, or None when it cannot be used; `size` items, None for an endless stream, which is taken in order."""
        self._get, self._size, self._seed, self._shuffle = get, size, seed, shuffle
        self.dropped = dropped
        self._position = 0
        self._served = 0

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts; an epoch's last ones and the next epoch's first ones may come together.

        Raises `DataError` when an endless stream has nothing usable among its next entries.
        """
        prompts: list[Prompt] = []
        refused = 0
        while len(prompts) < n:
            item = self._get(self._item(self._position))
            self._position += 1
            if item is None:
                refused += 1
                if refused > LOOK_AHEAD:
                    raise DataError(
                        f"None of {LOOK_AHEAD} prompts in a row can be used: they are too long or held out. "
                        "Raise data.max_prompt_tokens, widen data.task_args, or lower data.eval_size."
                    )
                continue
            prompts.append(replace(item, index=self._served))
            self._served += 1
        return prompts

    def state_dict(self) -> dict[str, int]:
        """All that is needed to go on from here."""
        return {"position": self._position, "served": self._served, "dropped": self.dropped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from where `state` was taken."""
        self._position, self._served, self.dropped = state["position"], state["served"], state["dropped"]

    def _item(self, position: int) -> int:
        if self._size is None or not self._shuffle:
            return position if self._size is None else position % self._size
        epoch, place = divmod(position, self._size)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return int(torch.randperm(self._size, generator=generator)[place])


def load_prompts(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
    """The training prompts. Raises `DataError` when a record is malformed, too long (`data.too_long: error`), or none is left."""
    if is_task(cfg.data.train):
        return _task_source(cfg, tokenizer)
    prompts, dropped = _usable(
        cfg, [make_prompt(cfg, tokenizer, r) for r in read_records(cfg, cfg.data.train)], cfg.data.train
    )
    return PromptSource(prompts.__getitem__, len(prompts), cfg.train.seed, cfg.data.shuffle, dropped)


def load_eval(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Held-out prompts, at most `data.eval_size`; none when there is no held-out data. Raises as `load_prompts`."""
    source = cfg.data.eval or (cfg.data.train if is_task(cfg.data.train) else None)
    if source is None:
        return []
    if is_task(source):
        records = _held_out_records(cfg, source)
    else:
        records = read_records(cfg, source)[: cfg.data.eval_size]
    prompts, _ = _usable(cfg, [make_prompt(cfg, tokenizer, r) for r in records], source)
    return [replace(prompt, index=i) for i, prompt in enumerate(prompts)]


def _usable(cfg: RunConfig, prompts: list[Prompt], source: str) -> tuple[list[Prompt], int]:
    kept = [p for p in prompts if not _too_long(cfg, p, source)]
    if not kept:
        raise DataError(
            f"{source}: none of {len(prompts)} prompts can be used; data.max_prompt_tokens={cfg.data.max_prompt_tokens} may be too small."
        )
    return kept, len(prompts) - len(kept)


def _too_long(cfg: RunConfig, prompt: Prompt, source: str) -> bool:
    tokens, limit = len(prompt.token_ids), cfg.data.max_prompt_tokens
    if tokens > limit and cfg.data.too_long == "error":
        raise DataError(
            f"{source}: a prompt has {tokens} tokens, data.max_prompt_tokens={limit} (data.too_long=error): {prompt.text:.80}"
        )
    return tokens > limit


def _task_source(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
    source = cfg.data.train
    task = make_task(cfg, source, cfg.train.seed)
    held_out = {_question(cfg, r) for r in _held_out_records(cfg, source)} if cfg.data.eval is None else set()

    def get(index: int) -> Prompt | None:
        record = task_record(cfg, task, source, index)
        if _question(cfg, record) in held_out:
            return None
        prompt = make_prompt(cfg, tokenizer, record)
        if _too_long(cfg, prompt, source):
            stream.dropped += 1
            return None
        return prompt

    stream = PromptSource(get, None, cfg.train.seed, shuffle=False)
    return stream


def _held_out_records(cfg: RunConfig, source: str) -> list[Any]:
    """`eval_size` entries with distinct questions, from another seed than training."""
    task = make_task(cfg, source, cfg.train.seed + HELD_OUT_SEED)
    found: dict[str, Any] = {}
    for index in range(LOOK_AHEAD):
        record = task_record(cfg, task, source, index)
        found.setdefault(_question(cfg, record), record)
        if len(found) == cfg.data.eval_size:
            return list(found.values())
    raise DataError(
        f"{source} has only {len(found)} different questions among {LOOK_AHEAD}, but data.eval_size={cfg.data.eval_size} are to be held "
        "out: lower data.eval_size, or widen data.task_args."
    )


def _question(cfg: RunConfig, record: Any) -> str:
    return record.columns[cfg.data.prompt_field]
