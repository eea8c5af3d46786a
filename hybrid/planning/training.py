"""What DeepSpeed adds to a pass while a role trains or runs forward: gradients, its buckets, gathered parameters, the step itself.

Read from DeepSpeed 0.19.8 (stage_1_and_2.py, stage3.py, bf16_optimizer.py, unfused_optimizer.py) and checked against counted allocations
(tests/benchmarks/plan_vs_measured.py).
"""

from __future__ import annotations

from hybrid.planning.model_state import SUM_BYTES, Partition, sums_all
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


def adds_up_on_arrival(stage: int, element_bytes: int, on_cpu: bool) -> bool:
    """Whether gradients lie in fp32, parameter by parameter, from when they come until the step."""
    return stage < 2 and not sums_all(stage, element_bytes, on_cpu)


def train_parts(
    trace: Trace,
    model: ModelShapes,
    p: Partition,
    element_bytes: int,
    micro_batches: int,
    device: str,
    on_cpu: bool = False,
    overlap_comm: bool = False,
) -> Parts:
    """One optimizer step over `micro_batches` passes, besides the role's tenants. `on_cpu`: the optimizer is in host memory.
    `overlap_comm`: gradients are reduced while the next ones are computed."""
    gathered, ahead = gathered_bytes(model, p.stage, element_bytes, device)
    # Half-way through the layers buffers are on their way as in a pass without gradients; of what is kept for backward half is there.
    half_way = {"activations": trace.held // 2, "gathered parameters": gathered + ahead} if p.stage == 3 else {}
    # The last buffer gathered ahead lives until the head takes its parameter from it.
    size = PREFETCH_ELEMENTS[device]
    prefetch = (model.elements - model.sizes[0]) % size * element_bytes if size and p.stage == 3 else 0
    arriving = adds_up_on_arrival(p.stage, element_bytes, on_cpu)
    moments = []
    for name in trace.highest:
        gradients = trace.growing[name] - trace.highest[name] if arriving and micro_batches == 1 else 0
        extra = {"gradients": gradients + _kept(p, element_bytes, name, micro_batches, arriving)}
        if name not in BEFORE_GRADIENTS:
            extra["reduction"] = 0
        moments.append(_moment(trace, name, extra, gathered, prefetch))
    if p.stage == 2 and p.whole > p.bucket:
        moments.append(_first_reduction(trace, model, p, element_bytes, micro_batches))
    if p.stage == 3:
        held = {"activations": _held_when_full(trace, model, p)} if p.whole > p.bucket else {}
        flat = min(p.bucket, p.whole) * element_bytes
        moments.append(held | {"gathered parameters": gathered, "reduction": flat})
        # At the end only the embedding is still gathered; a rank's part of what is reduced becomes fp32, and gloo copies all of it.
        part = min(p.bucket, p.whole) * p.share // p.whole * SUM_BYTES if element_bytes < SUM_BYTES else 0
        embedding = model.sizes[0] * element_bytes
        moments.append({"gathered parameters": embedding, "reduction": flat + (flat if device == "cpu" else part)})
    after = _without_activations(model, p, element_bytes, micro_batches, arriving)
    if p.stage == 3 and on_cpu:
        after = []  # gradients are on the CPU by then, and stepped there
    if p.stage == 1 and device == "cpu":
        after.append({"optimizer step": p.whole * element_bytes})  # gloo gathers the new weights in a copy
    moments = [half_way, *moments, *after]
    if overlap_comm and p.stage >= 2:
        moments = [_overlapped(m, model, p, element_bytes, micro_batches) if "reduction" in m else m for m in moments]
    return peak(moments)


def _overlapped(parts: Parts, model: ModelShapes, p: Partition, e: int, micro_batches: int) -> Parts:
    """`parts` while a reduction is on its way: stage 2 fills a second bucket meanwhile, and copies that the reduction makes lie in memory
    of its own stream, which the pass cannot use in between."""
    bucket = p.bucket * e if p.stage == 2 else 0
    on_its_way = 0
    if p.whole > p.bucket and p.stage == 2:
        on_its_way = _reduction_of_stage_2(max(model.sizes[1:]), p, e, micro_batches)["reduction"]
    elif p.whole > p.bucket:
        on_its_way = p.bucket * e + (p.bucket * p.share // p.whole * SUM_BYTES if e < SUM_BYTES else 0)
    return parts | {
        "gradients": parts.get("gradients", 0) + bucket,
        "reduction": max(parts["reduction"], on_its_way),
    }


def _moment(trace: Trace, name: str, extra: Parts, gathered: int, prefetch: int) -> Parts:
    """`trace.held` are the layers' activations; what the head's moments hold beyond them are logits and their gradients."""
    highest = trace.highest[name]
    activations = min(trace.held, highest) if name.startswith("head") else highest
    parts = {"activations": activations, "logits": highest - activations, **extra}
    return parts | {"gathered parameters": gathered + (prefetch if name == "trunk" else 0)}


def _kept(p: Partition, e: int, moment: str, micro_batches: int, arriving: bool) -> int:
    """Bytes of gradients and buckets beside the activations: of earlier micro-batches, and once this one's gradients come."""
    several, has_gradients = micro_batches > 1, moment not in BEFORE_GRADIENTS
    if p.stage == 0:
        return p.whole * SUM_BYTES if several else 0
    if (
        p.stage == 1 and arriving
    ):  # reduced at the end of the last pass; the bucket, made by the first gradient, stays until then
        return ((p.whole if several else 0) + (p.bucket if several or has_gradients else 0)) * SUM_BYTES
    if p.stage == 2:
        return (_sums(p, e) if several else 0) + (p.bucket * e if has_gradients else 0)
    return 0  # a tenant: the sums of ZeRO-1, the buffers of ZeRO-3


def _sums(p: Partition, e: int) -> int:
    """Bytes that ZeRO-2 adds gradients up in: of a bf16 model exactly a rank's share, in fp32."""
    return p.share * SUM_BYTES if e < SUM_BYTES else p.gradients * e


def _first_reduction(trace: Trace, model: ModelShapes, p: Partition, e: int, micro_batches: int) -> Parts:
    """ZeRO-2 with more parameters than a bucket reduces the first full one during the pass: through a flat copy, then into this rank's
    part. Activations are dropped as gradients come, evenly over the layers."""
    passed = p.bucket / p.whole
    last, first = (trace.highest.get(name, trace.peak) for name in ("last layer", "first layer"))
    return {
        "activations": int(last + passed * (min(first, last) - last)),
        **_reduction_of_stage_2(max(model.sizes[1:]), p, e, micro_batches),
    }


def _reduction_of_stage_2(largest: int, p: Partition, e: int, micro_batches: int) -> Parts:
    """A full bucket and its flat copy; what came of it is added to the sums parameter by parameter, in fp32. `largest`: elements of the
    largest parameter in it."""
    flat = min(p.bucket, p.whole) * e
    if e < SUM_BYTES:
        return {"gradients": _sums(p, e) + p.bucket * e, "reduction": flat + largest * SUM_BYTES}
    earlier = _sums(p, e) if micro_batches > 1 else 0
    return {"gradients": earlier + p.bucket * e, "reduction": max(p.gradients, min(p.bucket, p.share)) * e}


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


def _without_activations(model: ModelShapes, p: Partition, e: int, micro_batches: int, arriving: bool) -> list[Parts]:
    """Moments after the last pass: gradients are reduced, then stepped."""
    share, mine, sums = p.share * SUM_BYTES, p.gradients * e, p.whole * SUM_BYTES
    flat = min(p.whole, ALL_REDUCE_ELEMENTS) * SUM_BYTES
    if p.stage == 0:
        return [{"gradients": sums, "reduction": flat}]
    if (
        p.stage == 1 and not arriving
    ):  # one flat group is reduced where it lies; each gradient that comes is cast to be added
        largest = max(model.sizes) * (e + SUM_BYTES)
        return [{"gradients": largest}, {"reduction": flat if p.groups > 1 else 0}]
    if p.stage == 1:
        bucket, part = p.bucket * SUM_BYTES, p.share * SUM_BYTES if e < SUM_BYTES else mine
        reduction = [
            {"gradients": sums, "reduction": bucket},
            {"gradients": max(0, sums - bucket) + part, "reduction": bucket + min(share, bucket)},
        ]
        return [*reduction, {"gradients": part, "optimizer step": share}]
    if p.stage == 3:
        return [{"optimizer step": share * min(p.share, SUB_GROUP_ELEMENTS) // p.share}]
    if e < SUM_BYTES:  # the sums are flat and in fp32, as the step wants them
        return [_reduction_of_stage_2(max(model.sizes), p, e, micro_batches)]
    earlier = mine if micro_batches > 1 else 0
    reduction = {"gradients": earlier + mine, "reduction": p.bucket * e + min(share, p.bucket * e)}
    return [reduction, {"gradients": mine, "optimizer step": share}]
