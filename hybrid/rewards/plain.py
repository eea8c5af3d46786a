"""From what a reward function returned or raised to plain numbers and texts, which any process can read.

The process of a user's function runs this by path, so it imports nothing of hybrid, and nothing that takes long.
"""

from __future__ import annotations

import linecache
import math
import numbers
import traceback
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

LARGEST_SCORE = 1e15
"""Squares of larger ones leave float32, and all advantages would be 0 or not a number."""
SHOWN = 300
"""Characters of a value that an error shows."""
LONGEST_TEXT = 2000
"""Characters of an exception's text that an error shows."""


def listed(result: Any, count: int) -> list | None:
    """The result of a function for `count` responses, as a list.

    Arrays and tensors, also of shape (count, 1), lists, tuples, and iterators, of which at most count + 1 items are taken. None for a text,
    a single value and a collection without order.
    """
    if hasattr(result, "tolist"):  # numpy, torch, pandas
        shape = tuple(getattr(result, "shape", ()))
        if len(shape) == 2 and shape[1] == 1:
            result = result.reshape(-1)
        result = result.tolist()
    if isinstance(result, list | tuple):
        return list(result)
    if isinstance(result, str | bytes | bytearray | Mapping | set | frozenset) or not isinstance(result, Iterable):
        return None
    return list(islice(result, count + 1))


def number(value: Any) -> float | str:
    """A score as a float, or as a text that shows it where it is not a finite number of at most LARGEST_SCORE in size.

    Numbers are Python's (bool, int, float, Fraction, Decimal), one number of numpy or torch, and the `score` of a dict.
    """
    try:
        inner = value["score"] if isinstance(value, Mapping) else value
        plain = inner.item() if hasattr(inner, "item") else inner
        result = float(plain) if isinstance(plain, numbers.Number) else math.nan
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError):
        return shown(value)
    return result if abs(result) <= LARGEST_SCORE else shown(value)


def shown(value: Any) -> str:
    """`repr`, cut to what an error shows."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."


def raised(error: BaseException, between: tuple[str, ...], file: str | None = None) -> dict[str, Any]:
    """An exception as type, text and place: the innermost line, which is where a user looks first, and the line of the user's `file` that
    called it where the innermost is in a library. Files whose paths hold one of `between` are ours."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be made"
    kind = type(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not any(part in f.filename for part in between)]
    where = f" at {_place(frames[-1])}" if frames else ""
    own = [f for f in frames if f.filename == file]
    if own and frames[-1].filename != file:
        where += f", called at {_place(own[-1])}"
    return {
        "kind": f"{kind.__module__}.{kind.__qualname__}",
        "type": kind.__name__,
        "text": text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} ...",
        "where": where,
    }


def _place(frame: traceback.FrameSummary) -> str:
    line = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{frame.filename}:{frame.lineno} ({line})" if line else f"{frame.filename}:{frame.lineno}"
