"""Roles that move nothing but write down what they were asked, and a scheduler of them: fixtures of the scheduler's tests."""

from __future__ import annotations

import pytest

from hybrid.memory.ledger import Ledger
from hybrid.memory.residency import swap_all
from hybrid.memory.scheduler import MemoryScheduler
from hybrid.memory.tenants import RankMoved, Tenant

GIB = 2**30
TRAINED = ("weights", "gradients", "optimizer")


class Fake:
    """Two ranks that move nothing but write down what they were asked; `falls` is the share of counted bytes that really goes."""

    def __init__(self, log, role, parts, fixed=(), falls=1.0):
        self.log, self.role, self.parts, self.fixed, self.falls = log, role, parts, fixed, falls
        self.error = {}
        self.kept = 0
        self.deadlines = []

    def tenants(self):
        return [Tenant(self.role, part, movable=part not in self.fixed) for part in self.parts]

    def leave(self, parts, deadline_s):
        return self._answer("leave", parts, deadline_s)

    def come(self, parts, deadline_s):
        return self._answer("come", parts, deadline_s)

    def _answer(self, kind, parts, deadline_s):
        self.log.append((kind, self.role, *parts))
        self.deadlines.append(deadline_s)
        if kind in self.error:
            raise self.error[kind]
        rows = []
        for rank in (0, 1):
            at = 10 * GIB + self.kept
            for part in parts:
                after = at - int(GIB * (self.falls if rank else 1.0))
                rows.append(RankMoved(rank, f"node{rank}", part, GIB, GIB, 0.1, at, after))
                at = after
        return rows


@pytest.fixture
def log():
    return []


@pytest.fixture
def roles(log):
    """PPO on CUDA: everything moves."""
    return {
        "rollout": Fake(log, "rollout", ("weights", "kv_cache")),
        "actor": Fake(log, "actor", TRAINED),
        "critic": Fake(log, "critic", TRAINED),
        "reference": Fake(log, "reference", ("weights",)),
        "reward": Fake(log, "reward", ("weights",)),
    }


@pytest.fixture
def make(tmp_path, log):
    def scheduler(roles, residency=None, **options):
        tenants = [t for fake in roles.values() for t in fake.tenants()]
        residency = residency or swap_all([t.key for t in tenants], [t.key for t in tenants if t.movable])
        made = MemoryScheduler({}, residency=residency, ledger=Ledger(tmp_path / "memory.jsonl"), **options)
        for role, fake in roles.items():
            made.adopt(role, fake)
        return made

    return scheduler


def walk(scheduler, log, *phases):
    """Moves on the way into each phase."""
    moves = {}
    for phase in phases:
        log.clear()
        scheduler.enter(phase)
        moves[phase] = list(log)
    return moves
