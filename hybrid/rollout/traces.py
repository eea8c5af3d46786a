"""The files that vLLM's profiler leaves."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hybrid.errors import RolloutError
from hybrid.telemetry.torch_trace import OpTrace, read_torch_trace


def take_traces(folder: str, prefix: str) -> list[OpTrace]:
    """Traces that vLLM's workers wrote under `prefix` (see `LLM.start_profile`), by rank; the files, and an empty folder, are removed.

    Raises `RolloutError` where there are none: vLLM only logs what kept it from writing them.
    """
    files = sorted(Path(folder).glob(f"{prefix}_*"))
    traces = [read_torch_trace(file) for file in files if file.name.endswith(".json.gz")]
    for file in files:
        file.unlink()
    with suppress(OSError):
        Path(folder).rmdir()
    if not traces:
        raise RolloutError("vLLM's profiler wrote no trace; its output says why.")
    return traces
