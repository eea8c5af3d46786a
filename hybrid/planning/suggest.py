"""What to do when nothing fits: single changes, the smallest of each kind that fits, each found by planning again; where none is enough,
the fewest together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    """A change that makes the run fit, as overrides, and the plan that shows it. `together`: several changes, of which all are needed."""

    overrides: tuple[str, ...]
    plan: Plan
    together: bool = False


def suggestions(plan: Plan, predict: Predict, speeds: Speeds) -> list[Suggestion]:
    """Single changes with which the run of `plan`, which does not fit, would: of each kind the smallest. Else one set of changes; empty
    when all of them are not enough."""

    def attempt(values: Values) -> Suggestion | None:
        cfg = changed(plan.cfg, values)
        if find_violations(cfg, frozenset()):
            return None
        made = choose(cfg, predict, speeds)
        return Suggestion(tuple(f"{key}={_text(value)}" for key, value in values.items()), made) if made.fits else None

    found = [_smallest_change(*numbers, attempt) for numbers in _numbers(plan)]
    found += [next(filter(None, map(attempt, ladder)), None) for ladder in _ladders(plan)]
    return [each for each in found if each is not None] or _together(plan, attempt)


def _together(plan: Plan, attempt: Callable[[Values], Suggestion | None]) -> list[Suggestion]:
    """Changes are added, those that cost least first, until they fit; then what is not needed is taken back."""
    taken: list[Values] = []
    for values in _strongest(plan):
        if find_violations(changed(plan.cfg, _merged([*taken, values])), frozenset()):
            continue
        taken.append(values)
        if found := attempt(_merged(taken)):
            break
    else:
        return []
    for values in taken[-2::-1]:
        fewer = [each for each in taken if each is not values]
        if enough := attempt(_merged(fewer)):
            taken, found = fewer, enough
    return [replace(found, together=len(taken) > 1)]


def _strongest(plan: Plan) -> Iterator[Values]:
    """Of each kind the change that saves most; numbers that a plan can choose are left to it."""
    cfg = plan.cfg
    yield {"memory.policy": "auto"}
    yield {"train.micro_batch_tokens": "auto"}
    if cfg.uses_engines:
        yield {"rollout.kv_cache": "auto"}
    if cfg.uses_reward_model:
        yield {"reward.batch_tokens": cfg.max_sequence_tokens}
    yield {"model.gradient_checkpointing": True}
    trained = [role for role in ("actor", "critic") if role in cfg.roles]
    yield from ({f"{role}.zero_stage": 3} for role in trained)
    if cfg.uses_reference:
        yield {"reference.zero_stage": 3}
    yield from ({f"{role}.optimizer": "auto"} for role in trained)
    if cfg.memory.tier == "pinned":
        yield {"memory.tier": "file"}
    yield from _wider_engines(cfg.rollout.tensor_parallel_size, cfg.cluster.gpus_per_node)
    yield from _more_gpus(cfg.cluster.gpus_per_node, cfg.cluster.num_nodes)


def _merged(changes: list[Values]) -> Values:
    return {key: value for values in changes for key, value in values.items()}


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
    cache = plan.prediction.kv_cache
    if cache is not None and cfg.rollout.kv_cache < cache.least_bytes:
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
    yield _wider_engines(cfg.rollout.tensor_parallel_size, cfg.cluster.gpus_per_node)
    yield _more_gpus(cfg.cluster.gpus_per_node, cfg.cluster.num_nodes)


def _wider_engines(size: int, gpus: int) -> Iterator[Values]:
    wider = (n for n in range(size + 1, gpus + 1) if gpus % n == 0)
    yield from ({"rollout.tensor_parallel_size": n, "rollout.engines": "auto"} for n in wider)


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
    step = max(longest, cfg.samples_per_step * longest // cfg.world_size)  # a rank never has more
    yield "train.micro_batch_tokens", min(cfg.train.micro_batch_tokens, step), longest, 256
    if cfg.uses_reward_model:
        yield "reward.batch_tokens", cfg.reward.batch_tokens, longest, 256
    if cfg.uses_engines:
        yield "rollout.kv_cache", cfg.rollout.kv_cache, _least_cache(plan), 64 * MIB


def _least_cache(plan: Plan) -> int:
    """Bytes of one sequence, in whole MiB."""
    return -(-plan.prediction.kv_cache.least_bytes // MIB) * MIB


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
