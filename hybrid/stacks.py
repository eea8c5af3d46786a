"""Python stacks of processes that do not answer, taken from outside by py-spy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DUMP_TIMEOUT_S = 20.0
"""Seconds that py-spy may take for a process."""
LINES = 60
"""Lines of a stack that a message shows."""
ATTACH_HINT = (
    "to allow it: run as root, start the container with --cap-add SYS_PTRACE, or set kernel.yama.ptrace_scope=0"
)


def stacks_here(logs: list[Path]) -> list[str]:
    """What each process of this node is doing, or why that cannot be told; in order, at most about DUMP_TIMEOUT_S for all.

    They are found by the pid in the first line of their logs: a silent process cannot be asked. Never raises.
    """
    with ThreadPoolExecutor(max_workers=len(logs)) as pool:
        return list(pool.map(_stack, logs))


def _stack(log: Path) -> str:
    try:
        pid = int(log.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0].removeprefix("pid "))
    except (OSError, ValueError):
        return f"no pid in its output: {log}"
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if tool is None:
        return f"py-spy is not installed; its output: {log}"
    try:
        command = [tool, "dump", "--pid", str(pid)]
        dump = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=DUMP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"py-spy did not end within {DUMP_TIMEOUT_S:.0f} s on pid {pid}; its output: {log}"
    if dump.returncode == 0:
        return "\n".join(dump.stdout.splitlines()[:LINES])
    reason = next(iter(dump.stderr.strip().splitlines()), f"exit code {dump.returncode}")
    hint = f" ({ATTACH_HINT})" if "ermission" in dump.stderr or "ptrace" in dump.stderr else ""
    return f"py-spy may not attach to pid {pid}: {reason}{hint}; its output: {log}"
