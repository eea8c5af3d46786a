"""The run's record of memory: one JSON object per line of `memory.jsonl`, written as it happens, so that a crashed run can be read.

Every row has `time` (seconds since the epoch), `step` (0 before the first), `phase` and `kind`. By kind:

- `tenant`: a tenant became known. role, part, movable, counted_bytes (largest rank; null when its owner cannot tell without moving it).
- `leave`, `come`: one part of one rank moved, on the way into `phase`. role, part, rank, node, counted_bytes, copied_bytes, seconds
  (of the move itself), before_bytes, after_bytes (the process, measured: PSS on CPU, torch's reserved bytes on CUDA).
- `transition`: `phase` was entered from `previous`. leave_seconds, come_seconds: wall time of all ranks' leaving and coming, with checks.
- `phase`: `phase` ended. seconds (without the transition); peaks: list of {role, rank, peak_bytes, held_bytes, shared_bytes}, the highest
  memory of each process during the phase, what it holds at its end and how much of that other processes count too (see
  `tenants.RankPeak`); arrival (not of init): the same of the way into the phase, measured before its work began, empty where nothing moved.
  kv_cache_share, in an engine's peaks after it generated: tokens that its KV cache held at most, over those that fit. At most: from the
  lengths of prompts and responses, as if the longest ran together and shared no prefix; above 1, sequences may have waited.
- `counted`: what training counted at its height, in the phase that just ended. role, parts: {part: bytes of the largest rank}.
- `plan`: what was predicted, once at the start, phase init. capacity_bytes, policy, phases: list of {phase, tenants, working, overhead,
  peak_bytes}, the first three bytes by name, transitions: list of {from, to, moves: list of {tenant, kind, bytes, seconds}},
  seconds_per_step of movement. All per GPU.
- `growth`: what a process holds after leaving for `phase` rises from step to step. role, rank, node, grown_bytes in `steps` steps,
  now_bytes.
- `failed`: the phase or the way into it raised. error: first line of the message.

Bytes of moves are counted in storages, bytes of processes measured by the system; what lies between them is unattributed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybrid.memory.tenants import RankMoved, RankPeak, Tenant
from hybrid.memory.trend import Growth
from hybrid.telemetry.jsonl import JsonLines


class Ledger:
    """Appends rows to `path` and adds up what the step's metrics need. The trainer sets `step`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.step = 0
        self._counted: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._lines = JsonLines(self.path)

    def tenant(self, tenant: Tenant) -> None:
        """Record that `tenant` exists."""
        if tenant.counted_bytes is not None:
            self._counted[f"{tenant.role}.{tenant.part}"] = tenant.counted_bytes
        self._write("tenant", "init", **asdict(tenant))

    def moves(self, kind: str, phase: str, role: str, rows: Sequence[RankMoved]) -> None:
        """Record what left (`kind="leave"`) or came (`"come"`) of `role` on the way into `phase`."""
        largest: dict[str, int] = {}
        for row in rows:
            self._write(kind, phase, role=role, **asdict(row))
            largest[row.part] = max(largest.get(row.part, 0), row.counted_bytes)
        self._counted |= {f"{role}.{part}": size for part, size in largest.items()}

    def transition(self, previous: str, phase: str, leave_seconds: float, come_seconds: float) -> None:
        """Record that `phase` was entered."""
        self._add_seconds("transitions", leave_seconds + come_seconds)
        self._write("transition", phase, previous=previous, leave_seconds=leave_seconds, come_seconds=come_seconds)

    def phase(
        self, phase: str, seconds: float, peaks: Sequence[RankPeak], arrival: Sequence[RankPeak] | None = None
    ) -> None:
        """Record that `phase` ended. `arrival` are the peaks of the way into it, None where they were not taken apart."""
        self._add_seconds(phase, seconds)
        for peak in (*peaks, *(arrival or ())):
            self._peaks[peak.role] = max(self._peaks.get(peak.role, 0), peak.peak_bytes)
        apart = {} if arrival is None else {"arrival": [_known(peak) for peak in arrival]}
        self._write("phase", phase, seconds=seconds, peaks=[_known(peak) for peak in peaks], **apart)

    def overlapped(self, seconds: float) -> None:
        """Add `seconds` of scoring during generation to the step's metrics; they are part of no other time."""
        self._add_seconds("score_overlapped", seconds)

    def counted(self, phase: str, role: str, parts: Mapping[str, int]) -> None:
        """Record what `role` counted at the height of training, bytes of the largest rank."""
        self._write("counted", phase, role=role, parts=dict(parts))

    def plan(self, plan: Mapping[str, Any]) -> None:
        """Record what was predicted and decided; see the fields above."""
        self._write("plan", "init", **plan)

    def growth(self, growth: Growth) -> None:
        """Record a residue that rises from step to step."""
        self._write("growth", **asdict(growth))

    def failed(self, phase: str, error: BaseException) -> None:
        """Record that `phase`, or the way into it, raised."""
        self._write("failed", phase, error=f"{type(error).__name__}: {error}".split("\n", 1)[0])

    def take_step_totals(self) -> dict[str, float]:
        """Totals since the last call, under the names of metrics.jsonl.

        `time/transitions` and `time/<phase>` in seconds; `memory/peak/<role>` in bytes, of the process that held most;
        `memory/counted/<role>.<part>` in bytes of the largest rank, the last known size of every tenant.
        """
        totals: dict[str, float] = {"time/transitions": 0.0}
        totals |= {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        totals |= {f"memory/counted/{tenant}": size for tenant, size in self._counted.items()}
        totals |= {f"memory/peak/{role}": size for role, size in self._peaks.items()}
        self._seconds, self._peaks = {}, {}
        return totals

    def close(self) -> None:
        """Close the file; rows are on their way to disk already."""
        self._lines.close()

    def _add_seconds(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def _write(self, kind: str, phase: str, **fields: Any) -> None:
        row = {"time": time.time(), "step": self.step, "phase": phase, "kind": kind, **fields}
        self._lines.append(json.dumps(row))


def _known(peak: RankPeak) -> dict[str, Any]:
    return {key: value for key, value in asdict(peak).items() if value is not None}


def read_ledger(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a finished, running or crashed run, oldest first; lines that a crash cut are left out."""
    return [row for row in read_lines(path) if row is not None]


def read_lines(path: str | Path) -> list[dict[str, Any] | None]:
    """As `read_ledger`, with None for every line that is no row."""
    return [_row(line) for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines()]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None
