"""What a residency takes: bytes on the device at every moment that counts, bytes in the slow tier, moves and their seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybrid.memory.residency import Residency
from hybrid.memory.tenants import NEEDS, START_ORDER, Key
from hybrid.planning.prediction import LOADING, Prediction, TenantSize
from hybrid.planning.walk import Walk


@dataclass(frozen=True)
class Limits:
    """Bytes that a GPU may hold, and per node bytes that tenants may take in the slow tier (None: without bound)."""

    device_bytes: int
    tier_bytes: int | None


@dataclass(frozen=True)
class Speeds:
    """Bytes per second that one GPU moves to the slow tier and back while all GPUs of its node do. `call_s`: seconds of any move, whatever
    its bytes: telling the ranks, waiting for the last, and measuring each before and after."""

    leave_bytes_per_s: float
    come_bytes_per_s: float
    call_s: float = 0.0

    def leave_seconds(self, tenant: TenantSize) -> float:
        return self.call_s + tenant.leave_bytes / self.leave_bytes_per_s

    def come_seconds(self, tenant: TenantSize) -> float:
        return self.call_s + tenant.come_bytes / self.come_bytes_per_s


@dataclass(frozen=True)
class Moment:
    """A time at which the device may be at its fullest: `present` is there in any case, of `choosable` what the residency of `phase` has.

    A phase is one moment; `init` is one for every role that loads, while the roles before it have left or stay.
    """

    phase: str
    present: frozenset[Key]
    choosable: frozenset[Key]
    what: str

    def keys(self, residency: Residency) -> frozenset[Key]:
        return self.present | (self.choosable & residency[self.phase])


@dataclass(frozen=True)
class Move:
    """A tenant that leaves or comes; bytes that are copied per GPU, and their seconds."""

    key: Key
    kind: str
    nbytes: int
    seconds: float


def moments(prediction: Prediction, phases: Iterable[str]) -> list[Moment]:
    """Moments of `phases`."""
    everything = frozenset(t.key for t in prediction.tenants)
    found = [Moment(phase, frozenset(), everything, phase) for phase in phases if phase != "init"]
    earlier: frozenset[Key] = frozenset()
    for role in START_ORDER:
        own = frozenset(key for key in everything if key[0] == role)
        if own:
            found.append(Moment("init", own, earlier, f"{LOADING}{role}"))
        earlier |= own
    return found


def working_parts(prediction: Prediction, moment: Moment) -> dict[str, int]:
    """The working set at `moment`, in bytes by name; of what loading takes, that of the role which loads."""
    parts = next((use.parts for use in prediction.phases if use.phase == moment.phase), {})
    return {name: size for name, size in parts.items() if not name.startswith(LOADING) or name == moment.what}


def base_bytes(prediction: Prediction, moment: Moment) -> int:
    """Bytes on the device at `moment` besides tenants: overhead and working set."""
    return sum(prediction.overhead.values()) + sum(working_parts(prediction, moment).values())


def device_bytes(prediction: Prediction, keys: Iterable[Key]) -> int:
    wanted = frozenset(keys)
    return sum(t.device_bytes for t in prediction.tenants if t.key in wanted)


def peak(prediction: Prediction, residency: Residency, phase: str) -> tuple[int, Moment]:
    """Highest bytes of `phase`, and the moment that has them."""
    sizes = [
        (base_bytes(prediction, m) + device_bytes(prediction, m.keys(residency)), m)
        for m in moments(prediction, [phase])
        if m.phase == phase
    ]
    return max(sizes, key=lambda pair: pair[0])


def least_keys(prediction: Prediction, moment: Moment) -> frozenset[Key]:
    """Tenants that are there at `moment` whatever moves: those loading, those needed, those that cannot move."""
    fixed = {t.key for t in prediction.tenants if not t.movable} | set(NEEDS[moment.phase])
    return moment.present | (moment.choosable & fixed)


def tier_bytes(prediction: Prediction, residency: Residency) -> int:
    """Bytes per node of the copies of what ever leaves."""
    stays = frozenset.intersection(*residency.values())
    return prediction.gpus_per_node * sum(t.host_bytes for t in prediction.tenants if t.movable and t.key not in stays)


def moves(prediction: Prediction, residency: Residency, previous: str, phase: str, speeds: Speeds) -> list[Move]:
    """What moves between two phases, in the tenants' order; into `init` from nowhere (`previous` "start") what leaves after loading."""
    everything = frozenset(t.key for t in prediction.tenants)
    before = everything if previous == "start" else residency[previous]
    leaving, coming = before - residency[phase], residency[phase] - before
    return [
        *(Move(t.key, "leave", t.leave_bytes, speeds.leave_seconds(t)) for t in prediction.tenants if t.key in leaving),
        *(Move(t.key, "come", t.come_bytes, speeds.come_seconds(t)) for t in prediction.tenants if t.key in coming),
    ]


def seconds_per_step(prediction: Prediction, residency: Residency, walk: Walk, speeds: Speeds) -> float:
    """Seconds of movement per step, those of start and end for their share."""
    return sum(
        times * move.seconds
        for (previous, phase), times in walk.items()
        for move in moves(prediction, residency, previous, phase, speeds)
    )
