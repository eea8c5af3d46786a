"""The files of an exported model besides its weights: config, generation config, tokenizer, code.

They are those of the folder that training started from, byte for byte where that is possible: training changes none of them, and what a
library reads it does not always write. `try_export` runs at the start what the end of a run needs.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hybrid.config.generation import repaired_generation_config
from hybrid.config.paths import local_model
from hybrid.errors import UnusableModel
from hybrid.tokenizer import load_tokenizer, tokenizer_files

GENERATION = "generation_config.json"


def write_small_files(
    source: Path, tokenizer: Any, folder: Path, dtype: str, architecture: str | None = None
) -> list[str]:
    """Write everything but the weights into `folder`; returns a note for each file that is not as it was in `source`.

    `dtype`: number type of the exported weights. `architecture`: class of the trained model; None: as config.json says.
    """
    config = json.loads((source / "config.json").read_bytes())
    if "torch_dtype" in config:
        del config["torch_dtype"]  # the older name of the same key
    config["dtype"] = dtype
    if architecture is not None and not isinstance(config.get("auto_map"), dict):
        config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    notes = []
    if (source / GENERATION).is_file():
        values, note = repaired_generation_config((source / GENERATION).read_bytes())
        if note is None:
            shutil.copyfile(source / GENERATION, folder / GENERATION)
        elif values:
            (folder / GENERATION).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        notes += [f"{source / GENERATION} {note}"] if note else []
    for file in tokenizer_files(source, tokenizer):
        target = folder / file.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, target)
    return notes


def try_export(path: str, tokenizer: Any, dtype: str, trust_remote_code: bool) -> list[str]:
    """Write all but the weights of an export to a temporary folder and read it back; returns the notes of `write_small_files`.

    Raises `UnusableModel` when the export of `path` would fail, or make a folder that cannot be read.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="hybrid-export-") as name:
            notes = write_small_files(local_model(path), tokenizer, Path(name), dtype)
            _read_back(name, trust_remote_code)
            again = load_tokenizer(name, trust_remote_code)
    except Exception as error:  # of any library that reads or writes here
        said = str(error.__cause__ or error)
        raise UnusableModel(
            "model.path",
            path,
            f"it could not be exported at the end of the run ({type(error).__name__}: {' '.join(said.split())[:300]})",
            "Correct its files, or set checkpoint.export=false to train without an export.",
        ) from error
    if again.get_vocab() != tokenizer.get_vocab():
        raise UnusableModel(
            "model.path",
            path,
            "its tokenizer, exported and read again, has other tokens",
            "Save the tokenizer with transformers' save_pretrained, or set checkpoint.export=false.",
        )
    return notes


def _read_back(folder: str, trust_remote_code: bool) -> None:
    from transformers import AutoConfig, GenerationConfig

    AutoConfig.from_pretrained(folder, trust_remote_code=bool(trust_remote_code), local_files_only=True)
    if (Path(folder) / GENERATION).is_file():
        GenerationConfig.from_pretrained(folder, local_files_only=True)
