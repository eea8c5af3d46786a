"""A trained policy as a Hugging Face folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer, GenerationConfig


def export_model(hf: nn.Module, buckets, source: str, folder: Path, is_writer: bool) -> None:
    """Write `hf` with the weights that `buckets` yields, and the tokenizer of `source`, to `folder`; whole or not at all.

    Every rank iterates the buckets (ZeRO-3 gathers in lockstep); the writer keeps them in host memory.
    """
    state: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        if is_writer:
            state |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket}
    if not is_writer:
        return
    aside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    hf.save_pretrained(aside, state_dict=state)
    AutoTokenizer.from_pretrained(source).save_pretrained(aside)
    if hf.can_generate() and (Path(source) / "generation_config.json").exists():
        GenerationConfig.from_pretrained(source).save_pretrained(aside)
    for file in aside.iterdir():
        file.chmod(0o644)  # safetensors writes through a temporary file, for its owner only
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
