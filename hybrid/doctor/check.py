"""Define a check. It is a function of a setting that returns figures, or raises `Failed` or `Skipped`. Texts explain its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

Figures = dict[str, Any]
"""Name -> a number (bytes, seconds, bytes per second or shares, as the name says), a text, or what `beside` returns."""
Value = TypeVar("Value")


class Failed(Exception):
    """The check found a fault. Holds one sentence about it and the figures so far."""

    def __init__(self, said: str, figures: Figures | None = None):
        super().__init__(said)
        self.figures = figures or {}


class Skipped(Exception):
    """Why the check says nothing here."""


@dataclass(frozen=True)
class Setting:
    """Where a check runs. A process is `rank` of the `world` processes of a role, one on each GPU; several roles may share the GPUs."""

    device: str
    """cuda or cpu."""
    folder: Path
    """For files of this check, on a disk."""
    rank: int = 0
    world: int = 1
    role: int = 0
    gpus: tuple[str, ...] = ()
    """Names of all GPUs of this check, as in CUDA_VISIBLE_DEVICES."""
    small: bool = False
    """Sizes for a test on a CPU."""

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    def size(self, whole: Value, small: Value) -> Value:
        return small if self.small else whole


@dataclass(frozen=True)
class Check:
    name: str
    proves: str
    """One sentence."""
    means: str
    """One sentence that explains a failure."""
    run: Callable[[Setting], Figures] = field(repr=False)
    part: str = "core"
    """core or full."""
    gpus: int | None = 1
    """How many it uses at most; None: all."""
    everywhere: bool = False
    """One process for each GPU instead of one for all."""
    roles: int = 1
    """Groups of processes on the same GPUs."""
    process_role: str = "critic"
    """Role whose environment the processes get; see `hybrid.environment`."""
    least_gpus: int = 1
    on_cpu: bool = True
    """Whether it says anything on a CPU."""
    deadline_s: float = 300.0


def beside(measured: float, planned: float | None) -> dict[str, float | None]:
    """A figure with the plan's; None where the plan is not known here."""
    return {"measured": measured, "planned": planned}


def expect(holds: bool, said: str, figures: Figures) -> None:
    """Raise `Failed` unless `holds`."""
    if not holds:
        raise Failed(said, figures)


def all_checks(part: str = "all") -> list[Check]:
    """The checks of a part (core, full or all), in the order in which they run."""
    from hybrid.doctor.core import CORE
    from hybrid.doctor.full import FULL

    return [each for each in (*CORE, *FULL) if part in ("all", each.part)]


def find_check(name: str) -> Check:
    return next(each for each in all_checks() if each.name == name)
