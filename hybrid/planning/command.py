"""`hybrid plan`: needs no GPU and loads no weights."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from rich.console import Console

from hybrid.config import RunConfig, load_run, resolve
from hybrid.config.load import check_report
from hybrid.config.resolve import GPU_SHARE
from hybrid.config.start_rules import unusable_weights
from hybrid.errors import ConfigError
from hybrid.planning.calibration import calibrate
from hybrid.planning.known_gpus import find_gpu
from hybrid.planning.machine import plan_here
from hybrid.planning.rows import as_json
from hybrid.planning.show import NO_BREAK, human, show, suggestion_lines
from hybrid.rewards.load import started_functions
from hybrid.start_check import check_models

WIDTH = 160
"""Columns of the tables where the output is no terminal."""


def plan_command(
    profile: Path,
    overrides: list[str],
    *,
    json_wanted: bool = False,
    gpu: str | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    calibrate_first: bool = False,
) -> int:
    """Print the plan of a profile; 0 when it fits, 2 when not. Raises `ConfigError` as `load_run` and where sizes are not known, and what
    `calibrate` raises."""
    # Overrides last: what is suggested can be added to the command as it was given.
    cfg = resolve(load_run(profile, [*machine_overrides(gpu, nodes, gpus_per_node), *overrides]))
    # A plan says what a start would refuse; prints of the user's files are not part of it.
    with redirect_stdout(sys.stderr), started_functions(cfg):
        check_report(cfg, list(unusable_weights(cfg, shape_is_enough=True)))
        check_models(cfg)
    if gpu is not None and cfg.model.dtype == "bfloat16" and not find_gpu(gpu).has_bf16:
        raise ConfigError(
            f"--gpu {gpu}: it has no bf16. Add model.dtype=float32, or take a GPU of compute capability 8.0 or more."
        )
    if calibrate_first:
        calibrate(cfg)
    plan, found = plan_here(cfg, gpu)
    if json_wanted:
        ways = [{"overrides": list(s.overrides), "seconds_per_step": s.plan.seconds_per_step} for s in found]
        print(json.dumps(as_json(plan) | {"suggestions": ways}, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, soft_wrap=False)
        with console.capture() as shown:
            show(plan, console)
            for line in [] if plan.fits else suggestion_lines(plan, found):
                console.print(line, markup=False)
            for note in [*plan.cfg.notes, *_reserve(gpu, plan.cfg)]:
                console.print(f"note: {note}", markup=False)
        print(shown.get().replace(NO_BREAK, " "), end="")  # it kept numbers and units together; searches do not find it
    return 0 if plan.fits else 2


def _reserve(gpu: str | None, cfg: RunConfig) -> list[str]:
    """Why the GPU that was named has less memory in the plan than on its data sheet."""
    named = gpu and find_gpu(gpu)
    if not named or cfg.memory.device_bytes != int(GPU_SHARE * named.nbytes):
        return []
    return [
        f"of the {human(named.nbytes)} of {named.name} a plan fills at most {GPU_SHARE:.0%}, as predictions have errors; "
        "memory.device_bytes sets another bound."
    ]


def machine_overrides(gpu: str | None, nodes: int | None = None, gpus_per_node: int | None = None) -> list[str]:
    """Overrides that describe the machine to plan for."""
    given = {"cluster.num_nodes": nodes, "cluster.gpus_per_node": gpus_per_node}
    if gpu is not None:
        given |= {"cluster.device": "cuda", "memory.device_bytes": int(GPU_SHARE * find_gpu(gpu).nbytes)}
    if (nodes or 1) > 1:
        given["cluster.address"] = "auto"
    return [f"{key}={value}" for key, value in given.items() if value is not None]
