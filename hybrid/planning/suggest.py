"""What to do when nothing fits: single changes, the smallest of each kind that fits, each found by planning again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hybrid.config import RunConfig, resolve
from hybrid.config.rules import find_violations
from hybrid.planning.footprint import Speeds
from hybrid.planning.plan import MIB, Plan, Predict, choose

PROBES = 5
"""Plans made to find the smallest change of a number."""
MOST_GPUS_PER_NODE, MOST_NODES = 8, 16

Values = dict[str, Any]
"""Changed values by dotted key."""


@dataclass(frozen=True)
class Suggestion:
    """One change that makes the run fit, as overrides, and the plan that shows it."""

    overrides: tuple[str, ...]
    plan: Plan


def suggestions(plan: Plan, predict: Predict, speeds: Speeds) -> list[Suggestion]:
    """Single changes with which the run of `plan`, which does not fit, would: of each kind the smallest."""

    def attempt(values: Values) -> Suggestion | None:
        cfg = changed(plan.cfg, values)
        if find_violations(cfg, frozenset()):
            return None
        made = choose(cfg, predict, speeds)
        return Suggestion(tuple(f"{key}={_text(value)}" for key, value in values.items()), made) if made.fits else None

    found = [next(filter(None, map(attempt, ladder)), None) for ladder in _ladders(plan)]
    found += [_smallest_change(*numbers, attempt) for numbers in _numbers(plan)]
    return [each for each in found if each is not None]


def changed(cfg: RunConfig, values: Values) -> RunConfig:
    """A resolved config with `values`, resolved anew: what was auto follows the change."""
    raw = {key: "auto" for key in cfg.autos} | values
    sections: dict[str, Values] = {}
    for dotted, value in raw.items():
        section, _, key = dotted.partition(".")
        sections.setdefault(section, {})[key] = value
    update = {name: getattr(cfg, name).model_copy(update=keys) for name, keys in sections.items()}
    return resolve(cfg.model_copy(update=update))


def _ladders(plan: Plan) -> Iterator[Iterator[Values]]:
    """Changes of one kind each, from the smallest on."""
    cfg = plan.cfg
    if cfg.uses_engines and cfg.rollout.kv_cache < plan.prediction.least_kv_bytes:
        yield [{"rollout.kv_cache": _least_cache(plan)}]
    yield from ([{"memory.policy": "auto"}] if cfg.memory.policy != "auto" else [],)
    for role in ("actor", "critic"):
        if role in cfg.roles:
            yield ({f"{role}.zero_stage": stage} for stage in range(getattr(cfg, role).zero_stage + 1, 4))
            if getattr(cfg, role).optimizer == "device":
                yield [{f"{role}.optimizer": "cpu"}]
    if cfg.uses_reference and cfg.reference.zero_stage == 0:
        yield [{"reference.zero_stage": 3}]
    if not cfg.model.gradient_checkpointing:
        yield [{"model.gradient_checkpointing": True}]
    if cfg.memory.tier == "pinned":
        yield [{"memory.tier": "file"}]
    tp, gpus, nodes = cfg.rollout.tensor_parallel_size, cfg.cluster.gpus_per_node, cfg.cluster.num_nodes
    sizes = [n for n in range(tp + 1, gpus + 1) if gpus % n == 0]
    yield ({"rollout.tensor_parallel_size": n, "rollout.engines": "auto"} for n in sizes)
    yield _more_gpus(gpus, nodes)


def _more_gpus(gpus: int, nodes: int) -> Iterator[Values]:
    while gpus < MOST_GPUS_PER_NODE:
        gpus = min(2 * gpus, MOST_GPUS_PER_NODE)
        yield {"cluster.gpus_per_node": gpus, "rollout.engines": "auto"}
    while nodes < MOST_NODES:
        nodes *= 2
        yield {
            "cluster.num_nodes": nodes,
            "cluster.gpus_per_node": gpus,
            "cluster.address": "auto",
            "rollout.engines": "auto",
        }


def _numbers(plan: Plan) -> Iterator[tuple[str, int, int, int]]:
    """(key, present value, least value, step) of the numbers that a run can do with less of."""
    cfg = plan.cfg
    longest = cfg.max_sequence_tokens
    yield "train.micro_batch_tokens", cfg.train.micro_batch_tokens, longest, 256
    if cfg.uses_reward_model:
        yield "reward.batch_tokens", cfg.reward.batch_tokens, longest, 256
    if cfg.uses_engines:
        yield "rollout.kv_cache", cfg.rollout.kv_cache, _least_cache(plan), 64 * MIB


def _least_cache(plan: Plan) -> int:
    """Bytes of one sequence, in whole MiB."""
    return -(-plan.prediction.least_kv_bytes // MIB) * MIB


def _smallest_change(
    key: str, now: int, least: int, step: int, attempt: Callable[[Values], Suggestion | None]
) -> Suggestion | None:
    """The largest value of `key` below `now` that fits, to within `step` or what PROBES bisections give."""
    if least >= now:
        return None
    best, low, high = attempt({key: least}), least, now
    for _ in range(PROBES if best else 0):
        middle = (low + high) // 2 // step * step
        if not low < middle < high:
            break
        found = attempt({key: middle})
        best, low, high = (found, middle, high) if found else (best, low, middle)
    return best


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value // MIB}MiB" if isinstance(value, int) and value >= MIB and value % MIB == 0 else str(value)
