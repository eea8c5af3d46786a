"""What a timeline is made of: spans of time in which a GPU held the same tenants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybrid.reports.read import Row

ENGINE = "rollout"
INIT = "init"


@dataclass
class Span:
    """From `start` to `end` (seconds since the run's start) the GPU held `tenants` (bytes by "role/part").

    `kind`: "phase"; "move", on the way into `phase`; "between", when the driver works after `phase`. By role: `peaks` is what its process
    held at most, `rests` what it was last seen to hold beside its tenants. Where nothing was measured, `measured` is None.
    """

    kind: str
    phase: str
    step: int
    start: float
    end: float
    tenants: dict[str, int]
    peaks: dict[str, int] = field(default_factory=dict)
    rests: dict[str, int] = field(default_factory=dict)
    measured: int | None = None
    working: int = 0
    overhead: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def counted(self) -> int:
        return sum(self.tenants.values())

    @property
    def total(self) -> int:
        return self.counted + self.working + self.overhead


@dataclass(frozen=True)
class Rest:
    """What a process held beside its tenants, measured when both were known."""

    step: int
    role: str
    bytes: int


@dataclass(frozen=True)
class Place:
    """One of `gpus`, by its rank, and how many GPUs an engine spans."""

    gpu: int
    gpus: int
    tensor_parallel: int

    def holds(self, row: Row) -> bool:
        """Does the process of `row` (role, rank) live here?"""
        return row["rank"] == (self.gpu // self.tensor_parallel if row["role"] == ENGINE else self.gpu)

    def share(self, role: str, size: int) -> int:
        """This GPU's part of a process's bytes."""
        return size // self.tensor_parallel if role == ENGINE else size


@dataclass(frozen=True)
class Timeline:
    """`place` is the GPU whose processes held most. `rests` come in order of time."""

    place: Place
    spans: tuple[Span, ...]
    rests: tuple[Rest, ...]
    failure: Row | None


def of_role(tenants: dict[str, int], role: str) -> int:
    """Bytes of `role`'s tenants."""
    return sum(size for tenant, size in tenants.items() if tenant.split("/", 1)[0] == role)


def attribute(spans: Sequence[Span]) -> None:
    """Split what was measured beside tenants into `working` and `overhead`, in place.

    A process whose rest was never measured rests at the least that it held beside its tenants in any phase. Spans without a measure have
    the overhead of the phase before.
    """
    measured = [span for span in spans if span.kind == "phase" and span.measured is not None]
    least: dict[str, int] = {}
    for span in measured:
        for role, peak in span.peaks.items():
            beside = max(0, peak - of_role(span.tenants, role))
            least[role] = min(beside, least.get(role, beside))
    for span in measured:
        for role, peak in span.peaks.items():
            rest = span.rests.get(role, least[role])
            span.working += max(0, peak - of_role(span.tenants, role) - rest)
        span.working = min(span.working, max(0, span.measured - span.counted))
        span.overhead = max(0, span.measured - span.counted - span.working)
    overhead = next((span.overhead for span in measured if span.phase != INIT), 0)
    for span in spans:
        if span not in measured:
            span.overhead = overhead
        elif span.phase != INIT:
            overhead = span.overhead
