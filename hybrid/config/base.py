"""What every section of a profile is made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer
from pydantic_core import PydanticCustomError

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(value: Any) -> Any:
    """`"1.5GiB"` -> 1610612736. What is no text is passed on, for the field's own check."""
    if not isinstance(value, str):
        return value
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if size is None or size[2].upper() not in UNITS:
        raise PydanticCustomError("size", "a size such as 512MiB or 2GiB")
    return int(float(size[1]) * UNITS[size[2].upper()])


def format_bytes(value: Any) -> Any:
    """The shortest exact form of a size: 2**30 -> "1GiB", 2**20 + 1 -> 1048577. Reads back as the same number."""
    if not isinstance(value, int):
        return value
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return value


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0), PlainSerializer(format_bytes, when_used="json")]
"""A size in bytes: a number, or text such as "512MiB"."""
Size = Annotated[Bytes, Field(gt=0)]
"""A size that is not 0."""


class Section(BaseModel):
    """A section: unknown keys are refused, types are taken at their word ("8" is no number), nothing changes
    afterwards."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
    )
