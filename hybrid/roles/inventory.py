"""What a role holds on its device, storage by storage."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hybrid.memory.tenants import NamedStorage


def inventory(module: nn.Module, optimizer: object | None) -> dict[str, list[NamedStorage]]:
    """Storages of a role by part, each once.

    weights: parameters, ZeRO-3 shards, buffers. gradients: what lives between backward and step, and ZeRO's communication buffers (they
    hold no state between steps). optimizer: masters and moments. DeepSpeed has no public list of these, so the optimizer object is
    walked; a test compares the result with every tensor of the process.
    """
    parts: dict[str, dict[int, NamedStorage]] = {"weights": {}, "gradients": {}, "optimizer": {}}
    seen: set[int] = set()

    def add(part: str, name: str, tensor: torch.Tensor | None) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            parts[part][storage._cdata] = NamedStorage(name, storage)

    for name, p in module.named_parameters():
        add("weights", name, p.data)
        add("weights", f"{name}.shard", getattr(p, "ds_tensor", None))
        add("weights", f"{name}.secondary", getattr(p, "ds_secondary_tensor", None))
    for name, b in module.named_buffers():
        add("weights", name, b)
    for name, p in module.named_parameters():
        add("gradients", f"{name}.grad", p.grad)
    if optimizer is not None:
        for name, tensor in _tensors_of(optimizer, "", set()):
            add(_part_of(name), name.lstrip("."), tensor)
            add("gradients", f"{name.lstrip('.')}.grad", tensor.grad if tensor.is_leaf else None)
    return {part: list(storages.values()) for part, storages in parts.items()}


def _part_of(name: str) -> str:
    lowered = name.lower()
    if "bit16" in lowered or "fp16" in lowered or "lp_param" in lowered:
        return "weights"
    return "gradients" if any(word in lowered for word in ("grad", "ipg", "bucket", "reduce", "comm")) else "optimizer"


def _tensors_of(value: object, name: str, visited: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors reachable through containers, DeepSpeed's and torch's optimizers, with the path to each."""
    if isinstance(value, nn.Module) or id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_of(item, f"{name}.{key if isinstance(key, (str, int)) else ''}", visited)
    elif isinstance(value, (list, tuple, set)):
        for index, item in enumerate(value):
            yield from _tensors_of(item, f"{name}.{index}", visited)
    elif isinstance(value, torch.optim.Optimizer) or type(value).__module__.startswith("deepspeed.runtime"):
        for key, item in vars(value).items():
            yield from _tensors_of(item, f"{name}.{key}", visited)
