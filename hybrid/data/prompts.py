"""The stream of prompts that a run trains on, and the held-out ones that it is measured with."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid.config import RunConfig, model_source
from hybrid.data.chat import render
from hybrid.data.samples import Prompt
from hybrid.data.sources import read_records
from hybrid.data.tasks import PATIENCE, PREFIX, NoProblem, Task, entry, eval_task, held_out, train_task
from hybrid.errors import DataError

DEFAULT_LABEL_FIELD = "label"


class Skip(Exception):
    """A place of the stream that gives no prompt; `dropped` when that is because the prompt is too long."""

    def __init__(self, reason: str, dropped: bool):
        super().__init__(reason)
        self.dropped = dropped


class PromptSource:
    """An endless stream of prompts that remembers where it is. `dropped` counts the prompts left out as too long."""

    def __init__(self, draw: Callable[[int], Prompt], origin: dict[str, Any], dropped: int = 0):
        """`draw(i)` is the prompt at place `i` of the stream, a pure function, or raises `Skip`. `origin` says what the stream was made
        of: a state is only taken back by a stream of the same origin."""
        self._draw = draw
        self._origin = origin
        self._place = 0
        self._used = 0
        self.dropped = dropped

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts. Raises `DataError` when the stream gives no usable ones."""
        prompts: list[Prompt] = []
        skipped = 0
        while len(prompts) < n:
            place, self._place = self._place, self._place + 1
            try:
                prompts.append(replace(self._draw(place), index=self._used))
            except Skip as skip:
                self.dropped += skip.dropped
                skipped += 1
                if skipped >= PATIENCE:
                    raise DataError(f"{skipped} prompts in a row cannot be used. The last one: {skip}") from skip
                continue
            self._used += 1
            skipped = 0
        return prompts

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; `load_state_dict` of an equal source goes on with the very next prompt."""
        return {"place": self._place, "used": self._used, "dropped": self.dropped, "origin": self._origin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises `DataError` when the state is of other data, another seed or another order."""
        if changed := {key for key in self._origin if state["origin"].get(key) != self._origin[key]}:
            shown = "; ".join(
                f"{key} was {state['origin'].get(key)!r}, is {self._origin[key]!r}" for key in sorted(changed)
            )
            raise DataError(
                f"The position in the data was saved for another stream of prompts: {shown}. Put that back."
            )
        self._place, self._used, self.dropped = state["place"], state["used"], state["dropped"]


def load_prompts(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
    """Training's prompts. Files are read and tokenised here; a task's questions when they are taken.

    Raises `DataError` for what cannot be used, also when nothing can.
    """
    if task := train_task(cfg):
        return _task_source(cfg, tokenizer, task)
    prompts, dropped = _read(cfg, tokenizer, cfg.data.train, evaluation=False)
    origin = {"data.train": cfg.data.train, "prompts": len(prompts), "data.shuffle": cfg.data.shuffle}
    if cfg.data.shuffle:
        origin["train.seed"] = cfg.train.seed
    return PromptSource(_by_epoch(prompts, cfg.train.seed, cfg.data.shuffle), origin, dropped)


def load_eval(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Up to `data.eval_size` held-out prompts, the same for every seed; none when the config has no evaluation."""
    if task := eval_task(cfg):
        return [
            replace(_task_prompt(cfg, tokenizer, task, problem), index=i)
            for i, problem in enumerate(_held_out(cfg, tokenizer, task))
        ]
    if cfg.data.eval is None:
        return []
    prompts, _ = _read(cfg, tokenizer, cfg.data.eval, evaluation=True)
    # Drawn, not cut off: files are often sorted by difficulty or source.
    chosen = sorted(Random(0).sample(range(len(prompts)), min(cfg.data.eval_size, len(prompts))))
    return [replace(prompts[place], index=i) for i, place in enumerate(chosen)]


def _by_epoch(prompts: list[Prompt], seed: int, shuffle: bool) -> Callable[[int], Prompt]:
    """Every epoch is a permutation of all prompts, drawn from (seed, epoch)."""

    @lru_cache(maxsize=1)
    def order(epoch: int) -> list[int]:
        places = list(range(len(prompts)))
        if shuffle:
            Random(f"{seed}/{epoch}").shuffle(places)
        return places

    def draw(place: int) -> Prompt:
        epoch, position = divmod(place, len(prompts))
        return prompts[order(epoch)[position]]

    return draw


def _read(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, source: str, evaluation: bool
) -> tuple[list[Prompt], int]:
    """All prompts of a file, folder or hub dataset that are not too long, and how many are."""
    prompts, dropped = [], 0
    for where, record in read_records(model_source(cfg, source), cfg.data.split, evaluation):
        prompt = _field(record, cfg.data.prompt_field, "data.prompt_field", where)
        label = None
        if cfg.data.label_field in record or cfg.data.label_field != DEFAULT_LABEL_FIELD:
            label = _field(record, cfg.data.label_field, "data.label_field", where)
        columns = {k: v for k, v in record.items() if k not in (cfg.data.prompt_field, cfg.data.label_field)}
        try:
            prompts.append(_prompt(cfg, tokenizer, prompt, label, columns, where))
        except Skip:
            dropped += 1
    if not prompts:
        reason = f"all {dropped} prompts are longer than data.max_prompt_tokens={cfg.data.max_prompt_tokens}"
        raise DataError(f"{source} has no usable prompt: {reason if dropped else 'it is empty'}.")
    return prompts, dropped


def _field(record: dict[str, Any], name: str, key: str, where: str) -> Any:
    if name in record:
        return record[name]
    near = difflib.get_close_matches(name, record, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise DataError(f"{where} has no field {name} ({key}): {hint}its fields are {', '.join(record) or 'none'}.")


def _prompt(
    cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, prompt: Any, label: Any, columns: dict[str, Any], where: str
) -> Prompt:
    """Index 0; the stream numbers it. Raises `Skip` for a prompt that is too long, or `DataError` if those are refused."""
    text, token_ids = render(prompt, tokenizer, where, cfg.data.system_prompt, cfg.data.prompt_suffix)
    if len(token_ids) > cfg.data.max_prompt_tokens:
        rule = f"{where}: the prompt has {len(token_ids)} tokens, more than data.max_prompt_tokens={cfg.data.max_prompt_tokens}"
        if cfg.data.too_long == "error":
            raise DataError(f"{rule}. Raise that, shorten the prompt, or set data.too_long=drop.")
        raise Skip(f"{rule}.", dropped=True)
    return Prompt(index=0, text=text, token_ids=token_ids, label=label, columns=columns, where=where)


def _task_source(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, task: Task) -> PromptSource:
    stream = f"train/{cfg.train.seed}"
    reserved = set()
    if eval_task(cfg) == task:
        reserved = {problem["question"] for problem in _held_out(cfg, tokenizer, task)}

    def draw(place: int) -> Prompt:
        try:
            problem = entry(task, stream, place)
        except NoProblem as error:
            raise Skip(f"{error}. Change data.task_args.", dropped=False) from error
        if problem["question"] in reserved:
            raise Skip(f"it is held out for evaluation; lower data.eval_size={cfg.data.eval_size}.", dropped=False)
        return _task_prompt(cfg, tokenizer, task, problem)

    origin = {"data.train": cfg.data.train, "data.task_args": cfg.data.task_args, "train.seed": cfg.train.seed}
    source = PromptSource(draw, origin | {"held-out questions": len(reserved)})
    start = source.state_dict()
    source.take(1)  # A stream that gives nothing shows here, before anything is started.
    source.load_state_dict(start)
    return source


def _held_out(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, task: Task) -> list[dict[str, Any]]:
    """The evaluation's problems; where training is on the same task, as many others must remain."""

    def usable(problem: dict[str, Any]) -> bool:
        try:
            _task_prompt(cfg, tokenizer, task, problem)
        except Skip:
            return False
        return True

    size = cfg.data.eval_size
    return held_out(task, size, size if train_task(cfg) == task else 0, usable)


def _task_prompt(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, task: Task, problem: dict[str, Any]) -> Prompt:
    where = f"{PREFIX}{task.name}, question {problem['question'][:60]!r}"
    return _prompt(cfg, tokenizer, problem["question"], problem["answer"], {"entry": problem}, where)
