"""Labels as data has them: text and numbers can be compared, other things are refused with the reason."""

from __future__ import annotations

import math
import numbers
from decimal import Decimal
from typing import Any

MISSING = {"N/A", "n/a", "NA", "#N/A", "<NA>", "nan", "NaN", "NAN", "null", "NULL", "None"}
"""How tables and programs write that there is no value; "none" and "undefined" are answers."""


class BadLabel(Exception):
    """A label that is not an answer; the message says why and what to do."""


def label_text(label: Any) -> str:
    """The text of a label that is text or a finite number; numbers keep every digit. Raises `BadLabel` for all else."""
    value = label.item() if type(label).__module__ == "numpy" and hasattr(label, "item") else label
    if value is None:
        raise BadLabel("the label is missing. Give the record an answer, or remove it")
    if isinstance(value, bool):
        raise BadLabel("a label must be text or a number. Write true and false as text, as responses will have them")
    if isinstance(value, str):
        if not value.strip():
            raise BadLabel("the label is empty. Give the record an answer, or remove it")
        if value.strip() in MISSING:
            raise BadLabel("it stands for a missing value. Give the record an answer, or remove it")
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise BadLabel("it has a lone surrogate, which is not Unicode. Correct the record, or remove it")
        return value
    if isinstance(value, numbers.Real | Decimal):
        if not _finite(value):
            raise BadLabel("the label is not a finite number. Give the record an answer, or remove it")
        return str(value) if not isinstance(value, float) else repr(value)
    raise BadLabel(
        f"a label must be text or a number, not a {type(value).__name__}. Name the answer alone; data.label_field may be a dotted path"
    )


def _finite(value: numbers.Real | Decimal) -> bool:
    """Whether `value` is finite; exact numbers are, also those that no float can hold."""
    return (
        value.is_finite() if isinstance(value, Decimal) else isinstance(value, numbers.Rational) or math.isfinite(value)
    )
