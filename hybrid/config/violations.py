"""What is wrong with a profile, in words: the rule broken, the value, the fix."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, get_args

from hybrid.config.base import Section
from hybrid.config.run import SECTIONS, RunConfig


@dataclass(frozen=True)
class Violation:
    """One thing wrong. `keys` are the dotted fields it is about."""

    keys: tuple[str, ...]
    rule: str
    fix: str


EXPECTED = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a text (quote it if YAML takes it for something else)",
    "string_too_short": "a text that is not empty",
    "string_pattern_mismatch": "letters, digits, dots, dashes and underscores",
    "list_type": "a list",
    "tuple_type": "a list of two numbers",
    "too_long": "a list of at most {max_length} items",
    "missing": "given",
    "dict_type": "a mapping",
    "model_type": "a mapping of keys to values",
    "literal_error": "{expected}",
}


def section_class(name: str) -> type[Section]:
    """The class of a section, also of one that may be null."""
    annotation = RunConfig.model_fields[name].annotation
    return next((a for a in get_args(annotation) if a is not type(None)), annotation)


def all_keys() -> list[str]:
    """Every `section.key` there is."""
    return [f"{name}.{key}" for name in SECTIONS for key in section_class(name).model_fields]


def describe(dotted: str) -> str:
    """The documentation of a section or field, on one line."""
    section, _, key = dotted.partition(".")
    field = section_class(section).model_fields[key] if key else RunConfig.model_fields[section]
    return " ".join((field.description or "").split())


def unknown_section(name: str) -> Violation:
    """For a top-level name that is no section."""
    close = difflib.get_close_matches(name, SECTIONS, n=1)
    inside = [dotted for dotted in all_keys() if dotted.split(".")[1] == name]
    if close:
        fix = f"Did you mean {close[0]}?"
    elif inside:
        fix = f"It belongs into a section: {' or '.join(inside)}."
    else:
        fix = f"Sections are {', '.join(SECTIONS)}."
    return Violation((name,), f"{name} is no section", fix)


def explain(errors: list[dict[str, Any]]) -> list[Violation]:
    """pydantic's errors as violations, one per field: the members of a union are told together."""
    by_field: dict[str, list[dict[str, Any]]] = {}
    for error in errors:
        by_field.setdefault(".".join(map(str, error["loc"][:2])), []).append(error)
    return [_one(dotted, found) for dotted, found in by_field.items()]


def _one(dotted: str, errors: list[dict[str, Any]]) -> Violation:
    first = errors[0]
    section, _, key = dotted.partition(".")
    if first["type"] == "extra_forbidden":
        return Violation((dotted,), f"{dotted} is unknown: section {section} has no key {key}", nearest(section, key))
    expected = " or ".join(dict.fromkeys(_expected(e) for e in errors))
    if first["type"] == "missing":
        return Violation((dotted,), f"{dotted} is missing", f"Give it: {describe(dotted)}")
    items = [str(part) for part in first["loc"][2:] if isinstance(part, int)]
    item = f"[{']['.join(items)}]" if items else ""
    return Violation((dotted,), f"{dotted}{item} = {first['input']!r} must be {expected}", describe(dotted))


def _expected(error: dict[str, Any]) -> str:
    template = EXPECTED.get(error["type"])
    return template.format(**error.get("ctx", {})) if template else error["msg"].removeprefix("Input should be ")


def nearest(section: str, key: str) -> str:
    """The key that was probably meant: in this section, else in any."""
    own = list(section_class(section).model_fields)
    close = difflib.get_close_matches(key, own, n=1)
    if close:
        return f"Did you mean {section}.{close[0]}?"
    elsewhere = [dotted for dotted in all_keys() if dotted.split(".")[1] == key]
    keys = all_keys()
    elsewhere = elsewhere or [d for d in keys if difflib.get_close_matches(key, [d.split(".")[1]], n=1, cutoff=0.75)]
    if elsewhere:
        return f"Did you mean {' or '.join(elsewhere)}?"
    return f"Keys of {section}: {', '.join(own)}."
