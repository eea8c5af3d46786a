"""What plans know about the machine."""

from __future__ import annotations

from hybrid.config import RunConfig
from hybrid.planning.facts import MachineFacts, machine_facts
from hybrid.planning.footprint import Speeds
from hybrid.planning.plan import Predict


def predictor(cfg: RunConfig, gpu: str | None = None) -> tuple[Predict, Speeds]:
    """Predictions for the machine that a resolved `cfg` asks for, and how fast tenants move there: as measured where this one was
    calibrated, else as stated. `gpu`: a name or a size, for a machine that is not this one. Raises `ConfigError` for a GPU that is not
    known."""
    from hybrid.planning.predict import predict

    def for_machine(each: RunConfig):
        return predict(each, machine_facts(each, gpu))

    return for_machine, speeds_of(machine_facts(cfg, gpu))


def speeds_of(facts: MachineFacts) -> Speeds:
    return Speeds(facts.leave_bytes_per_s, facts.come_bytes_per_s)
