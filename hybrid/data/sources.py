"""Where records come from: files, saved or hub datasets, reasoning-gym tasks. A record is a dict of columns with a name for messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from hybrid.config import RunConfig, is_hub_name, resolve_path
from hybrid.errors import DataError

REASONING_GYM = "reasoning_gym:"


@dataclass(frozen=True)
class Record:
    """One row; `where` names file and line, or source and index, in messages."""

    columns: dict[str, Any]
    where: str


def is_task(source: str) -> bool:
    return source.startswith(REASONING_GYM)


def read_records(cfg: RunConfig, source: str) -> list[Record]:
    """All records of a file, a saved `datasets` folder or a hub name. Raises `DataError` naming what is malformed or missing."""
    path = resolve_path(cfg, source)
    if path.is_file():
        return list(_jsonl(path))
    if not path.exists() and not is_hub_name(cfg, source):
        raise DataError(
            f"data: {source} does not exist. Name a .jsonl file, a saved datasets folder, a hub name or {REASONING_GYM}TASK."
        )
    rows = _dataset(path if path.exists() else source, cfg.data.split)
    return [Record(dict(row), f"{source}[{index}]") for index, row in enumerate(rows)]


def _jsonl(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                columns = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{where} is not JSON ({error.msg} at column {error.colno}): one object per line is expected."
                ) from error
            if not isinstance(columns, dict):
                raise DataError(f"{where} holds a {type(columns).__name__}: one JSON object per line is expected.")
            yield Record(columns, where)


def _dataset(source: Path | str, split: str) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(source)) if isinstance(source, Path) else datasets.load_dataset(source)
    except Exception as error:  # the library raises whatever its file readers and HTTP client raise
        hint = (
            "is it a folder saved with save_to_disk?"
            if isinstance(source, Path)
            else "is the name right, and the hub reachable?"
        )
        raise DataError(f"data: {source} cannot be loaded; {hint} ({type(error).__name__}: {error})") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"data.split={split}: {source} has the splits {', '.join(loaded)}.")
        loaded = loaded[split]
    return loaded


def make_task(cfg: RunConfig, source: str, seed: int) -> Any:
    """The reasoning-gym dataset behind `reasoning_gym:TASK`: endless, entry i a function of (seed, i). Raises `DataError`."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name = source.removeprefix(REASONING_GYM)
    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.0)[0]
        raise DataError(f"data: reasoning-gym has no task {name}; the nearest is {nearest}.")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=2**31 - 1, **cfg.data.task_args)
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"data.task_args={cfg.data.task_args}: the task {name} refuses them: {error}") from error


def task_records(cfg: RunConfig, source: str, seed: int) -> Iterator[Record]:
    """Entries of a task from the first on, as records with columns prompt, label and entry (which its scorer needs)."""
    task = make_task(cfg, source, seed)
    for index in count():
        yield task_record(cfg, task, source, index)


def task_record(cfg: RunConfig, task: Any, source: str, index: int) -> Record:
    """Entry `index` of `task` as a record."""
    entry = task[index]
    columns = {cfg.data.prompt_field: entry["question"], cfg.data.label_field: entry["answer"], "entry": entry}
    return Record(columns, f"{source}[{index}]")
