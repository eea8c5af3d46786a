"""Plans for a machine: what is known of it, and what would make a run fit that does not."""

from __future__ import annotations

from dataclasses import replace

from hybrid.config import RunConfig
from hybrid.planning.calibration import stored
from hybrid.planning.facts import CALL_S, MachineFacts, stated_facts
from hybrid.planning.footprint import Speeds
from hybrid.planning.plan import Plan, Predict, choose
from hybrid.planning.suggest import Suggestion, suggestions


def plan_here(cfg: RunConfig, gpu: str | None = None) -> tuple[Plan, list[Suggestion]]:
    """The plan of a resolved `cfg`, and single changes with which it would fit where it does not. Sizes and speeds as `predictor`.

    Raises `ConfigError` where sizes are not known."""
    predict, speeds = predictor(cfg, gpu)
    plan = choose(cfg, predict, speeds)
    return plan, [] if plan.fits else suggestions(plan, predict, speeds)


def predictor(cfg: RunConfig, gpu: str | None = None) -> tuple[Predict, Speeds]:
    """Predictions for the machine that a resolved `cfg` asks for, and how fast tenants move there: as measured where this one was
    calibrated, else as stated. `gpu`: a name or a size, for a machine that is not this one. Raises `ConfigError` for a GPU that is not
    known."""
    from hybrid.planning.predict import predict

    measured = stored() if gpu is None else None

    def facts(each: RunConfig) -> MachineFacts:
        stated = stated_facts(each, gpu)
        return stated if measured is None else replace(stated, **measured.of(stated.device, each))

    here = facts(cfg)
    return lambda each: predict(each, facts(each)), Speeds(here.leave_bytes_per_s, here.come_bytes_per_s, CALL_S)
