"""Words of the memory scheduler: phases, tenants, what each phase needs, which phase may follow which, and what a move reports.

A tenant is a part of a role that moves as one: `actor/optimizer`. Bytes of a move are *counted* (storages) and *measured* (process).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

Key = tuple[str, str]
"""(role, part), e.g. ("actor", "optimizer")."""

PHASES = ("init", "generate", "score", "forward", "train_critic", "train_actor", "sync", "checkpoint", "evaluate")

_ROLLOUT = (("rollout", "weights"), ("rollout", "kv_cache"))

NEEDS: dict[str, tuple[Key, ...]] = {
    "init": (),
    "generate": _ROLLOUT,
    "evaluate": _ROLLOUT,
    "score": (("reward", "weights"),),
    "forward": (("actor", "weights"), ("reference", "weights"), ("critic", "weights")),
    "train_critic": (("critic", "weights"), ("critic", "gradients"), ("critic", "optimizer")),
    "train_actor": (("actor", "weights"), ("actor", "gradients"), ("actor", "optimizer")),
    "sync": (("actor", "weights"), ("rollout", "weights")),
    "checkpoint": (("actor", "weights"), ("actor", "optimizer")),
}
"""Tenants that a phase works with; those that a run does not have are passed over. A phase that needs none moves none."""

_TRAINER = ("score", "forward", "train_critic", "train_actor", "sync", "checkpoint")

FOLLOWS: dict[str, tuple[str, ...]] = {
    "init": ("generate", "evaluate", *_TRAINER),
    "generate": ("generate", "evaluate", *_TRAINER),
    "evaluate": ("generate", "evaluate", *_TRAINER),
    "score": ("generate", "evaluate", *_TRAINER),
    "forward": _TRAINER,
    "train_critic": _TRAINER,
    "train_actor": _TRAINER,
    "sync": ("generate", "evaluate", *_TRAINER),
    "checkpoint": ("generate", "evaluate", *_TRAINER),
    "failed": ("sync", "checkpoint"),
}
"""Legal next phases. Training is never followed by generating: the engines would sample from old weights."""

REBUILT_IN: dict[Key, str] = {("rollout", "weights"): "sync"}
"""Tenants that lose their contents when they leave, and the only phase that may bring them back, because it fills them."""

LEAVES_WITH: dict[Key, Key] = {("rollout", "weights"): ("rollout", "kv_cache")}
"""Tenants that cannot leave while another stays: vLLM's deep sleep takes both."""

START_ORDER = ("rollout", "actor", "critic", "reference", "reward")
"""Roles load one after another in phase init: engines first, because vLLM measures what is free."""

ARRIVAL_ORDER = ("critic", "reference", "reward", "actor", "rollout")
"""Roles come one after another, the engines last; they leave in the opposite order, because an engine that falls asleep must
not see anybody else allocate."""


@dataclass(frozen=True)
class Tenant:
    """A part of a role. `movable` is false where the platform cannot move it (engine weights on CPU).

    `counted_bytes` is the size in the largest rank where the owner knows it without moving, else None.
    """

    role: str
    part: str
    movable: bool = True
    counted_bytes: int | None = None

    @property
    def key(self) -> Key:
        return (self.role, self.part)


class NamedStorage(NamedTuple):
    """A storage and the name a message should call it by, e.g. "optimizer.exp_avg.0"."""

    name: str
    storage: torch.UntypedStorage


@dataclass(frozen=True)
class Moved:
    """One part that left or came in this process. Bytes; `copied_bytes` is what went to or from the tier (0 when nothing had to)."""

    part: str
    counted_bytes: int
    copied_bytes: int
    seconds: float


@dataclass(frozen=True)
class RankMoved:
    """`Moved` in one rank, with the process's measured bytes before and after (see `probe.measured_bytes`)."""

    rank: int
    node: str
    part: str
    counted_bytes: int
    copied_bytes: int
    seconds: float
    before_bytes: int
    after_bytes: int


@dataclass(frozen=True)
class RankPeak:
    """Highest memory of one process since it was last asked, and what it holds now, in bytes; None where that is not known.

    On CPU `peak_bytes` is RSS and `held_bytes` PSS: `shared_bytes` is the RSS now beyond the PSS, which the peak counts too much where
    processes are added up. `kv_cache_share`, of an engine: tokens that it held at most over those that fit.
    """

    role: str
    rank: int
    peak_bytes: int
    held_bytes: int | None = None
    shared_bytes: int | None = None
    kv_cache_share: float | None = None


class Mover(Protocol):
    """All ranks of a role, or all engines. Calls return when every rank has answered, and raise when one has not in `deadline_s`."""

    def tenants(self) -> list[Tenant]: ...

    def leave(self, parts: Sequence[str], deadline_s: float) -> list[RankMoved]: ...

    def come(self, parts: Sequence[str], deadline_s: float) -> list[RankMoved]: ...
