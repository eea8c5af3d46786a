"""The weights of a model folder: which files hold them and whether these are whole. Names and headers are read, never weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

Problem = tuple[str, str]
"""Why weights cannot be used, and the fix."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
QUANTISED_TYPES = ("F8", "F6", "F4")
"""First letters of number types that only quantised checkpoints have."""
QUANTISED_NAMES = (
    ".qweight",
    ".qzeros",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".SCB",
    ".absmax",
    ".quant_map",
)
"""Endings of tensor names that only quantised checkpoints have."""
LONGEST_HEADER = 100 * 2**20
"""Bytes; the format allows no longer one."""

UNQUANTISED = "Name the unquantised model."


def weight_files(folder: str | Path) -> list[Path]:
    """The files with the model's weights, chosen as transformers chooses: `model.safetensors`, else those of its index.

    Adapters and copies in another format (`consolidated.safetensors`) that lie beside them are not among them. Empty without weights.
    Raises `ValueError` for an index that is broken, OSError where it cannot be read.
    """
    folder = Path(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    return [folder / name for name in sorted(set(_weight_map(folder).values()))] if (folder / INDEX).is_file() else []


def tensors(file: Path) -> dict[str, dict[str, Any]]:
    """Name -> `{"dtype", "shape", "data_offsets"}` of a safetensors file. Raises `ValueError` when the file is not whole."""
    size = file.stat().st_size
    with open(file, "rb") as f:
        start = f.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ValueError("is a git-lfs pointer and not the file itself")
        if len(start) < 8 or length > min(LONGEST_HEADER, size - 8):
            raise ValueError(f"is cut short or is not a safetensors file ({size} bytes)")
        try:
            header = json.loads(f.read(length))
            found = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = 8 + length + max((entry["data_offsets"][1] for entry in found.values()), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError("has a header that cannot be read") from error
    if end != size:
        raise ValueError(f"has {size} bytes where its header says {end}")
    return found


def weight_elements(folder: str | Path) -> int:
    """Numbers in the weights of a folder, tied tensors once. Raises as `weight_files` and `tensors`."""
    return sum(prod(entry["shape"]) for file in weight_files(folder) for entry in tensors(file).values())


def weights_problem(folder: Path) -> Problem | None:
    """The reason why the weights of a model folder cannot be loaded and trained; None when they can."""
    try:
        files = weight_files(folder)
    except (OSError, ValueError) as error:
        return f"its {INDEX} cannot be used ({error})", "Complete the folder."
    if not files:
        return _other_format(folder) or (f"it has no weights ({SINGLE} or {INDEX})", "Complete the folder.")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        return f"{INDEX} names {_some(missing)}, which the folder lacks", "Complete the folder."
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            found |= tensors(file)
        except (OSError, ValueError) as error:
            fix = "Run git lfs pull in the folder." if "git-lfs" in str(error) else "Copy or download the file again."
            return f"its file {file.name} {error}", fix
    if files[0].name != SINGLE and (lost := sorted(set(_weight_map(folder)) - set(found))):
        return f"{INDEX} names weights that its files lack: {_some(lost)}", "Copy or download the folder again."
    if quantised := next(_quantised(found), None):
        return f"its weights are quantised ({quantised}), and all parameters are trained", UNQUANTISED
    return None


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor name -> file name of a sharded checkpoint."""
    index = json.loads((folder / INDEX).read_bytes())
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise ValueError("it has no weight_map")
    if outside := [file for file in named.values() if os.path.basename(file) != file]:
        raise ValueError(f"it names a file of another folder, {outside[0]}")
    return named


def _quantised(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, entry in found.items():
        kind = str(entry.get("dtype"))
        integers = kind not in FLOATS and name.endswith((".weight", "_proj", "_blocks"))
        if kind.startswith(QUANTISED_TYPES) or name.endswith(QUANTISED_NAMES) or integers:
            yield f"{name} is {kind}"


def is_without_weights(folder: Path) -> bool:
    """Whether a folder has no weights in any format: it says a model's shape, which is enough for a plan."""
    return not any((folder / name).is_file() for name in (SINGLE, INDEX)) and _other_format(folder) is None


def _other_format(folder: Path) -> Problem | None:
    """Why a folder without `model.safetensors` and index has no weights that can be loaded: by what lies there in their place."""

    def there(*patterns: str) -> str | None:
        return next((file.name for pattern in patterns for file in sorted(folder.glob(pattern))), None)

    if there("adapter_config.json", "adapter_model.*"):
        return (
            f"it holds a LoRA adapter{_base_of(folder)} and no model",
            "Merge it first: load it with peft, call merge_and_unload(), save_pretrained the result, and name that folder.",
        )
    if file := there("consolidated*.safetensors", "consolidated*.pth", "original", "*.pth", "params.json"):
        return (
            f"it has no weights in the Hugging Face format ({SINGLE}); {file} is the publisher's own format",
            "Name the folder or hub name of the Hugging Face format.",
        )
    if file := there("*.gguf"):
        return f"it has no weights in the Hugging Face format ({SINGLE}); {file} is llama.cpp's format", UNQUANTISED
    if file := there("pytorch_model*.bin", "*.index.json", "model*.pt", "pytorch_model*"):
        return (
            f"it has no weights in the safetensors format, only {file}",
            f'Convert it once: python -c "from transformers import AutoModelForCausalLM as M; p={str(folder)!r}; '
            "M.from_pretrained(p, dtype='auto').save_pretrained(p)\" (AutoModelForSequenceClassification for a reward model).",
        )
    if file := there("*.safetensors"):
        return (
            f"it has no weights under the names that transformers reads ({SINGLE} or {INDEX}), only {file}",
            "Rename it.",
        )
    return None


def _base_of(folder: Path) -> str:
    try:
        base = json.loads((folder / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f" of {base}"


def _some(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
