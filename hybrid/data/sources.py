"""Records from wherever they lie: a .jsonl file, a folder saved by `datasets`, the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid.errors import DataError


class Unreachable(DataError):
    """The hub does not answer, and the data is not in its cache."""


EVALUATION_SPLITS = ("test", "validation")


def read_records(source: str, split: str, evaluation: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, columns) of every record of `source`; `where` is `file:line` or `name[index]`, for errors.

    Data with splits: `split`, and for `evaluation` the split test, else validation.
    Raises `DataError` for a source or record that cannot be read.
    """
    path = Path(source)
    if path.is_file():
        return _read_jsonl(path)
    if (
        path.suffix in (".jsonl", ".json") and not path.is_dir()
    ):  # Asking the hub for it takes half a minute without a network.
        raise DataError(f"{source} does not exist. Correct the path; it may be relative to the profile's folder.")
    loaded = _load_folder(path) if path.is_dir() else _load_hub(source, None if evaluation else split)
    if isinstance(loaded, dict):
        loaded = loaded[_choose_split(source, list(loaded), split, evaluation)]
    return ((f"{source}[{index}]", dict(row)) for index, row in enumerate(loaded))


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix != ".jsonl":
        raise DataError(
            f"{path} is no .jsonl file. Write one JSON object per line, or save the data as a folder: "
            "datasets.load_dataset('parquet' or 'csv', data_files=...).save_to_disk(FOLDER)."
        )
    try:
        opened = path.open("rb")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}. Make it readable for this user.") from error
    with opened as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:  # Of JSON, of UTF-8, or nested too deep.
                raise DataError(f"{where} is not JSON: {error}. Each line must be one JSON object.") from error
            if not isinstance(record, dict):
                raise DataError(f"{where} must be a JSON object, not {type(record).__name__}.")
            yield where, record


def _load_folder(path: Path):
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(
            f"{path} is no folder that `datasets` saved ({error}). Make one with Dataset.save_to_disk, or point to a .jsonl file."
        ) from error


def _load_hub(name: str, split: str | None):
    import datasets

    try:
        return datasets.load_dataset(name, split=split)
    except Exception as error:  # Network, name, access, split, builder: each with a type and a text of its own.
        kind = Unreachable if isinstance(error, ConnectionError) else DataError
        raise kind(
            f"The dataset {name} (split {split or 'any'}) could not be loaded from the Hugging Face hub: "
            f"{type(error).__name__}: {error}\nCheck the name and the network. Without a network, or for a dataset that needs more "
            f"than a name: where it loads, datasets.load_dataset(...).save_to_disk(FOLDER), and give FOLDER here."
        ) from error


def _choose_split(source: str, names: list[str], split: str, evaluation: bool) -> str:
    wanted = EVALUATION_SPLITS if evaluation else (split,)
    found = next((name for name in wanted if name in names), None)
    if found is None:
        fix = "Save the wanted one alone, as a folder of its own" if evaluation else "Set data.split to one of them"
        raise DataError(f"{source} has no split {' or '.join(wanted)}; its splits are {', '.join(names)}. {fix}.")
    return found
