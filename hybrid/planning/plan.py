"""A config becomes a plan: what is predicted, what stays where, what moves, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hybrid.config import RunConfig
from hybrid.config.resolve import TIER_SHARES, kv_bytes
from hybrid.errors import ConfigError
from hybrid.memory.residency import Residency, all_resident, swap_all
from hybrid.planning.footprint import Limits, Speeds, peak, seconds_per_step, tier_bytes
from hybrid.planning.offload import offloading, with_host_optimizers
from hybrid.planning.prediction import Prediction
from hybrid.planning.residency import cheapest_schedule, least_tier_bytes
from hybrid.planning.walk import Walk, walk

Predict = Callable[[RunConfig], Prediction]
"""Bytes of a run from its resolved config alone."""

WORTH = 0.1
"""A smaller KV cache or micro-batch must save this share of the seconds of movement: moving is sure, what larger ones save is not known."""
RAY_SHARE = 0.95
"""Of a node's memory; above it Ray's memory monitor kills workers (`RAY_memory_usage_threshold`)."""
MIB = 2**20


@dataclass(frozen=True)
class Shortage:
    """`where` ("train_actor", "loading the actor", "host memory") lacks `nbytes`; `per` is "GPU" or "node"."""

    where: str
    nbytes: int
    per: str


@dataclass(frozen=True)
class Plan:
    """`residency` is what the scheduler carries out; where nothing fits it is the least that there can be, and `shortages` say so."""

    cfg: RunConfig
    prediction: Prediction
    walk: Walk
    limits: Limits
    speeds: Speeds
    residency: Residency
    shortages: tuple[Shortage, ...]

    @property
    def fits(self) -> bool:
        return not self.shortages

    @property
    def seconds_per_step(self) -> float:
        """Seconds of movement in a step, without what start and end move once."""
        every_step = {pair: float(int(times)) for pair, times in self.walk.items() if times >= 1}
        return seconds_per_step(self.prediction, self.residency, every_step, self.speeds)


def make_plan(cfg: RunConfig, predict: Predict, speeds: Speeds) -> Plan:
    """The plan of exactly this resolved config. Raises `ConfigError` when the size of its GPUs is not known."""
    if cfg.memory.device_bytes == "auto":
        raise ConfigError(
            "memory.device_bytes is auto and no GPU is here to ask. Give --gpu (a name such as H100-SXM, or bytes), or set "
            "memory.device_bytes."
        )
    prediction = with_host_optimizers(predict(cfg), cfg)
    keys = [t.key for t in prediction.tenants]
    movable = [t.key for t in prediction.tenants if t.movable]
    way = walk(cfg, keys)
    limits = Limits(cfg.memory.device_bytes, _room(cfg, prediction))
    plan = Plan(cfg, prediction, way, limits, speeds, swap_all(keys, movable), ())
    if cfg.memory.policy == "resident":
        plan = replace(plan, residency=all_resident(keys))
    if cfg.memory.policy == "auto":
        plan = replace(plan, residency=cheapest_schedule(prediction, way, limits, speeds) or plan.residency)
    return replace(plan, shortages=tuple(_shortages(plan)))


def _room(cfg: RunConfig, prediction: Prediction) -> int | None:
    """Bytes per node for what leaves. Pinned memory that was not given leaves room for the processes, below where Ray begins to kill."""
    room = cfg.memory.tier_bytes
    if room == "auto":
        return None
    if cfg.memory.tier == "pinned" and "memory.tier_bytes" in cfg.autos:
        room = min(room, int(RAY_SHARE * room / TIER_SHARES["pinned"]) - sum(prediction.host.values()))
    return room


def _shortages(plan: Plan) -> list[Shortage]:
    phases = sorted({phase for pair in plan.walk for phase in pair}, key=_order(plan))
    found = []
    cache = plan.prediction.kv_cache
    if cache is not None and (lacking := cache.least_bytes - plan.cfg.rollout.kv_cache) > 0:
        found.append(
            Shortage(f"rollout.kv_cache, for one sequence of {plan.cfg.max_sequence_tokens} tokens,", lacking, "GPU")
        )
    for phase in phases:
        size, moment = peak(plan.prediction, plan.residency, phase)
        if size > plan.limits.device_bytes:
            found.append(Shortage(moment.what, size - plan.limits.device_bytes, "GPU"))
    room = plan.limits.tier_bytes
    if room is None or tier_bytes(plan.prediction, plan.residency) <= room:
        return found
    least = tier_bytes(plan.prediction, plan.residency)
    if plan.cfg.memory.policy == "auto" and not found:
        least = least_tier_bytes(plan.prediction, plan.walk, plan.limits) or least
    return [
        *found,
        Shortage("host memory" if plan.cfg.memory.tier == "pinned" else "the swap disk", least - room, "node"),
    ]


def _order(plan: Plan) -> Callable[[str], int]:
    names = [use.phase for use in plan.prediction.phases]
    return lambda phase: names.index(phase) if phase in names else len(names)


def choose(cfg: RunConfig, predict: Predict, speeds: Speeds) -> Plan:
    """The plan of a resolved config, in which what was auto is lowered where it pays.

    KV cache and micro-batch: as large as useful comes first. Where that neither fits nor comes within WORTH of the least movement, first
    the KV cache is lowered, with the smallest micro-batch: in eighths, to no less than half for the sake of movement, because half the
    sequences at a time may double the time of generating; further, down to one sequence, only to fit. Then the largest micro-batch is
    taken with which movement stays within WORTH of what that gave. Heaps are kept where nothing moves and they have room. Optimizers go
    to the CPU only where nothing else fits, as few as do: how long a CPU steps is not planned. When nothing fits, the plan is that of the
    smallest KV cache and micro-batch.
    """
    plan = _choose_sizes(cfg, predict, speeds)
    if plan.fits:
        return _keeping_heaps(plan, predict, speeds)
    others = (_choose_sizes(each, predict, speeds) for each in offloading(cfg))
    return next((other for other in others if other.fits), plan)


def _keeping_heaps(plan: Plan, predict: Predict, speeds: Speeds) -> Plan:
    """`plan` with heaps kept, where that may be, nothing moves in a step, and they have room in every phase. What moves finds no heap kept:
    a role gives back all that is free when it leaves."""
    cfg = plan.cfg
    if "memory.keep_heap" not in cfg.autos or cfg.cluster.device != "cpu" or plan.seconds_per_step > 0:
        return plan
    memory = cfg.memory.model_copy(update={"keep_heap": True})
    kept = make_plan(cfg.model_copy(update={"memory": memory}), predict, speeds)
    return kept if kept.fits and kept.seconds_per_step == 0 else plan


def _choose_sizes(cfg: RunConfig, predict: Predict, speeds: Speeds) -> Plan:
    plan = make_plan(cfg, predict, speeds)
    caches, budgets = _kv_choices(cfg), _budget_choices(cfg)
    if len(caches) * len(budgets) == 1 or (plan.fits and plan.seconds_per_step == 0):
        return plan

    def of(cache: int, budget: int) -> Plan:
        return make_plan(with_values(cfg, cache, budget), predict, speeds)

    least = of(caches[-1], budgets[-1])
    if not least.fits:
        return least
    halves = [(cache, of(cache, budgets[-1])) for cache in caches if 2 * cache >= caches[0]]
    fitting = [(cache, each) for cache, each in halves if each.fits]
    cache = _largest(fitting)[0] if fitting else next(cache for cache in caches if of(cache, budgets[-1]).fits)
    plans = [(budget, of(cache, budget)) for budget in budgets]
    return _largest([(budget, each) for budget, each in plans if each.fits])[1]


def with_values(cfg: RunConfig, cache: int, budget: int) -> RunConfig:
    """`cfg` with another KV cache and micro-batch."""
    rollout = cfg.rollout.model_copy(update={"kv_cache": cache})
    return cfg.model_copy(
        update={"rollout": rollout, "train": cfg.train.model_copy(update={"micro_batch_tokens": budget})}
    )


def _largest(plans: list[tuple[int, Plan]]) -> tuple[int, Plan]:
    """The first of `plans`, largest first, whose movement is within WORTH of the least."""
    least = min(plan.seconds_per_step for _, plan in plans)
    return next((size, plan) for size, plan in plans if plan.seconds_per_step * (1 - WORTH) <= least)


def _kv_choices(cfg: RunConfig) -> list[int]:
    """Sizes to try, largest first; one where the size was given."""
    most = cfg.rollout.kv_cache
    if "rollout.kv_cache" not in cfg.autos or not cfg.uses_engines:
        return [most]
    least = min(most, -(-(kv_bytes(cfg, 1) or most) // MIB) * MIB)
    return sorted({max(least, -(-most * eighths // 8 // MIB) * MIB) for eighths in range(1, 9)} | {least}, reverse=True)


def _budget_choices(cfg: RunConfig) -> list[int]:
    """Micro-batches to try in tokens, largest first, each half the one before."""
    sizes = [cfg.train.micro_batch_tokens]
    while "train.micro_batch_tokens" in cfg.autos and sizes[-1] > cfg.max_sequence_tokens:
        sizes.append(max(sizes[-1] // 2, cfg.max_sequence_tokens))
    return sizes
