"""`hybrid doctor`: what is right and wrong here, and with `--gpu` the checks that run on the GPUs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from hybrid.cuda_machine import driver_problem
from hybrid.doctor.check import all_checks
from hybrid.doctor.processes import run_check
from hybrid.doctor.report import Report, closing_line, line_of, list_gpus
from hybrid.errors import ConfigError
from hybrid.files import nearest_there
from hybrid.gpus import has_driver, visible_devices

CPU_PROCESSES = 2
"""Processes of a check that runs one for each GPU, where it is tried on a CPU."""


def gpu_doctor(part: str, file: Path, on_cpu: bool = False, only: str = "") -> int:
    """Run the checks of `part` (core, full or all) whose name begins with `only`; print a line for each and write `file`. 0 when none
    failed, else 1. `on_cpu` tries them in small on the CPU.

    Raises `ConfigError` where there is no GPU that torch can use, or `file` cannot be written.
    """
    if not os.access(nearest_there(file.absolute().parent), os.W_OK) or file.is_dir():
        raise ConfigError(f"--out: {file} is invalid: it cannot be written. Name a file in a folder of yours.")
    if not on_cpu and not has_driver():
        raise ConfigError(
            "doctor --gpu: this machine has no CUDA driver. Call it where GPUs are; `hybrid doctor` alone says what a run on the CPU lacks."
        )
    if not on_cpu and (said := driver_problem()):
        raise ConfigError(said)
    found = list_gpus()
    device, gpus = "cuda", visible_gpus(found)
    if on_cpu:
        device, gpus = "cpu", [str(index) for index in range(CPU_PROCESSES)]
    report = Report(file.absolute(), device, found)
    report.write(finished=False)
    for gpu in found["gpus"] if device == "cuda" else []:
        print(f"{gpu['name']}, {gpu['bytes'] / 2**30:.1f} GiB", flush=True)
    with tempfile.TemporaryDirectory(prefix=".hybrid-doctor-", dir=nearest_there(file.absolute().parent)) as folder:
        for check in all_checks(part):
            if check.name.startswith(only):
                report.add(run_check(check, device, gpus, Path(folder), small=on_cpu))
                print(line_of(report.outcomes[-1]), flush=True)
    report.write(finished=True)
    print(closing_line(report.outcomes, report.file), flush=True)
    return int(any(each.status == "fail" for each in report.outcomes))


def visible_gpus(found: dict[str, Any] | None = None) -> list[str]:
    """Names of the visible GPUs as CUDA_VISIBLE_DEVICES has them. `found`: what `list_gpus` says."""
    return visible_devices() or [str(index) for index in range(len((found or list_gpus())["gpus"]))]
