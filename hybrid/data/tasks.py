"""reasoning-gym tasks as endless streams: an entry is a function of (task, stream, index), so there is no state to save."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any

from hybrid.config import RunConfig
from hybrid.config.file_rules import unknown_task
from hybrid.errors import DataError

PREFIX = "reasoning_gym:"
CHUNK = 1000
"""Entries of one reasoning-gym dataset; some tasks prepare or limit their entries when they are made, so a stream is many of them."""
PATIENCE = 1000
"""Entries in a row that may bring nothing new or usable before a stream counts as exhausted."""


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym and its arguments."""

    name: str
    args: dict[str, Any] = field(default_factory=dict, hash=False)

    def dataset(self, seed: int, size: int):
        """The `ProceduralDataset`. Raises `DataError` for an unknown task or arguments that it refuses."""
        if hint := unknown_task(self.name):
            raise DataError(f"{PREFIX}{self.name}: reasoning-gym has no such task. {hint}")
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS

        if reserved := {"seed", "size"} & set(self.args):
            raise DataError(
                f"data.task_args sets {', '.join(reserved)}; the stream is endless and seeded by train.seed."
            )
        args = dict(self.args)
        try:
            if self.name == "composite":
                args["datasets"] = [DatasetSpec(**{"config": {}, **spec}) for spec in args.get("datasets", [])]
            return reasoning_gym.create_dataset(self.name, seed=seed, size=size, **args)
        except (TypeError, ValueError, AssertionError) as error:
            fields = [name for name in DATASETS[self.name][1].__dataclass_fields__ if name not in ("seed", "size")]
            raise DataError(
                f"{PREFIX}{self.name} refuses data.task_args {self.args}: {error}. It takes {', '.join(fields)}."
            ) from error


def train_task(cfg: RunConfig) -> Task | None:
    """The task that `data.train` names, if it names one."""
    return _task(cfg.data.train, cfg.data.task_args)


def eval_task(cfg: RunConfig) -> Task | None:
    """The task of the evaluation: of `data.eval`, or training's own. `data.task_args` belong to training's."""
    source = cfg.data.eval or cfg.data.train
    return _task(source, cfg.data.task_args if source == cfg.data.train else {})


def _task(source: str, args: dict[str, Any]) -> Task | None:
    return Task(source.removeprefix(PREFIX), args) if source.startswith(PREFIX) else None


class NoProblem(Exception):
    """The generator of a task found no problem for one seed, as a few do now and then; the stream goes on without."""


@lru_cache(maxsize=2048)
def entry(task: Task, stream: str, index: int) -> dict[str, Any]:
    """Entry `index` of the `stream` of a task: "question", "answer", "metadata". Remembered: some puzzles take seconds to make.

    Raises `NoProblem` where the generator gave up, `DataError` as `Task.dataset`.
    """
    chunk, offset = divmod(index, CHUNK)
    dataset = _chunk(task, stream, chunk)
    try:
        return dataset[offset]
    except Exception as error:
        raise NoProblem(
            f"{PREFIX}{task.name} made no problem for entry {index}: {type(error).__name__}: {error}"
        ) from error


@lru_cache(maxsize=4)
def _chunk(task: Task, stream: str, chunk: int):
    # Hashed, because reasoning-gym seeds entry i with seed + i: streams of neighbouring seeds would share their entries.
    digest = hashlib.sha256(f"{stream}/{chunk}".encode()).digest()
    return task.dataset(int.from_bytes(digest[:4]) % 2**31, CHUNK)


def held_out(task: Task, size: int, spare: int, usable: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """`size` usable entries with different questions, the same for every run of the task.

    Raises `DataError` when the task has fewer different questions, or fewer than `spare` would be left for training.
    """
    found: dict[str, dict[str, Any]] = {}
    repeated, fruitless, too_long, failed = False, 0, 0, ""
    for index in count():
        # Without a repetition there are far more questions than `size`: no need to count what is left.
        if len(found) >= size + spare * repeated or fruitless >= PATIENCE:
            break
        fruitless += 1
        try:
            candidate = entry(task, "held-out", index)
        except NoProblem as error:
            failed = f" {error}"
            continue
        if candidate["question"] in found:
            repeated = True
        elif not usable(candidate):
            too_long += 1
        else:
            found[candidate["question"]] = candidate
            fruitless = 0
    if fruitless < PATIENCE:
        return list(found.values())[:size]
    limit = f" ({too_long} were longer than data.max_prompt_tokens)" if too_long else ""
    needs = f"data.eval_size={size} needs {size}" + (
        f" and leaves too few for training, {spare} at least" if spare else ""
    )
    largest = len(found) // 2 if spare else len(found)
    fix = f"Set data.eval_size to at most {largest}, or widen" if largest else "Change"
    raise DataError(
        f"{PREFIX}{task.name} with data.task_args {task.args} has about {len(found)} different questions that can be used{limit}; "
        f"{needs}. {fix} data.task_args.{failed}"
    )
