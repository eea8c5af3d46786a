"""The stream of prompts that a run trains on, and the held-out ones that it is measured with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from hybrid.config import RunConfig, model_source
from hybrid.data.chat import reads, render
from hybrid.data.columns import NoColumn, missing, pick
from hybrid.data.messages import Note, to_tools
from hybrid.data.rollouts import require_recordable
from hybrid.data.samples import Prompt
from hybrid.data.sources import read_records
from hybrid.data.tasks import PATIENCE, PREFIX, NoProblem, Task, entry, eval_task, held_out, train_task
from hybrid.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPTIONAL = {"data.label_field": "label", "data.tools_field": "tools"}
"""Columns that a record may lack while the profile leaves their names at these."""

FIRST = 64
"""Prompts of a task that are made before a run starts, or as many as a step needs; some tasks take seconds for one."""

Say = Callable[[str], None]
"""Shows a line to the person who runs this."""
Tokenizer: TypeAlias = "PreTrainedTokenizerBase | None"
"""Without one, prompts get no token ids, and none is too long: good for checks alone."""


class Skip(Exception):
    """A place of the stream that gives no prompt; `tokens` is its length where it is too long, else 0."""

    def __init__(self, reason: str, tokens: int = 0):
        super().__init__(reason)
        self.tokens = tokens


class PromptSource:
    """An endless stream of prompts that remembers where it is. `dropped` counts the prompts left out as too long."""

    def __init__(
        self, draw: Callable[[int], Prompt], origin: dict[str, Any], dropped: int = 0, read: Sequence[Prompt] = ()
    ):
        """`draw(i)` is the prompt at place `i` of the stream, a pure function, or raises `Skip`. `origin` says what the stream was made
        of: a state is only taken back by a stream of the same origin. `read`: all its prompts, where they were read beforehand."""
        self._read = read
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
                self.dropped += skip.tokens > 0
                skipped += 1
                if skipped >= PATIENCE:
                    raise DataError(f"{skipped} prompts in a row cannot be used. The last one: {skip}") from skip
                continue
            self._used += 1
            skipped = 0
        return prompts

    @property
    def seen(self) -> int:
        """Places of the stream that were looked at."""
        return self._place

    def look(self, n: int) -> Sequence[Prompt]:
        """All prompts of data that was read beforehand; of a task's stream the next `n`, which `take` will give again."""
        if self._read:
            return self._read
        start = self._place, self._used, self.dropped
        prompts = self.take(n)
        self._place, self._used, self.dropped = start
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


def load_prompts(cfg: RunConfig, tokenizer: Tokenizer, say: Say = lambda line: None) -> PromptSource:
    """Training's prompts. Files are read and tokenised here; a task's questions when they are taken. `say` is told what was left out.

    Raises `DataError` for what cannot be used, also when nothing can.
    """
    for name in cfg.data.template_args:
        if tokenizer is not None and not reads(tokenizer, name):
            say(f"data.template_args: {name} has no effect, the model's chat template does not read it.")
    if task := train_task(cfg):
        return _task_source(cfg, tokenizer, task, say)
    prompts, dropped = _read(cfg, tokenizer, cfg.data.train, False, say)
    origin = {"data.train": cfg.data.train, "prompts": len(prompts), "data.shuffle": cfg.data.shuffle}
    if cfg.data.shuffle:
        origin["train.seed"] = cfg.train.seed
    return PromptSource(_by_epoch(prompts, cfg.train.seed, cfg.data.shuffle), origin, dropped, prompts)


def left_out(cfg: RunConfig, source: PromptSource) -> str | None:
    """How many prompts of a task were too long so far, in words; None for none, and for files, which were read whole before."""
    if not source.dropped or not train_task(cfg):
        return None
    return (
        f"{cfg.data.train}: {source.dropped} of the first {source.seen} prompts are left out, longer than "
        f"data.max_prompt_tokens={cfg.data.max_prompt_tokens}."
    )


def load_eval(cfg: RunConfig, tokenizer: Tokenizer, say: Say = lambda line: None) -> list[Prompt]:
    """Up to `data.eval_size` held-out prompts, the same for every seed; none when the config has no evaluation."""
    if task := eval_task(cfg):
        return [
            replace(_task_prompt(cfg, tokenizer, task, problem), index=i)
            for i, problem in enumerate(_held_out(cfg, tokenizer, task))
        ]
    if cfg.data.eval is None:
        return []
    prompts, _ = _read(cfg, tokenizer, cfg.data.eval, True, say)
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


def _read(cfg: RunConfig, tokenizer: Tokenizer, source: str, evaluation: bool, say: Say) -> tuple[list[Prompt], int]:
    """All prompts of a file, folder or hub dataset that are not too long, and how many are. Says what was done to prompts, and left out."""
    data, prompts, key = cfg.data, [], "data.eval" if evaluation else "data.train"
    done, too_long = Counter(), []
    for where, record in read_records(model_source(cfg, source), data.split, evaluation):
        prompt, label, tools = (
            _field(record, name, key, where)
            for key, name in (
                ("data.prompt_field", data.prompt_field),
                ("data.label_field", data.label_field),
                ("data.tools_field", data.tools_field),
            )
        )
        columns = {k: v for k, v in record.items() if k not in (data.prompt_field, data.label_field)}
        notes: list[str] = []
        try:
            made = _prompt(cfg, tokenizer, prompt, label, columns, where, to_tools(tools, where), notes.append)
        except Skip as skip:
            too_long.append(skip.tokens)
            continue
        if not evaluation:
            _require_trainable(cfg, made)
        done.update(notes)
        prompts.append(made)
    limit = f"data.max_prompt_tokens={data.max_prompt_tokens}"
    if not prompts:
        reason = f"all {len(too_long)} prompts are longer than {limit}" if too_long else "it is empty"
        raise DataError(f"{source} has no usable prompt: {reason}.")
    for note, count in done.items():
        say(f"{key} {source}: {count} of {len(prompts)} prompts {note}.")
    if too_long:
        say(
            f"{key} {source}: {len(too_long)} of {len(prompts) + len(too_long)} prompts are left out, longer than {limit}; the longest has "
            f"{max(too_long)} tokens."
        )
    return prompts, len(too_long)


def _field(record: dict[str, Any], name: str | None, key: str, where: str) -> Any:
    """The column that `key` of the profile names; None where it may be missing and is."""
    if name is None:
        return None
    try:
        return pick(record, name)
    except NoColumn as error:
        if OPTIONAL.get(key) == name:
            return None
        raise DataError(f"{where} {missing(record, name, key)}") from error


def _prompt(
    cfg: RunConfig,
    tokenizer: Tokenizer,
    prompt: Any,
    label: Any,
    columns: dict[str, Any],
    where: str,
    tools: list[dict[str, Any]] | None = None,
    note: Note = lambda said: None,
) -> Prompt:
    """Index 0; the stream numbers it. Raises `Skip` for a prompt that is too long, or `DataError` if those are refused."""
    text, token_ids = render(prompt, tokenizer, where, cfg.data, tools, note)
    if len(token_ids) > cfg.data.max_prompt_tokens:
        rule = f"{where}: the prompt has {len(token_ids)} tokens, more than data.max_prompt_tokens={cfg.data.max_prompt_tokens}"
        if cfg.data.too_long == "error":
            raise DataError(f"{rule}. Raise that, shorten the prompt, or set data.too_long=drop.")
        raise Skip(f"{rule}.", len(token_ids))
    return Prompt(index=0, text=text, token_ids=token_ids, label=label, columns=columns, where=where)


def _require_trainable(cfg: RunConfig, prompt: Prompt) -> None:
    """Raise `DataError` for a prompt of training that its rewards or a recording would refuse after the first generation."""
    if cfg.reward.source_field is not None:
        _field(prompt.columns, cfg.reward.source_field, "reward.source_field", prompt.where)
    if cfg.rollout.record is not None:
        require_recordable(prompt)


def _task_source(cfg: RunConfig, tokenizer: Tokenizer, task: Task, say: Say) -> PromptSource:
    stream = f"train/{cfg.train.seed}"
    reserved = set()
    if eval_task(cfg) == task:
        reserved = {problem["question"] for problem in _held_out(cfg, tokenizer, task)}

    def draw(place: int) -> Prompt:
        try:
            problem = entry(task, stream, place)
        except NoProblem as error:
            raise Skip(f"{error}. Change data.task_args.") from error
        if problem["question"] in reserved:
            raise Skip(f"it is held out for evaluation; lower data.eval_size={cfg.data.eval_size}.")
        return _task_prompt(cfg, tokenizer, task, problem)

    origin = {"data.train": cfg.data.train, "data.task_args": cfg.data.task_args, "train.seed": cfg.train.seed}
    origin["held-out questions"] = len(reserved)
    # A stream that gives nothing, or too little, shows here, before anything is started.
    first = PromptSource(draw, origin)
    _require_trainable(cfg, first.take(min(FIRST, cfg.train.prompts_per_step))[0])
    if said := left_out(cfg, first):
        say(said)
    return PromptSource(draw, origin)


def _held_out(cfg: RunConfig, tokenizer: Tokenizer, task: Task) -> list[dict[str, Any]]:
    """The evaluation's problems; where training is on the same task, as many others must remain."""

    def usable(problem: dict[str, Any]) -> bool:
        try:
            _task_prompt(cfg, tokenizer, task, problem)
        except Skip:
            return False
        return True

    size = cfg.data.eval_size
    return held_out(task, size, size if train_task(cfg) == task else 0, usable)


def _task_prompt(cfg: RunConfig, tokenizer: Tokenizer, task: Task, problem: dict[str, Any]) -> Prompt:
    where = f"{PREFIX}{task.name}, question {problem['question'][:60]!r}"
    return _prompt(cfg, tokenizer, problem["question"], problem["answer"], {"entry": problem}, where)
