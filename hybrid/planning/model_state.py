"""What the state of a model in training takes on one GPU under ZeRO: the paper's arithmetic, and DeepSpeed's as this project runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from hybrid.planning.shapes import ModelShapes

MASTER_BYTES, MOMENTS_BYTES = 4, 8
"""Of an fp32 master, and of Adam's two fp32 moments, per parameter."""
ALIGNMENT = 2
"""DeepSpeed pads a flat group to this many elements per rank (`nccl_start_alignment_factor`)."""
SUM_BYTES = 4
"""Bytes of a gradient element that adds up over micro-batches, in fp32 whatever the model's type."""
PERSISTENT_ELEMENTS = 100_000
"""ZeRO-3 keeps parameters of at most so many elements whole on every rank (`stage3_param_persistence_threshold`)."""


@dataclass(frozen=True)
class ModelState:
    """Bytes on one GPU."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def model_state_bytes(
    params: int,
    world: int,
    stage: int,
    *,
    weight_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = 12,
) -> ModelState:
    """Bytes per GPU of `params` parameters in training over `world` GPUs at ZeRO `stage` 0-3, per ZeRO (Rajbhandari et al. 2020,
    arXiv:1910.02054, figure 1): stage 1 shards the optimizer, 2 gradients too, 3 weights too.

    The defaults are mixed precision with Adam: weights and gradients of 2 bytes, an fp32 master and two fp32 moments. DeepSpeed's own
    estimators count gradients otherwise: `estimate_zero2_model_states_mem_needs` an fp32 copy besides (`gradient_bytes=6`), zero3's,
    apart from its largest layer, fp32 alone (`gradient_bytes=4`). Raises ValueError for another stage or an empty world.
    """
    if stage not in (0, 1, 2, 3) or world < 1:
        raise ValueError(f"ZeRO stage {stage} on {world} GPUs: the stage is 0, 1, 2 or 3, on at least one GPU.")
    shard = lambda size, first_stage: -(-size // world) if stage >= first_stage else size  # noqa: E731
    return ModelState(
        shard(params * weight_bytes, 3), shard(params * gradient_bytes, 2), shard(params * optimizer_bytes, 1)
    )


@dataclass(frozen=True)
class Partition:
    """A model in training as DeepSpeed lays it out: elements, all groups together. `whole` is what a rank holds of unsharded weights,
    `share` what it steps, padding included; `persistent` is what ZeRO-3 keeps whole besides its share; `bucket` what ranks exchange
    at a time."""

    stage: int
    whole: int
    share: int
    persistent: int
    bucket: int
    gradients: int
    """Elements of the parameters that lie in a rank's share, in the fullest rank: those across its ends count whole."""
    groups: int = 1
    """Flat groups at stages 1 and 2."""


def partition(model: ModelShapes, world: int, stage: int, has_decay: bool) -> Partition:
    """How `roles.zero.TrainedModel` partitions `model`. `has_decay`: matrices and vectors are groups of their own."""
    from hybrid.roles.zero import BUCKET_MULTIPLE, LARGEST_BUCKET

    bucket = min(LARGEST_BUCKET, -(-model.elements // BUCKET_MULTIPLE) * BUCKET_MULTIPLE)
    if stage == 0:
        return Partition(stage, model.elements, model.elements, 0, bucket, model.elements)
    if stage == 3:
        share = shard_elements(model.sizes, world)
        return Partition(stage, model.elements, share, persistent_elements(model), bucket, share)
    groups = _groups(model, has_decay)
    padded = [-(-sum(group) // (ALIGNMENT * world)) * ALIGNMENT * world for group in groups]
    fullest = max(
        sum(
            _overlapping(group, rank * size // world, (rank + 1) * size // world) for group, size in zip(groups, padded)
        )
        for rank in range(world)
    )
    return Partition(stage, sum(padded), sum(padded) // world, 0, bucket, fullest, len(groups))


def shard_elements(sizes: Sequence[int], world: int) -> int:
    """Elements of a rank's shards when each parameter is cut alone, as ZeRO-3 does."""
    return sum(-(-n // world) for n in sizes)


def persistent_elements(model: ModelShapes) -> int:
    return sum(n for n in model.sizes if n <= PERSISTENT_ELEMENTS)


def _groups(model: ModelShapes, has_decay: bool) -> list[list[int]]:
    """Sizes of the parameters of each optimizer group."""
    if not has_decay:
        return [model.sizes]
    ranks = [len(shape) for _, shape in model.parameters]
    groups = [
        [n for n, rank in zip(model.sizes, ranks, strict=True) if (rank < 2) == is_vector]
        for is_vector in (False, True)
    ]
    return [group for group in groups if group]


def _overlapping(sizes: list[int], start: int, end: int) -> int:
    """Elements of the parameters, laid end to end, that have one between `start` and `end`."""
    ends = list(accumulate(sizes))
    return sum(n for n, e in zip(sizes, ends, strict=True) if e > start and e - n < end)


def trained_state(
    model: ModelShapes, world: int, stage: int, element_bytes: int, has_decay: bool, on_cpu: bool = False
) -> ModelState:
    """Bytes that a trained role holds between phases on one GPU, from its second step on (the first makes the moments). `on_cpu`: its
    optimizer is in host memory.

    Gradients and their buffers live inside a training phase only, but for three: ZeRO-3 keeps a bucket, and its share of the gradients'
    sums where the optimizer is; ZeRO-1 of a bf16 model keeps those of all gradients (DeepSpeed's BF16_Optimizer); stages 1 and 2 whose
    optimizer is in host memory keep a buffer for the largest parameter on its way there (`temp_grad_buffer_for_gpu_offload`).
    In fp32 at stage 0 the weights are the masters; at the others DeepSpeed copies a rank's share all the same.
    """
    p = partition(model, world, stage, has_decay)
    weights = (p.share + p.persistent if stage == 3 else p.whole) * element_bytes
    has_masters = element_bytes < 4 or stage > 0
    optimizer = p.share * (MOMENTS_BYTES + (MASTER_BYTES if has_masters else 0))
    gradients = p.bucket * element_bytes + (0 if on_cpu else p.share * SUM_BYTES) if stage == 3 else 0
    if sums_all(stage, element_bytes, on_cpu):
        gradients = p.whole * SUM_BYTES
    if on_cpu and stage in (1, 2):
        gradients = max(model.sizes) * element_bytes
    return ModelState(weights + model.buffer_bytes, gradients, optimizer)


def sums_all(stage: int, element_bytes: int, on_cpu: bool) -> bool:
    """Whether a rank keeps the sums of all gradients from step to step."""
    return stage == 1 and element_bytes < SUM_BYTES and not on_cpu


def frozen_bytes(model: ModelShapes, world: int, stage: int, element_bytes: int) -> int:
    """Bytes of a model that only runs forward: whole, or ZeRO-3's shards and the small parameters that stay whole."""
    elements = model.elements
    if stage == 3:
        elements = shard_elements(model.sizes, world) + persistent_elements(model)
    return elements * element_bytes + model.buffer_bytes
