"""What a run's numbers suggest to change, in sentences with the override to type. Pure rules; each speaks only when it has its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hybrid.reports.summary import PhaseLine, Summary
from hybrid.telemetry.summary import human_bytes

MIB = 2**20
ROOM_KEPT = 0.10
"""Share of the capacity that advice leaves free."""
NEARLY_FULL = 0.95
KV_MARGIN = 1.25
WORTH_SHARE = 0.05
"""Moving that costs a smaller share of a step is not worth a change."""
SLOW_RATE = 0.3e9
PLAN_OFF, PLAN_MATTERS = 0.10, 0.75
"""A plan is too low by this share or more, in a phase that fills the other share of the capacity."""
LEAK_STEPS = 10
TRAINING = ("forward", "train_critic", "train_actor")


@dataclass(frozen=True)
class Advice:
    """`override` is to be typed after `hybrid train PROFILE`; None where no setting helps."""

    text: str
    override: str | None = None


def advise(summary: Summary) -> tuple[Advice, ...]:
    """All advice that the numbers support, the most urgent first; of what would change the same setting only that."""
    taken: set[str] = set()
    kept = []
    for found in filter(None, (rule(summary) for rule in RULES)):
        keys = {setting.partition("=")[0] for setting in (found.override or "").split()}
        if not keys & taken:
            kept.append(found)
            taken |= keys
    return tuple(kept)


def nearly_full(s: Summary) -> Advice | None:
    """A phase came close to the capacity."""
    full = s.fullest
    if full is None or not s.capacity or full.measured < NEARLY_FULL * s.capacity:
        return None
    text = (
        f"{full.phase} held {human_bytes(full.measured)} of {human_bytes(s.capacity)} ({full.measured / s.capacity:.0%}): "
        "a little more and memory runs out."
    )
    if full.phase in TRAINING and s.settings.gradient_checkpointing is False and full.phase != "forward":
        return Advice(f"{text} Recompute activations in the backward pass.", "model.gradient_checkpointing=true")
    if full.phase in TRAINING and s.settings.micro_batch_tokens:
        return Advice(
            f"{text} Halve the micro-batch.", f"train.micro_batch_tokens={s.settings.micro_batch_tokens // 2}"
        )
    if full.phase not in TRAINING and s.settings.keep_heap:
        return Advice(f"{text} Let roles give back what they free.", "memory.keep_heap=false")
    if full.phase in ("generate", "evaluate") and s.settings.kv_cache_bytes:
        return Advice(f"{text} Give the KV cache less.", f"rollout.kv_cache={_mib(s.settings.kv_cache_bytes * 0.75)}")
    if s.policy == "resident":
        return Advice(f"{text} Let what a phase does not need leave.", "memory.policy=auto")
    return Advice(text)


def plan_too_low(s: Summary) -> Advice | None:
    """The plan promised less than a phase held, by enough to matter."""
    worst = min((p for p in s.phases if p.error is not None), key=lambda p: p.error, default=None)
    if worst is None or worst.error > -PLAN_OFF or not s.capacity or not s.arrivals:
        return None
    if worst.measured < PLAN_MATTERS * s.capacity:
        return None
    missing = worst.measured - worst.predicted
    text = (
        f"The plan gave {worst.phase} {human_bytes(worst.predicted)}, and it held {human_bytes(worst.measured)}: plan the next run with "
        f"{human_bytes(missing)} less."
    )
    return Advice(text, f"memory.device_bytes={_mib(s.capacity - missing)}")


def leak(s: Summary) -> Advice | None:
    """Processes keep more after every step, and will fill the GPU before the run ends, or within as many steps as it had."""
    growing = [line for line in s.residue if line.growth and len(line.points) >= LEAK_STEPS]
    worst = max(growing, key=lambda line: line.growth, default=None)
    full = s.fullest
    if worst is None or full is None or not s.capacity:
        return None
    if full.measured + worst.growth * max(s.steps, (s.settings.steps or 0) - s.steps) < s.capacity:
        return None
    steps = max(0, round((s.capacity - full.measured) / worst.growth))
    return Advice(
        f"What the {worst.role}'s processes hold beside their tenants grew by {human_bytes(worst.growth)} a step to the end: "
        f"{full.phase} reaches the capacity in about {steps} more steps. No setting helps: look for what keeps memory, such as a metric or "
        "a batch that is never dropped."
    )


def kv_cache_full(s: Summary) -> Advice | None:
    """Sequences may have waited for KV cache, and generating has room for more."""
    line = _phase(s, "generate")
    if s.kv_cache_share is None or s.kv_cache_share < 1 or line is None or not (s.capacity and line.measured):
        return None
    room = int(s.capacity * (1 - ROOM_KEPT)) - line.measured
    size = s.settings.kv_cache_bytes
    if not size or room < 0.1 * size:
        return None
    wanted = min(size * s.kv_cache_share, size + room)
    return Advice(
        f"The sequences of a step could have filled {s.kv_cache_share:.0%} of the KV cache, so some may have waited, and generate left "
        f"{human_bytes(s.capacity - line.measured)} free.",
        f"rollout.kv_cache={_mib(wanted)}",
    )


def kv_cache_unused(s: Summary) -> Advice | None:
    """Much of the KV cache was never used, where that is somebody's loss: it stays while training, or makes generate the fullest phase."""
    size = s.settings.kv_cache_bytes
    if s.kv_cache_share is None or not size:
        return None
    wanted = size * s.kv_cache_share * KV_MARGIN
    spare = size - wanted
    if spare < 0.25 * size or spare < 64 * MIB:
        return None
    text = f"The KV cache was at most {s.kv_cache_share:.0%} used"
    train, tokens, full = _phase(s, "train_actor"), s.settings.micro_batch_tokens, s.fullest
    if train is not None and "rollout/kv_cache" in train.tenants and tokens and train.working:
        larger = _useful_tokens(s, int(tokens * (1 + spare / train.working)) // 256 * 256)
        if larger > tokens:
            text += f": give {human_bytes(spare)} of its {human_bytes(size)} to the micro-batch, which shares the GPU with it."
            return Advice(text, f"rollout.kv_cache={_mib(wanted)} train.micro_batch_tokens={larger}")
    if full is not None and full.phase in ("generate", "evaluate"):
        text += f", and {full.phase} is the fullest phase: {human_bytes(spare)} of {human_bytes(size)} are to spare."
        return Advice(text, f"rollout.kv_cache={_mib(wanted)}")
    return None


def all_fits(s: Summary) -> Advice | None:
    """Everything would fit at once, and moving costs time."""
    if s.policy != "swap_all" or not (s.capacity and s.step_seconds) or s.fullest is None:
        return None
    share = s.moving_seconds / s.step_seconds
    if share < WORTH_SHARE:
        return None
    tenants = sum(t.counted or 0 for t in s.tenants)
    beside = max(p.overhead + p.working for p in s.phases if p.measured is not None)
    if tenants + beside > (1 - ROOM_KEPT) * s.capacity:
        return None
    return Advice(
        f"All tenants fit at once: {human_bytes(tenants + beside)} at most of {human_bytes(s.capacity)}. Letting them stay saves the "
        f"{s.moving_seconds:.1f} s ({share:.0%}) of a step that moving takes.",
        "memory.policy=auto",
    )


def slow_tier(s: Summary) -> Advice | None:
    """Copies to the slow tier take a good part of the step, and there is a faster one."""
    if not s.step_seconds or s.settings.tier != "file" or all_fits(s):
        return None
    copying = [t for t in s.transitions if t.copied and t.share]
    seconds = sum(t.seconds_per_step for t in copying)
    if not copying or seconds / s.step_seconds < 2 * WORTH_SHARE:
        return None
    rate = sum(t.copied for t in copying) / sum(t.seconds for t in copying)
    text = f"Moving through files takes {seconds:.1f} s of a step ({seconds / s.step_seconds:.0%}), at {rate / 1e9:.2f} GB/s."
    if s.settings.device == "cuda":
        return Advice(f"{text} Pinned host memory is faster, where the host has room.", "memory.tier=pinned")
    if rate < SLOW_RATE:
        return Advice(f"{text} That is slow for a disk: name a folder on a faster one.", "memory.swap_dir=FOLDER")
    return None


def room_for_micro_batches(s: Summary) -> Advice | None:
    """Training leaves much of the GPU free: larger micro-batches keep it busier."""
    line, tokens = _phase(s, "train_actor"), s.settings.micro_batch_tokens
    if line is None or not (line.measured and s.capacity and tokens and line.working) or (line.share or 0) < 0.2:
        return None
    room = int(s.capacity * (1 - ROOM_KEPT)) - line.measured
    larger = _useful_tokens(s, tokens * min(int(1 + room / line.working), 4))
    if larger < 2 * tokens:
        return None
    return Advice(
        f"train_actor left {human_bytes(s.capacity - line.measured)} of {human_bytes(s.capacity)} free. Its work took "
        f"{human_bytes(line.working)} with {tokens} tokens at a time; larger micro-batches fit.",
        f"train.micro_batch_tokens={larger}",
    )


def _useful_tokens(s: Summary, tokens: int) -> int:
    """`tokens`, or what a rank has in an update where that is less."""
    return min(tokens, s.settings.most_tokens or tokens)


def _phase(s: Summary, name: str) -> PhaseLine | None:
    return next((p for p in s.phases if p.phase == name), None)


def _mib(size: float) -> str:
    return f"{max(1, round(size / MIB))}MiB"


RULES: tuple[Callable[[Summary], Advice | None], ...] = (
    nearly_full,
    plan_too_low,
    leak,
    kv_cache_full,
    kv_cache_unused,
    all_fits,
    slow_tier,
    room_for_micro_batches,
)
"""The most urgent first."""
