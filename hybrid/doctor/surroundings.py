"""`hybrid doctor` without a GPU's checks: what of this machine is right and what is not, a line each. Starts no Ray and trains nothing."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from hybrid import cuda_machine
from hybrid.config import machine
from hybrid.errors import SurroundingsError
from hybrid.files import nearest_there
from hybrid.gpus import has_driver
from hybrid.surroundings import check_surroundings

Line = tuple[str, str, str]
"""pass, FAIL or skip; what was looked at; the finding, with the cure where it failed."""
LEAST_FREE_BYTES = 2 * 2**30
"""At the working folder, below which a run's model and records may not fit."""


def look_around() -> Iterator[Line]:
    """One finding after the other."""
    yield from _packages()
    yield _ray()
    build = cuda_machine.vllm_device()
    yield _line(
        "vLLM", None if build else "no build of it is installed. Call bash launch/install.sh.", f"built for {build}"
    )
    if has_driver():
        yield _line("GPUs", cuda_machine.driver_problem(), f"torch uses all {machine.visible_gpus()} of them")
        yield _line("compiler", cuda_machine.compiler_problem(), "a C file with Python.h compiles")
        yield _line("shared memory", cuda_machine.shared_memory_problem(), "/dev/shm has room for NCCL")
    else:
        yield "skip", "GPUs", "no CUDA driver is here: runs use the CPU"
    free = shutil.disk_usage(nearest_there(Path.cwd())).free
    short = f"{Path.cwd()} has {free / 2**30:.1f} GiB free. Make room, or set logging.runs_dir to another disk."
    yield _line("disk", short if free < LEAST_FREE_BYTES else None, f"{free / 2**30:.0f} GiB free here")


def _line(name: str, problem: str | None, right: str) -> Line:
    return ("pass", name, right) if problem is None else ("FAIL", name, problem)


def _ray() -> Line:
    try:
        check_surroundings(None)
    except SurroundingsError as error:
        return "FAIL", "Ray", " ".join(str(error).splitlines())
    return "pass", "Ray", "its folders, token and variables are as it needs them"


def _packages() -> Iterator[Line]:
    """What hybrid asks for of versions, without its extras, against what is installed."""
    try:
        needed = [Requirement(text) for text in metadata.requires("hybrid") or []]
    except (metadata.PackageNotFoundError, InvalidRequirement):
        yield "FAIL", "packages", "hybrid is not installed here. Call bash launch/install.sh."
        return
    wrong = []
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    problem = f"{'; '.join(wrong)}. Call bash launch/install.sh." if wrong else None
    yield _line("packages", problem, f"Python {platform.python_version()} and {len(needed)} requirements are met")
