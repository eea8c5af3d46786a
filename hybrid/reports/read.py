"""A run's folder as data: rows of `memory.jsonl` (format: hybrid/memory/ledger.py) and what `profile.yaml` set.

A crashed run reads like any other: rows that a crash cut are left out, and kinds of rows that this version does not know are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybrid.config.base import parse_bytes
from hybrid.errors import ConfigError, DataError
from hybrid.memory.ledger import read_lines

Row = dict[str, Any]

KEPT_SETTINGS = {
    "device": ("cluster", "device"),
    "policy": ("memory", "policy"),
    "tier": ("memory", "tier"),
    "capacity_bytes": ("memory", "device_bytes"),
    "keep_heap": ("memory", "keep_heap"),
    "kv_cache_bytes": ("rollout", "kv_cache"),
    "micro_batch_tokens": ("train", "micro_batch_tokens"),
    "gradient_checkpointing": ("model", "gradient_checkpointing"),
    "steps": ("train", "steps"),
    "nodes": ("cluster", "num_nodes"),
    "gpus_per_node": ("cluster", "gpus_per_node"),
    "prompts_per_update": ("train", "prompts_per_update"),
    "samples_per_prompt": ("rollout", "samples_per_prompt"),
    "max_prompt_tokens": ("data", "max_prompt_tokens"),
    "max_new_tokens": ("rollout", "max_new_tokens"),
}
"""Section and key of the profile by field of `Settings`: all that a report takes from it."""

COMMON = ("time", "step", "phase", "kind")
NEEDED = {
    "tenant": ("role", "part", "movable", "counted_bytes"),
    "leave": ("role", "part", "rank", "counted_bytes", "copied_bytes", "seconds", "before_bytes", "after_bytes"),
    "come": ("role", "part", "rank", "counted_bytes", "copied_bytes", "seconds", "before_bytes", "after_bytes"),
    "transition": ("previous", "leave_seconds", "come_seconds"),
    "phase": ("seconds", "peaks"),
    "counted": ("role", "parts"),
    "growth": ("role", "rank", "grown_bytes", "steps", "now_bytes"),
    "failed": ("error",),
}
"""Keys that a row of a kind must have to be read."""


@dataclass(frozen=True)
class PlanPhase:
    """What a phase was to hold on the fullest GPU, in bytes by name."""

    phase: str
    tenants: dict[str, int]
    working: dict[str, int]
    overhead: dict[str, int]
    peak_bytes: int


@dataclass(frozen=True)
class PlanMove:
    """One tenant on the way from a phase to the next. `kind` is "leave" or "come"."""

    tenant: str
    kind: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class PlanTransition:
    previous: str
    phase: str
    moves: tuple[PlanMove, ...]

    @property
    def seconds(self) -> float:
        return sum(move.seconds for move in self.moves)


@dataclass(frozen=True)
class Plan:
    """The prediction that the run started with; bytes per GPU. `seconds_per_step` is what moving was to cost."""

    capacity_bytes: int
    policy: str
    phases: tuple[PlanPhase, ...]
    transitions: tuple[PlanTransition, ...]
    seconds_per_step: float

    def phase(self, name: str) -> PlanPhase | None:
        return next((phase for phase in self.phases if phase.phase == name), None)


@dataclass(frozen=True)
class Settings:
    """What the profile said; None where it did not, or where there is no profile."""

    device: str | None = None
    policy: str | None = None
    tier: str | None = None
    capacity_bytes: int | None = None
    keep_heap: bool | None = None
    kv_cache_bytes: int | None = None
    micro_batch_tokens: int | None = None
    gradient_checkpointing: bool | None = None
    steps: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    prompts_per_update: int | None = None
    samples_per_prompt: int | None = None
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a rank's share of an update with all sequences at full length: no micro-batch is larger."""
        needed = (self.prompts_per_update, self.samples_per_prompt, self.max_prompt_tokens, self.max_new_tokens)
        if None in needed:
            return None
        sequences = -(
            -self.prompts_per_update * self.samples_per_prompt // ((self.nodes or 1) * (self.gpus_per_node or 1))
        )
        return sequences * (self.max_prompt_tokens + self.max_new_tokens)


@dataclass(frozen=True)
class Run:
    """A run to report on. `rows` are those of the ledger without the plan, oldest first."""

    name: str
    rows: tuple[Row, ...]
    plan: Plan | None = None
    settings: Settings = field(default_factory=Settings)
    unread: int = 0
    """Lines of the ledger that cannot be read, of `lines`: cut by a crash, or damaged."""
    lines: int = 0


def read_run(folder: str | Path) -> Run:
    """Read `folder`, a run's. Raises `DataError` when it holds no ledger, or one without a whole row."""
    folder = Path(folder)
    ledger = folder / "memory.jsonl"
    if not ledger.is_file():
        raise DataError(
            f"{folder} holds no memory.jsonl, the ledger that a report is made from. Give a run's folder, or its name under runs/."
        )
    lines = read_lines(ledger)
    rows = tuple(row for row in lines if row is not None and _is_row(row))
    if not rows:
        if any(lines) or not lines:
            raise DataError(f"{ledger} holds no row to report on: the run ended before it moved or measured anything.")
        raise DataError(f"{ledger} is no ledger: none of its {len(lines)} lines can be read. Give the folder of a run.")
    plans = [row for row in rows if row["kind"] == "plan"]
    plan = read_plan(plans[-1]) if plans else None
    rest = tuple(row for row in rows if row["kind"] != "plan")
    return Run(folder.resolve().name, rest, plan, _settings(folder / "profile.yaml"), lines.count(None), len(lines))


def find_run(run: str) -> Path:
    """The folder that `run` names: a path, that of a ledger in it too, or a name under runs/. Raises `ConfigError` when none exists."""
    for folder in (run, f"runs/{run}", run.removesuffix("memory.jsonl")):
        if os.path.isdir(folder):  # False for what cannot be a path; Path.is_dir raises
            return Path(folder)
    raise ConfigError(f"There is no run {run}: neither a folder of that path nor one of that name under runs/ is here.")


def read_plan(row: Row) -> Plan:
    """The row of kind `plan` as a `Plan`. Raises `DataError` when a key is missing."""
    try:
        phases = tuple(
            PlanPhase(p["phase"], p["tenants"], p["working"], p["overhead"], p["peak_bytes"]) for p in row["phases"]
        )
        transitions = tuple(
            PlanTransition(t["from"], t["to"], tuple(PlanMove(**move) for move in t["moves"]))
            for t in row["transitions"]
        )
        return Plan(row["capacity_bytes"], row["policy"], phases, transitions, row["seconds_per_step"])
    except (KeyError, TypeError) as error:
        raise DataError(f"The ledger's plan row is not in the form of hybrid/memory/ledger.py: {error!r}.") from error


def _is_row(row: Row) -> bool:
    return {*COMMON, *NEEDED.get(row.get("kind"), ())} <= row.keys()


def _settings(profile: Path) -> Settings:
    """What the profile set; nothing where a crash or a hand left no readable one, as the ledger alone makes a report."""
    try:
        read = yaml.safe_load(profile.read_bytes())
        return Settings(**dict(_known(read)))
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError):
        return Settings()


def _known(profile: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, (section, key) in KEPT_SETTINGS.items():
        value = (profile.get(section) or {}).get(key)
        if name.endswith("_bytes") and value != "auto" and value is not None:
            value = parse_bytes(value)
        if value is not None and value != "auto":
            yield name, value
