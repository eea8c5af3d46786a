"""The policy's weights under the names that checkpoints and vLLM give them, in buckets of bounded bytes.

transformers joins the experts of a layer into one tensor and renames some weights as it loads. `revert_weight_conversion` takes that back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from hybrid.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One tensor of the model and its parts in a checkpoint: (name, dtype, full shape). `renamed`: its only part is the tensor as it is."""

    name: str
    tensor: torch.Tensor
    parts: tuple[tuple[str, torch.dtype, Shape], ...]
    renamed: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return prod(full_shape(self.tensor)) * self.tensor.element_size()


class WeightBuckets:
    """The weights of `hf` under their checkpoint names, whole on every rank: its parameters, and the buffers that checkpoints keep.

    Iterate on all ranks at once: ZeRO-3 gathers each bucket together. Tied parameters come once. Tensors are valid until the next bucket.
    A bucket holds at most `bucket_bytes`; a larger tensor comes alone. Raises `ConfigError` as `checkpoint_parts`.
    """

    def __init__(self, hf: PreTrainedModel, stage: int, bucket_bytes: int, as_loaded: bool = False):
        """`as_loaded`: yield each tensor whole under its name in `hf`, for `save_pretrained`, which knows the checkpoint's names itself."""
        self.hf = hf
        self.stage = stage
        self.bucket_bytes = bucket_bytes
        self.as_loaded = as_loaded

    @cached_property
    def weights(self) -> list[Weight]:
        """Every weight, in the order of iteration."""
        return checkpoint_parts(self.hf)

    def names_shapes(self) -> list[tuple[str, torch.dtype, Shape]]:
        """(checkpoint name, dtype, full shape) of everything that is sent, in the order of iteration."""
        return [part for weight in self.weights for part in weight.parts]

    def __iter__(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for bucket in self._buckets():
            if self.stage < 3:
                yield self._named(bucket)
                continue
            from deepspeed.runtime.zero import GatheredParameters

            partitioned = [w.tensor for w in bucket if isinstance(w.tensor, nn.Parameter)]
            with GatheredParameters(partitioned, modifier_rank=None):
                yield self._named(bucket)

    def _named(self, bucket: list[Weight]) -> list[tuple[str, torch.Tensor]]:
        if self.as_loaded:
            return [(weight.name, weight.tensor.detach()) for weight in bucket]
        return [pair for weight in bucket for pair in _parts_of(self.hf, weight)]

    def _buckets(self) -> Iterator[list[Weight]]:
        bucket: list[Weight] = []
        size = 0
        for weight in self.weights:
            if bucket and size + weight.nbytes > self.bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(weight)
            size += weight.nbytes
        if bucket:
            yield bucket


def full_shape(tensor: torch.Tensor) -> Shape:
    """The shape of a tensor, also of one that ZeRO-3 partitions."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def checkpoint_parts(hf: PreTrainedModel) -> list[Weight]:
    """Every weight of `hf`, each tied one once, with its names in a checkpoint. Gathers nothing and copies nothing.

    Raises `ConfigError` where a checkpoint joins tensors that transformers keeps apart: they cannot be sent one by one.
    """
    from transformers.core_model_loading import revert_weight_conversion

    weights = []
    for name, tensor in _tensors(hf):
        empty = torch.empty(full_shape(tensor), dtype=tensor.dtype, device="meta")
        reverted = revert_weight_conversion(hf, {name: empty})
        renamed = len(reverted) == 1 and next(iter(reverted.values())) is empty
        weights.append(Weight(name, tensor, tuple((n, t.dtype, tuple(t.shape)) for n, t in reverted.items()), renamed))
    names = [part[0] for weight in weights for part in weight.parts]
    if twice := sorted({n for n in names if names.count(n) > 1} if len(set(names)) < len(names) else ()):
        raise ConfigError(
            f"model_type: {hf.config.model_type} is invalid: its checkpoints join tensors that transformers keeps apart, such as "
            f"`{twice[0]}`, and weights are sent one by one. Name another model."
        )
    return weights


def _tensors(hf: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then the buffers that a checkpoint keeps, such as a router's correction bias."""
    yield from hf.named_parameters()
    for prefix, module in hf.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _parts_of(hf: PreTrainedModel, weight: Weight) -> list[tuple[str, torch.Tensor]]:
    """(checkpoint name, tensor) of a gathered weight. Parts of a joined tensor may be copies; a renamed tensor is itself."""
    if weight.renamed:
        return [(weight.parts[0][0], weight.tensor.detach())]
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(hf, {weight.name: weight.tensor.detach()}).items())
