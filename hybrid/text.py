"""Text in and out whatever the locale: files, names and arguments are UTF-8, and a terminal gets what it can show.

Python takes both from the locale, which is plain ASCII in a container or a job that sets `LC_ALL=C` with UTF-8 mode off.
"""

from __future__ import annotations

import os
import sys

ESCAPE = "backslashreplace"


def use_utf8() -> None:
    """Start this program again in Python's UTF-8 mode where names of files are in another encoding; returns where they are not.

    Everything that the program starts inherits the mode. What the terminal can show stays: see `escape_output`.
    """
    refused = sys.flags.ignore_environment or "utf8" in sys._xoptions or os.environ.get("PYTHONUTF8") == "1"
    if refused or sys.flags.utf8_mode or sys.getfilesystemencoding().lower() in ("utf-8", "utf8"):
        return
    shown = getattr(sys.stdout, "encoding", None) or "ascii"
    os.environ |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": f"{shown}:{ESCAPE}"}
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def escape_output() -> None:
    """Characters that stdout and stderr cannot show are escaped from now on, also in processes that this one starts."""
    _reconfigure(errors=ESCAPE)
    if given := os.environ.get("PYTHONIOENCODING"):
        os.environ["PYTHONIOENCODING"] = f"{given.partition(':')[0]}:{ESCAPE}"


def log_in_utf8() -> None:
    """stdout and stderr of this process, and of those that it starts, go to a file of ours: they are UTF-8."""
    _reconfigure(encoding="utf-8", errors=ESCAPE)
    os.environ |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": f"utf-8:{ESCAPE}"}


def _reconfigure(**options: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not where a test or a notebook has put its own there
            stream.reconfigure(**options)
