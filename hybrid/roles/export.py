"""A trained policy as a Hugging Face folder. The weights are what cannot be made again: they are written first, and nothing later may
lose them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import nn

from hybrid.config.paths import local_model
from hybrid.errors import ExportError
from hybrid.files import nearest_there
from hybrid.roles.export_files import write_small_files
from hybrid.tokenizer import load_tokenizer

SHARD_BYTES = 5 * 10**9
HEADER_BYTES = 2**20
"""Room for the headers, config and tokenizer of an export, beside its weights."""


@dataclass(frozen=True)
class Exported:
    """Where a model was written."""

    folder: str
    problem: str | None = None
    """Why it is not whole, or not where it should be, and how to finish; None: it is."""


def gather(buckets: Iterable, is_writer: bool) -> dict[str, torch.Tensor]:
    """The weights that `buckets` yields, in the writer's host memory; empty elsewhere.

    Every rank iterates the buckets (ZeRO-3 gathers in lockstep).
    """
    state: dict[str, torch.Tensor] = {}
    for bucket in buckets:
        if is_writer:
            state |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket}
    return state


def saved_buffers(hf: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that a checkpoint holds beside the parameters, such as the routing biases of some mixtures of experts."""
    names = hf.state_dict().keys()
    return {name: b.detach().to("cpu", copy=True) for name, b in hf.named_buffers() if name in names}


def take_checkpoint_names(hf: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Give the tensors of `state` the names, and cut them into the pieces, of the checkpoint that `hf` was loaded from, in place.

    Tensor by tensor: a joined tensor is dropped when its pieces are made, and an error leaves every weight in `state`. Beside the weights,
    the pieces of one joined tensor are in memory.
    """
    from transformers.core_model_loading import revert_weight_conversion

    ignored = getattr(hf, "_keys_to_ignore_on_save", None) or ()
    for name in [*state]:
        pieces = {} if name in ignored else revert_weight_conversion(hf, {name: state[name]})
        del state[name]
        state |= pieces
        for piece in [*pieces]:
            del pieces[piece]  # what cut it, too, goes with the last of its pieces
            state[piece] = _owned(state[piece])


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with memory of its own: of tensors that share theirs, or lie in strides, safetensors writes one or none."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def export_model(
    hf: nn.Module,
    state: dict[str, torch.Tensor],
    source: str,
    folder: Path,
    swap_dir: str | None,
    trust_remote_code: bool,
) -> Exported:
    """Write the gathered weights of `hf` as a whole Hugging Face folder; see `write_model`."""
    state |= saved_buffers(hf)
    try:
        take_checkpoint_names(hf, state)
        broken = None
    except Exception as error:  # the weights are worth keeping under any names
        broken = error
    written = write_model(
        state, source, folder, spare_places(swap_dir), trust_remote_code, architecture=type(hf).__name__
    )
    if broken is None:
        return written
    said = f"checkpoint.export: the weights in {written.folder} have the trainer's names, not the checkpoint's: {_said(broken)}."
    return Exported(written.folder, f"{written.problem} {said}" if written.problem else said)


def write_model(
    state: dict[str, torch.Tensor],
    source: str,
    folder: Path,
    spare: Iterable[Path],
    trust_remote_code: bool,
    architecture: str | None = None,
) -> Exported:
    """Write weights, then config and tokenizer of `source`, to `folder`; into a folder of `spare` where there is no room.

    Raises `ExportError` with the numbers when no place takes the weights.
    """
    aside, place = _write_weights(state, [folder.parent, *spare], folder)
    moved = place != folder.parent
    target = place / f"{folder.parent.name}-{folder.name}" if moved else folder
    elsewhere = (
        f"checkpoint.export: {folder} has no room for the model, which is in {target}. Move it where you want it."
    )
    try:
        tokenizer = load_tokenizer(source, trust_remote_code)
        write_small_files(local_model(source), tokenizer, aside, _number_type(state), architecture)
        _finish(aside, target)
    except Exception as error:  # whatever it is, the weights are safe, and where they are must be said
        kept = target.with_name(f"{target.name}-weights")
        kept = _renamed(aside, kept)
        return Exported(
            str(kept),
            f"checkpoint.export: {kept} holds the trained weights, whole, but the export was not finished: {_said(error)}. To finish it, "
            f"copy config.json and the tokenizer's files from {source} into it.",
        )
    return Exported(str(target), elsewhere if moved else None)


def spare_places(swap_dir: str | None) -> list[Path]:
    """Folders on this machine that may have room where the run's folder has none, best first."""
    given = [Path(swap_dir)] if swap_dir else []
    return [*given, Path(tempfile.gettempdir()), Path("/var/tmp"), Path.home(), Path("/dev/shm")]


def state_bytes(state: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _write_weights(state: dict[str, torch.Tensor], places: list[Path], folder: Path) -> tuple[Path, Path]:
    """Write the weights into a hidden folder of the first place that takes them: (that folder, the place)."""
    needed = state_bytes(state) + HEADER_BYTES
    refused: list[str] = []
    full: set[int] = set()
    for place in dict.fromkeys(places):
        aside = place / f".{folder.parent.name}-{folder.name}.part"
        try:
            disk = nearest_there(place)
            free, device = shutil.disk_usage(disk).free, disk.stat().st_dev
            if free < needed or device in full:
                refused += [f"{place} has {_mib(free)} free"] if device not in full else []
                full.add(device)
                continue
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            save_weights(state, aside)
            return aside, place
        except Exception as error:  # OSError, or safetensors' own class for the same
            shutil.rmtree(aside, ignore_errors=True)
            refused.append(f"{place}: {_said(error)}")
    raise ExportError(
        f"checkpoint.export: the model was not written, and is lost: it needs {_mib(needed)}; {'; '.join(refused)}. Free that much on one "
        "of these disks, or name another with memory.swap_dir, and train again."
    )


def save_weights(state: dict[str, torch.Tensor], folder: Path) -> None:
    """The weights as safetensors, in shards where they are large, on the disk when this returns."""
    save_torch_state_dict(state, folder, max_shard_size=SHARD_BYTES, metadata={"format": "pt"})
    _sync(folder)


def _finish(aside: Path, target: Path) -> None:
    """Give the whole folder its name."""
    for file in aside.rglob("*"):
        if file.is_file():
            file.chmod(0o644)  # safetensors writes through a temporary file, for its owner only
    _sync(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    _sync_one(target.parent)


def _renamed(aside: Path, kept: Path) -> Path:
    """`kept`, with what was aside; `aside` where a disk refuses even that."""
    try:
        shutil.rmtree(kept, ignore_errors=True)
        return aside.rename(kept)
    except OSError:
        return aside


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _number_type(state: dict[str, Any]) -> str:
    """The name of the number type that most weights have."""
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in state.values()]
    return max(set(kinds), key=kinds.count)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
