"""The plan of a run that is about to start, or the reason why it cannot."""

from __future__ import annotations

from hybrid.config import RunConfig
from hybrid.errors import ConfigError
from hybrid.planning.machine import plan_here
from hybrid.planning.plan import Plan
from hybrid.planning.show import shortage_lines, suggestion_lines


def plan_run(cfg: RunConfig) -> Plan:
    """The plan of a resolved config; its `cfg` has the KV cache and micro-batch that were chosen.

    Raises `ConfigError` when it does not fit: which phase is short by how much, and single changes that would fit.
    """
    plan, found = plan_here(cfg)
    if plan.fits:
        return plan
    raise ConfigError(
        "\n".join(
            [
                f"The run does not fit (memory.policy={cfg.memory.policy}, memory.device_bytes={plan.limits.device_bytes}):",
                *(f"  {line}" for line in shortage_lines(plan)),
                *suggestion_lines(plan, found),
                "All of it: hybrid plan with the same profile.",
            ]
        )
    )
