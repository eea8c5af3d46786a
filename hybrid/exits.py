"""How a command ends: errors of ours as one message and an exit code, signals through every `finally`."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from hybrid.errors import ConfigError, DataError, HybridError


@contextmanager
def errors_for_people() -> Iterator[None]:
    """Errors of ours become one message and an exit code; SIGTERM ends a run like Ctrl-C does, through every `finally`."""
    received: list[int] = []  # what is raised may lose the number on its way through Ray, or arrive as a SystemExit

    def interrupt(signum, frame) -> None:
        received.append(signum)
        raise KeyboardInterrupt

    for name in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(name) is not signal.SIG_IGN:  # nohup asks to be left alone
            signal.signal(name, interrupt)
    try:
        _require_folder()
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes at its end
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:
            received.append(signal.SIGTERM)  # while Ray starts, its own handler exits with the signal's number
        if received or isinstance(error, KeyboardInterrupt):  # what failed after a signal failed for it
            for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(name, signal.SIG_IGN)
            print("interrupted", file=sys.stderr, flush=True)
            raise typer.Exit(128 + (received or [signal.SIGINT])[0]) from None
        if isinstance(error, SystemExit):  # whatever its status: the command did not come to its end
            error = HybridError(f"{_place(error)}: code that hybrid called ended the program ({error!r}). Correct it.")
        if not isinstance(error, HybridError):
            raise
        said = f"error: {error}"  # printed, as typer's echo writes UTF-8 to terminals that do not read it
        print(typer.style(said, fg="red") if sys.stderr.isatty() else said, file=sys.stderr, flush=True)
        raise typer.Exit(2 if isinstance(error, ConfigError | DataError) else 1) from error


def _require_folder() -> None:
    """Raise `ConfigError` where the working directory is gone or closed to us: relative paths, and Ray, need one."""
    try:
        folder = os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"hybrid: the working directory does not exist any more ({error.strerror}). Change to a folder that exists: cd ~."
        ) from error
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"hybrid: the working directory {folder} may not be read. Change to a folder of yours: cd ~.")


def _place(error: BaseException) -> str:
    """`file:line` where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "hybrid"
