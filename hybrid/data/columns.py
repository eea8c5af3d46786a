"""Columns of a record by the names that a profile gives: `label`, or `reward_model.ground_truth` inside a column."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

DEPTH = 4
"""Levels of nested columns that an error lists."""
USUAL_PROMPTS = ("messages", "question", "problem", "instruction", "query", "conversations")
"""Names under which other people's data has its prompts."""


class NoColumn(KeyError):
    """A record has no column of that name."""


def pick(record: Mapping[str, Any], name: str) -> Any:
    """The value of the column `name`; with dots a path into nested columns, where a number counts the items of a list from 0.

    A column whose own name has the dots comes first, on every level. Raises `NoColumn`.
    """
    found = list(_found(record, name))
    if not found:
        raise NoColumn(name)
    return found[0]


def _found(value: Any, name: str) -> Iterator[Any]:
    """What `name` may mean in `value`, the longest literal name first."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        head, rest = ".".join(parts[:size]), ".".join(parts[size:])
        if isinstance(value, Mapping) and head in value:
            inner = value[head]
        elif isinstance(value, list | tuple) and head.isdecimal() and int(head) < len(value):
            inner = value[int(head)]
        else:
            continue
        if size < len(parts):
            yield from _found(inner, rest)
        else:
            yield inner


def missing(record: Mapping[str, Any], name: str, key: str) -> str:
    """Says that `record` has no column `name`, which `key` of the profile asks for, and which name may be meant."""
    names = list(_names(record, "", DEPTH))
    near = difflib.get_close_matches(name, names, n=1)
    if not near and key == "data.prompt_field":
        near = [usual for usual in USUAL_PROMPTS if usual in record][:1]
    hint = f"did you mean {near[0]}? " if near else ""
    return f"has no field {name} ({key}): {hint}its fields are {', '.join(record) or 'none'}."


def _names(record: Mapping[str, Any], prefix: str, depth: int) -> Iterator[str]:
    for name, value in record.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping) and depth > 1:
            yield from _names(value, f"{prefix}{name}.", depth - 1)
