"""Small runs written to a ledger as the scheduler writes them, with a clock of their own."""

from __future__ import annotations

import json
from pathlib import Path

from hybrid.memory.ledger import Ledger
from hybrid.memory.tenants import RankMoved, RankPeak, Tenant

MIB = 2**20
GIB = 2**30
REST = {"actor": 400 * MIB, "rollout": 600 * MIB}
SIZES = {
    ("rollout", "weights"): 300 * MIB,
    ("rollout", "kv_cache"): 500 * MIB,
    ("actor", "weights"): 250 * MIB,
    ("actor", "gradients"): 0,
    ("actor", "optimizer"): 800 * MIB,
}
PLAN = {
    "time": 1000.0,
    "step": 0,
    "phase": "init",
    "kind": "plan",
    "capacity_bytes": 6 * GIB,
    "policy": "swap_all",
    "phases": [
        {
            "phase": "generate",
            "tenants": {"rollout/weights": 300 * MIB, "rollout/kv_cache": 500 * MIB},
            "working": {"sampler": 100 * MIB},
            "overhead": {"interpreters": 1000 * MIB},
            "peak_bytes": 1900 * MIB,
        },
        {
            "phase": "train_actor",
            "tenants": {"rollout/weights": 300 * MIB, "actor/weights": 250 * MIB, "actor/optimizer": 800 * MIB},
            "working": {"activations": 1000 * MIB},
            "overhead": {"interpreters": 1000 * MIB},
            "peak_bytes": 3350 * MIB,
        },
    ],
    "transitions": [
        {
            "from": "generate",
            "to": "train_actor",
            "moves": [{"tenant": "actor/optimizer", "kind": "come", "bytes": 800 * MIB, "seconds": 0.5}],
        }
    ],
    "seconds_per_step": 0.7,
}


class RunWriter:
    """Two ranks, of which rank 1 holds `more` bytes beyond rank 0 at its peaks."""

    def __init__(self, folder: Path, monkeypatch, swap: bool = True, more: int = 10 * MIB):
        folder.mkdir(parents=True, exist_ok=True)
        self.clock = 1000.0
        monkeypatch.setattr("hybrid.memory.ledger.time.time", lambda: self.clock)
        self.folder, self.swap, self.more = folder, swap, more
        self.ledger = Ledger(folder / "memory.jsonl")
        self.resident = dict(SIZES)
        self.phase = "init"
        self.moved = False
        self.rest = dict(REST)

    def start(self) -> None:
        for (role, part), size in SIZES.items():
            self.ledger.tenant(Tenant(role, part, (role, part) != ("rollout", "weights"), size))
        self.clock += 10
        self.ledger.phase("init", 30.0, self._peaks(0))

    def step(self, number: int, grew: int = 0, kv_cache_share: float | None = None) -> None:
        self.ledger.step = number
        self.rest["actor"] += grew
        self.enter(
            "generate",
            leave=[("actor", "weights"), ("actor", "gradients"), ("actor", "optimizer")],
            come=[("rollout", "kv_cache")],
        )
        self.work("generate", 4.0, 100 * MIB, kv_cache_share)
        self.enter(
            "train_actor",
            leave=[("rollout", "kv_cache")],
            come=[("actor", p) for p in ("weights", "gradients", "optimizer")],
        )
        self.work("train_actor", 6.0, 1000 * MIB)
        self.ledger.counted(
            "train_actor", "actor", {"weights": 250 * MIB, "gradients": 125 * MIB, "optimizer": 800 * MIB}
        )
        self.enter("sync", leave=[("actor", "gradients"), ("actor", "optimizer")], come=[])
        self.work("sync", 1.0, 50 * MIB)

    def enter(self, phase: str, leave: list, come: list) -> None:
        leaving = [key for key in leave if key in self.resident] if self.swap else []
        coming = [key for key in come if key not in self.resident] if self.swap else []
        self.moved = bool(leaving or coming)
        for kind, keys in (("leave", leaving), ("come", coming)):
            for role in dict.fromkeys(key[0] for key in keys):
                self._move(kind, phase, role, [key for key in keys if key[0] == role])
        self.ledger.transition(self.phase, phase, 0.5 * bool(leaving), 0.5 * bool(coming))
        self.phase = phase

    def _move(self, kind: str, phase: str, role: str, keys: list) -> None:
        self.clock += 0.5
        rows = []
        for rank in (0, 1):
            resident = dict(self.resident)
            for key in keys:
                before = self._held(role, resident)
                if kind == "leave":
                    size = resident.pop(key)
                else:
                    size = resident[key] = SIZES[key]
                copied = size if role == "actor" else 0
                rows.append(RankMoved(rank, "a", key[1], size, copied, 0.1, before, self._held(role, resident)))
        self.resident = resident
        self.ledger.moves(kind, phase, role, rows)

    def work(self, phase: str, seconds: float, working: int, kv_cache_share: float | None = None) -> None:
        arrival = self._peaks(0) if self.moved else ()
        self.clock += seconds
        self.ledger.phase(phase, seconds, self._peaks(working, kv_cache_share), arrival)

    def _peaks(self, working: int, kv_cache_share: float | None = None) -> list[RankPeak]:
        """The actor does the work; RSS counts 50 MiB that others count too."""
        peaks = []
        for role in ("actor", "rollout"):
            for rank in (0, 1):
                held = self._held(role, self.resident)
                peak = held + (working + rank * self.more) * (role == "actor") + 50 * MIB
                share = kv_cache_share if role == "rollout" else None
                peaks.append(RankPeak(role, rank, peak, held, 50 * MIB, share))
        return peaks

    def _held(self, role: str, resident: dict) -> int:
        return self.rest[role] + sum(size for key, size in resident.items() if key[0] == role)


def profile(folder: Path, **memory) -> None:
    """What a report reads of a profile."""
    settings = {
        "cluster": {"device": "cpu"},
        "model": {"gradient_checkpointing": False},
        "memory": {"policy": "swap_all", "tier": "file", "device_bytes": "6GiB"} | memory,
        "rollout": {"kv_cache": "500MiB"},
        "train": {"steps": 3, "micro_batch_tokens": 4096},
    }
    (folder / "profile.yaml").write_text(json.dumps(settings))


def add_plan(folder: Path) -> None:
    """Put the plan where the run wrote it: first."""
    ledger = folder / "memory.jsonl"
    ledger.write_text(json.dumps(PLAN) + "\n" + (ledger.read_text() if ledger.exists() else ""))
