"""What DeepSpeed adds to a pass while a role trains or runs forward: gradients, its buckets, gathered parameters, the step itself.

Read from DeepSpeed 0.19.8 (stage_1_and_2.py, stage3.py, unfused_optimizer.py) and checked against counted allocations
(tests/benchmarks/plan_vs_measured.py).
"""

from __future__ import annotations

from hybrid.planning.model_state import MASTER_BYTES, Partition
from hybrid.planning.shapes import ModelShapes
from hybrid.planning.working_set import BEFORE_GRADIENTS, Trace
from hybrid.roles.zero import PREFETCH_ELEMENTS

LIVE_ELEMENTS = 1_000_000_000
"""ZeRO-3 keeps gathered parameters that are used again within so many elements (`stage3_max_live_parameters`, `_max_reuse_distance`)."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""ZeRO-3 steps so many elements of a rank at a time (`sub_group_size`)."""
ALL_REDUCE_ELEMENTS = 500_000_000
"""Stage 0 averages gradients in flat copies of at most so many elements."""

Parts = dict[str, int]
"""Bytes by name."""


def peak(moments: list[Parts]) -> Parts:
    """The moment that holds most; names without bytes are left out."""
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in fullest.items() if size}


def forward_parts(trace: Trace, gathered: int, prefetch: int) -> Parts:
    """A pass without gradients. `gathered`, `prefetch`: bytes of ZeRO-3's gathered parameters and of its buffer, else 0."""
    return peak([_moment(trace, name, {}, gathered, prefetch) for name in trace.highest])


def gathered_bytes(model: ModelShapes, stage: int, element_bytes: int, device: str) -> tuple[int, int]:
    """(gathered parameters, flat buffers on their way) of ZeRO-3 in a pass without gradients, in bytes; (0, 0) at other stages.

    Without prefetching a layer's parameter is on its way when its module is reached. With it, the first module, the embedding, is gathered
    alone; of the buffers of what follows one or two are on their way at a time, as it happens: the middle is taken."""
    if stage < 3:
        return 0, 0
    prefetch = PREFETCH_ELEMENTS[device]
    live = min(model.elements, LIVE_ELEMENTS + prefetch)
    if not prefetch:
        embedding = model.parameters[0][1]  # the head's, too
        of_layers = (size for (_, shape), size in zip(model.parameters, model.sizes, strict=True) if shape != embedding)
        return live * element_bytes, max(of_layers) * element_bytes
    one, two = (min(model.elements - model.sizes[0], buffers * prefetch) for buffers in (1, 2))
    return live * element_bytes, (one + two) // 2 * element_bytes


def train_parts(
    trace: Trace, model: ModelShapes, p: Partition, element_bytes: int, micro_batches: int, device: str
) -> Parts:
    """One optimizer step over `micro_batches` passes, besides the role's tenants."""
    gathered, ahead = gathered_bytes(model, p.stage, element_bytes, device)
    # Half-way through the layers buffers are on their way as in a pass without gradients; of what is kept for backward half is there.
    half_way = {"activations": trace.held // 2, "gathered parameters": gathered + ahead} if p.stage == 3 else {}
    # The last buffer gathered ahead lives until the head takes its parameter from it.
    size = PREFETCH_ELEMENTS[device]
    prefetch = (model.elements - model.sizes[0]) % size * element_bytes if size and p.stage == 3 else 0
    moments = []
    for name in trace.highest:
        grows = p.stage < 2 and micro_batches == 1
        gradients = trace.growing[name] - trace.highest[name] if grows else 0
        extra = {"gradients": gradients + _kept(p, element_bytes, name, micro_batches)}
        moments.append(_moment(trace, name, extra, gathered, prefetch))
    if p.stage == 2 and p.whole > p.bucket:
        moments.append(_first_reduction(trace, p, element_bytes, micro_batches))
    if p.stage == 3:
        held = {"activations": _held_when_full(trace, model, p)} if p.whole > p.bucket else {}
        flat = min(p.bucket, p.whole) * element_bytes
        moments.append(held | {"gathered parameters": gathered, "reduction": flat})
    return peak([half_way, *moments, *_without_activations(p, element_bytes, micro_batches)])


def _moment(trace: Trace, name: str, extra: Parts, gathered: int, prefetch: int) -> Parts:
    """`trace.held` are the layers' activations; what the head's moments hold beyond them are logits and their gradients."""
    highest = trace.highest[name]
    activations = min(trace.held, highest) if name.startswith("head") else highest
    parts = {"activations": activations, "logits": highest - activations, **extra}
    return parts | {"gathered parameters": gathered + (prefetch if name == "trunk" else 0)}


def _kept(p: Partition, e: int, moment: str, micro_batches: int) -> int:
    """Bytes of gradients and buckets beside the activations: of earlier micro-batches, and once this one's gradients come."""
    several, has_gradients = micro_batches > 1, moment not in BEFORE_GRADIENTS
    bucket = p.bucket * e
    if p.stage == 0:
        return p.whole * e if several else 0
    if p.stage == 1:  # reduced at the end of the last pass; the bucket, made by the first gradient, stays until then
        return (p.whole * e if several else 0) + (bucket if several or has_gradients else 0)
    if p.stage == 2:
        return (p.gradients * e if several else 0) + (bucket if has_gradients else 0)
    return 0  # ZeRO-3's buffers are a tenant


def _first_reduction(trace: Trace, p: Partition, e: int, micro_batches: int) -> Parts:
    """ZeRO-2 with more parameters than a bucket reduces the first full one during the pass: through a flat copy, then into this rank's
    part. Activations are dropped as gradients come, evenly over the layers."""
    passed = p.bucket / p.whole
    last, first = (trace.highest.get(name, trace.peak) for name in ("last layer", "first layer"))
    earlier = p.gradients * e if micro_batches > 1 else 0
    return {
        "activations": int(last + passed * (min(first, last) - last)),
        "gradients": earlier + p.bucket * e,
        "reduction": max(p.gradients, min(p.bucket, p.share)) * e,
    }


def _held_when_full(trace: Trace, model: ModelShapes, p: Partition) -> int:
    """Bytes of activations when ZeRO-3's bucket is full for the first time: of the layers that the gradient has not reached, and half of
    what the layer where it is has computed again. None when that is the embedding."""
    (_, embedding), (_, last) = model.parameters[0], model.parameters[-1]
    head = model.sizes[-1] if last == embedding else 0
    passed = (p.bucket - head) / (p.whole - head - model.sizes[0])
    if passed >= 1:
        return 0
    again = trace.highest.get("last layer", trace.peak) - trace.held
    return int((1 - max(0.0, passed)) * trace.held) + max(0, again) // 2


def _without_activations(p: Partition, e: int, micro_batches: int) -> list[Parts]:
    """Moments after the last pass: gradients are reduced, then stepped."""
    share, mine, bucket = p.share * e, p.gradients * e, p.bucket * e
    fp32 = p.share * MASTER_BYTES if e < MASTER_BYTES else 0  # in fp32 a cast copies nothing
    if p.stage == 0:
        copies = min(p.whole, ALL_REDUCE_ELEMENTS) * e
        return [{"gradients": p.whole * e, "reduction": copies}, {"gradients": p.whole * e, "optimizer step": fp32}]
    if p.stage == 1:
        whole = p.whole * e
        reduction = [
            {"gradients": whole, "reduction": bucket},
            {"gradients": max(0, whole - bucket) + mine, "reduction": bucket + min(share, bucket)},
        ]
    elif p.stage == 2:
        earlier = mine if micro_batches > 1 else 0
        reduction = [{"gradients": earlier + mine, "reduction": bucket + min(share, bucket)}]
    else:
        return [{"optimizer step": (share + fp32) * min(p.share, SUB_GROUP_ELEMENTS) // p.share}]
    return [*reduction, {"gradients": mine, "optimizer step": share + fp32}]
