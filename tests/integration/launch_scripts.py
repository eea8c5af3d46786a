"""Runs launch scripts, and tells which of their lines ran: each bash that a test starts traces itself into a file."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), ROOT / ".ci" / "run"])
TRACE = """exec 198>>"$HYBRID_TRACE"
BASH_XTRACEFD=198
PS4='+:${BASH_SOURCE}:${LINENO}: '
set -x
"""
"""A BASH_ENV file: every bash that a test starts, and each bash below it, traces its lines."""
SCRATCH = Path(tempfile.mkdtemp(prefix="hybrid-launch-tests-"))
TRACE_FILE = SCRATCH / "trace"
(SCRATCH / "bash_env").write_text(TRACE, encoding="utf-8")
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)

_OURS = (
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "PYTHON",
    "HYBRID_EXTRA",
    "HYBRID_VENV",
    "HYBRID_LAUNCH",
    "TMPDIR",
)
CLEAN = {name: value for name, value in os.environ.items() if name not in _OURS}
CLEAN |= {"BASH_ENV": str(SCRATCH / "bash_env"), "HYBRID_TRACE": str(TRACE_FILE)}
"""The environment in which tests start scripts."""

STRUCTURE = re.compile(r"^(fi|done|esac|else|then|do|\}|\)|;;|\w[\w ]*\(\) \{.*|[\w./*=| \"'-]+\)( ;;)?)$")
"""Lines without a command of their own: ends of blocks, heads of functions, patterns of a case."""


def bash(code: str, script: str = "install.sh", cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """Run shell code after sourcing a launch script (its functions, not its main)."""
    return subprocess.run(
        ["bash", "-c", f"source {ROOT}/launch/{script}; {code}"],
        capture_output=True, text=True, cwd=cwd, env={**CLEAN, **env}, timeout=50, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def silent_lines(script: Path, trace: str) -> list[str]:
    """Commands of `script` that `trace` does not hold, from whichever copy of the checkout it ran: `folder/file:line: text`."""
    name = f"{script.parent.name}/{script.name}"
    pattern = re.compile(rf"^\++:[^:]*(?<![\w.]){re.escape(name)}:(\d+): ", re.MULTILINE)
    ran = {int(number) for number in pattern.findall(trace)}
    return [
        f"{name}:{first}: {text}" for first, last, text in _commands(script) if ran.isdisjoint(range(first, last + 1))
    ]


def _commands(script: Path) -> Iterator[tuple[int, int, str]]:
    """First line, last line and first text of each command. Bash reports the first, or the last where a quoted text goes on."""
    first, started, continues, quote, heredoc = 0, "", False, "", ""
    for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), start=1):
        text = line.strip()
        if heredoc:
            heredoc = "" if text == heredoc else heredoc
            continue
        if not quote and (not text or text.startswith("#")):
            continue
        if not continues and not quote:
            first, started = number, "" if STRUCTURE.match(text.split(" #")[0].strip()) else text
        quote = _open_quote(text, quote)
        continues = not quote and bool(re.search(r"(\\|&&|\|\||\|)$", text.split(" # ")[0].strip()))
        if match := re.search(r"<<'(\w+)'", text):
            heredoc = match[1]
        if started and not continues and not quote:
            yield first, number, started


def _open_quote(text: str, quote: str) -> str:
    """The quotation mark that is still open after `text`."""
    escaped = False
    for place, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and (place == 0 or text[place - 1] == " "):
            break
    return quote
