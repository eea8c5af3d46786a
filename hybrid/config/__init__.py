"""One pydantic model of a run: `load_run` reads a profile, `resolve` replaces every `auto`."""

from hybrid.config.load import check, dump, load_run
from hybrid.config.paths import is_hub_name, model_source, resolve_path, swap_folder
from hybrid.config.placement import Place, placement
from hybrid.config.resolve import resolve
from hybrid.config.run import SECTIONS, RunConfig
from hybrid.config.start_rules import check_start

__all__ = [
    "SECTIONS",
    "Place",
    "RunConfig",
    "check",
    "check_start",
    "dump",
    "is_hub_name",
    "load_run",
    "model_source",
    "placement",
    "resolve",
    "resolve_path",
    "swap_folder",
]
