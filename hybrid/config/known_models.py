"""Shapes of well-known models, for where their config.json is not at hand (`known_models.yaml`)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """The keys of config.json that shapes follow from, by hub name."""
    rows = yaml.safe_load((Path(__file__).parent / "known_models.yaml").read_text(encoding="utf-8"))
    return {name: row["config"] for row in rows for name in row["names"]}
