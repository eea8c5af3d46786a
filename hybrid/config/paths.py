"""Where a relative path of a profile points to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.config.run import RunConfig

NOT_ON_THE_HUB = ("models", "datasets", "runs", "profiles", "data")
"""First parts of a path that can be no owner on the hub (its own addresses), or that nobody means as one."""


def path_roots(cfg: RunConfig) -> list[Path]:
    """Folders that a relative path is looked for in: the working directory, the profile's folder, and that folder's
    parent, so that `models/x` in `profiles/y.yaml` is found from anywhere."""
    profile_dir = cfg.profile_dir.absolute()
    return [Path.cwd(), profile_dir, profile_dir.parent]


def swap_folder(cfg: RunConfig) -> Path:
    """Where the file tier of a resolved `cfg` lies: memory.swap_dir, else `swap` in the run's folder."""
    return Path(cfg.memory.swap_dir or Path(cfg.logging.runs_dir) / cfg.logging.name / "swap")


def resolve_path(cfg: RunConfig, value: str) -> Path:
    """Absolute path of `value`: in the first of `path_roots` that has it, else in the working directory."""
    path = Path(value).expanduser()
    if path.is_absolute():
        return path
    return next((root / path for root in path_roots(cfg) if (root / path).exists()), Path.cwd() / path)


def is_hub_name(cfg: RunConfig, value: str) -> bool:
    """True for what can only be a name on the Hugging Face hub: `owner/name` or `name`, and no folder here is called
    `owner`."""
    if not re.fullmatch(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*", value):
        return False
    owner = value.split("/")[0] if "/" in value else None
    return owner not in NOT_ON_THE_HUB and not (owner and any((root / owner).is_dir() for root in path_roots(cfg)))


def local_model(path: str) -> Path:
    """The folder with a model's files: `path`, or where the hub's cache keeps it. Raises `FileNotFoundError` where it is not here."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download  # not needed for folders

    return Path(snapshot_download(path, local_files_only=True))


def model_source(cfg: RunConfig, value: str) -> str:
    """What to give to transformers and vLLM: the absolute folder where there is one, else the hub name as it is."""
    path = resolve_path(cfg, value)
    return str(path) if path.exists() else value
