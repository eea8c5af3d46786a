"""A model's generation_config.json, which some publishers write so that transformers reads it but refuses to write it back."""

from __future__ import annotations

import json
from typing import Any

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
SAMPLING = {
    "temperature": lambda value: value > 0,
    "top_p": lambda value: 0 < value <= 1,
    "min_p": lambda value: 0 <= value <= 1,
    "typical_p": lambda value: 0 < value <= 1,
    "epsilon_cutoff": lambda value: 0 <= value < 1,
    "eta_cutoff": lambda value: 0 <= value <= 1,
    "top_k": lambda value: value >= 0 and value == int(value),
}
"""Keys that shape sampling, and whether a number is one of their values."""


def repaired_generation_config(text: bytes) -> tuple[dict[str, Any], str | None]:
    """(values, note): values that transformers writes, and what was changed for that; note None: nothing.

    Sampling keys beside `do_sample: false` are kept, and sampling is turned on: their author set them to be used. Keys whose values have no
    meaning are left out.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}, "is not JSON: it is not exported"
    if not isinstance(values, dict):
        return {}, "is not a mapping: it is not exported"
    if writes(values):
        return values, None
    others = (key for key in values if key not in TOKENS and key not in SAMPLING)
    wrong = {key for key in others if not writes({"do_sample": bool(values.get("do_sample")), key: values[key]})}
    kept = {key: value for key, value in values.items() if key not in wrong and not _is_wrong(key, value)}
    if not writes(kept) and any(key in SAMPLING for key in kept):
        kept["do_sample"] = True
    if not writes(kept):
        kept = {key: kept[key] for key in TOKENS if key in kept}
    changes = (
        ["do_sample: true is set"] if kept.get("do_sample") is True and values.get("do_sample") is not True else []
    )
    changes += [f"{key}: {json.dumps(values[key])} is left out" for key in values if key not in kept]
    return kept if writes(kept) else {}, f"cannot be written back by transformers; in the export {', '.join(changes)}"


def writes(values: dict[str, Any]) -> bool:
    """Whether transformers reads `values` and writes them back."""
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_dict(dict(values)).validate(strict=True)
    except Exception:  # what it raises for odd values has no bounded list of classes
        return False
    return True


def _is_wrong(key: str, value: Any) -> bool:
    if key in ("bos_token_id", "pad_token_id", "decoder_start_token_id") and value is not None:
        return type(value) is not int or value < 0
    if key not in SAMPLING or value is None:
        return False
    return not isinstance(value, int | float) or isinstance(value, bool) or not SAMPLING[key](value)
