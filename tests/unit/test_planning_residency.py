"""The schedule is the cheapest that fits: compared with all others on small instances, and looked at on cases with known answers."""

import itertools
import random

import pytest

from hybrid.memory.tenants import NEEDS
from hybrid.planning.footprint import Limits, Speeds, peak, seconds_per_step, tier_bytes
from hybrid.planning.prediction import PhaseUse, Prediction, TenantSize
from hybrid.planning.residency import cheapest_schedule, least_tier_bytes

SPEEDS = Speeds(10.0, 20.0)
RL = [("generate", "forward"), ("forward", "train_actor"), ("train_actor", "sync"), ("sync", "generate")]
CYCLE = [p for p, _ in RL]
WEIGHTS, KV = ("rollout", "weights"), ("rollout", "kv_cache")
ACTOR, OPTIMIZER, REFERENCE = ("actor", "weights"), ("actor", "optimizer"), ("reference", "weights")


def tenant(key, size, leave=None, come=None, host=None, movable=True):
    leave = size if leave is None else leave
    return TenantSize(*key, size, movable, leave, size if come is None else come, size if host is None else host)


def predict(*tenants, working=None, overhead=0, gpus_per_node=1):
    uses = tuple(PhaseUse(phase, {"activations": size}) for phase, size in (working or {}).items())
    return Prediction(tenants, uses, {"context": overhead}, {}, gpus_per_node)


def walk_of(*pairs, steps=10, start="sync"):
    return {**dict.fromkeys(pairs, 1.0), ("init", start): 1 / steps}


def grpo(**sizes):
    """GRPO on CUDA: the engine loses its contents, the reference keeps its copy."""
    size = {"engine": 10, "kv": 20, "actor": 10, "optimizer": 60, "reference": 10} | sizes
    return predict(
        tenant(WEIGHTS, size["engine"], 0, 0, 0),
        tenant(KV, size["kv"], 0, 0, 0),
        tenant(ACTOR, size["actor"]),
        tenant(OPTIMIZER, size["optimizer"]),
        tenant(REFERENCE, size["reference"], leave=0),
        working={"generate": 5, "train_actor": 15, "forward": 10},
    )


def where(residency, key):
    return {phase for phase, keys in residency.items() if key in keys}


def test_what_fits_all_at_once_never_moves():
    prediction = grpo()
    found = cheapest_schedule(prediction, walk_of(*RL), Limits(125, 0), SPEEDS)
    assert set(found) == {"init", "generate", "forward", "train_actor", "sync"}
    assert all(keys == {t.key for t in prediction.tenants} for keys in found.values())


def test_what_is_free_to_leave_goes_before_what_costs():
    """All is there in generate (115); forward and training have 5 and 10 too much, and the KV cache moves for nothing."""
    prediction = grpo()
    found = cheapest_schedule(prediction, walk_of(*RL), Limits(115, 10**6), SPEEDS)
    assert seconds_per_step(prediction, found, walk_of(*RL), SPEEDS) == 0
    assert "forward" not in where(found, KV) and "train_actor" not in where(found, KV)
    assert all(set(CYCLE) <= where(found, key) for key in (WEIGHTS, ACTOR, OPTIMIZER, REFERENCE))


def test_short_of_memory_only_the_cheapest_way_out_is_taken():
    """With 90 the optimizer (6 s to go, 3 to come) cannot be beside engine and KV cache, nor the reference (0.5 s) beside training."""
    prediction = grpo()
    found = cheapest_schedule(prediction, walk_of(*RL), Limits(90, 10**6), SPEEDS)
    assert "generate" not in where(found, OPTIMIZER) and "train_actor" not in where(found, REFERENCE)
    assert set(CYCLE) <= where(found, ACTOR)
    assert seconds_per_step(prediction, found, dict.fromkeys(RL, 1.0), SPEEDS) == 9.5


def test_engine_weights_come_in_sync_only_and_leave_with_the_kv_cache():
    for capacity in range(85, 130, 4):
        found = cheapest_schedule(grpo(), walk_of(*RL), Limits(capacity, 10**6), SPEEDS)
        if found is None:
            continue
        assert {"sync", "generate"} <= where(found, WEIGHTS)
        assert where(found, KV) <= where(found, WEIGHTS)
        assert "forward" not in where(found, WEIGHTS) or "generate" in where(found, WEIGHTS)


def test_tenants_that_cannot_move_stay_and_count():
    prediction = predict(
        tenant(WEIGHTS, 10, movable=False), tenant(KV, 20, 0, 0, 0), tenant(ACTOR, 30), working={"train_actor": 60}
    )
    walk = walk_of(("generate", "train_actor"), ("train_actor", "sync"), ("sync", "generate"))
    assert cheapest_schedule(prediction, walk, Limits(99, 10**6), SPEEDS) is None
    found = cheapest_schedule(prediction, walk, Limits(100, 10**6), SPEEDS)
    assert where(found, WEIGHTS) == set(found) and "train_actor" not in where(found, KV)


def test_the_slow_tier_bounds_what_may_leave():
    prediction = grpo()
    limits = Limits(90, 10**6)
    assert least_tier_bytes(prediction, walk_of(*RL), limits) == 70  # the optimizer's and the reference's copy
    assert cheapest_schedule(prediction, walk_of(*RL), Limits(90, 69), SPEEDS) is None
    found = cheapest_schedule(prediction, walk_of(*RL), Limits(90, 70), SPEEDS)
    assert tier_bytes(prediction, found) == 70
    assert least_tier_bytes(prediction, walk_of(*RL), Limits(84, None)) is None


def test_init_fits_while_roles_load_one_after_another():
    """Engine (10 + 20) and actor (10 + 60) with 50 to load with do not fit 125 together: something leaves before the actor loads."""
    prediction = predict(
        tenant(WEIGHTS, 10, 0, 0, 0),
        tenant(KV, 20, 0, 0, 0),
        tenant(ACTOR, 10),
        tenant(OPTIMIZER, 60),
        working={"init": 50},
    )
    found = cheapest_schedule(prediction, walk_of(*RL), Limits(125, 10**6), SPEEDS)
    assert KV not in found["init"] and ACTOR in found["init"]
    assert peak(prediction, found, "init")[0] <= 125
    assert peak(prediction, found, "init")[1].what == "loading the actor"


def test_several_updates_a_step_make_swapping_between_them_dear():
    """Critic and actor optimizers in turn, four updates: keeping the smaller one resident saves all of its trips."""
    prediction = predict(
        tenant(ACTOR, 10),
        tenant(OPTIMIZER, 30),
        tenant(("critic", "weights"), 10),
        tenant(("critic", "optimizer"), 30),
        tenant(KV, 40, 0, 0, 0),
        tenant(WEIGHTS, 10, 0, 0, 0),
    )
    walk = walk_of(("generate", "forward"), ("forward", "train_critic"), ("train_actor", "sync"), ("sync", "generate"))
    walk |= {("train_critic", "train_actor"): 4.0, ("train_actor", "train_critic"): 3.0}
    found = cheapest_schedule(prediction, walk, Limits(90, 10**6), SPEEDS)
    assert {"train_critic", "train_actor"} <= where(found, OPTIMIZER) & where(found, ("critic", "optimizer"))
    assert "generate" not in where(found, OPTIMIZER) & where(found, ("critic", "optimizer"))


@pytest.mark.parametrize("seed", range(50))
def test_no_cheaper_schedule_exists(seed):
    rng = random.Random(seed)
    tenants = [
        tenant(WEIGHTS, rng.randint(1, 30), 0, 0, 0, movable=rng.random() < 0.7),
        tenant(KV, rng.randint(1, 30), 0, 0, 0),
        tenant(ACTOR, rng.randint(1, 30), leave=rng.randint(0, 30), come=rng.randint(0, 30)),
        tenant(OPTIMIZER, rng.randint(1, 60), leave=rng.randint(0, 60), host=rng.randint(0, 60)),
    ]
    tenants += [tenant(REFERENCE, rng.randint(1, 30), leave=0)] if seed % 5 == 0 else []
    prediction = predict(
        *tenants, working={p: rng.randint(0, 30) for p in [*CYCLE, "init"]}, overhead=rng.randint(0, 5)
    )
    walk = walk_of(*RL, steps=rng.randint(1, 5)) | {("train_actor", "forward"): float(rng.randint(0, 2))}
    total = sum(t.device_bytes for t in tenants)
    limits = Limits(rng.randint(total // 2, total + 30), rng.randint(0, total))
    best = brute_force(prediction, walk, limits)
    found = cheapest_schedule(prediction, walk, limits, SPEEDS)
    if found is None:
        assert best is None
        return
    assert found in list(allowed(prediction, walk, limits))
    assert cost(prediction, walk)(found) == pytest.approx(best, abs=1e-4)


def brute_force(prediction, walk, limits):
    """(seconds, moves) per step of the best of all residencies, by trying them; None when none is allowed."""
    return min(map(cost(prediction, walk), allowed(prediction, walk, limits)), default=None)


def allowed(prediction, walk, limits):
    """Every residency that keeps the rules."""
    phases = sorted({phase for pair in walk for phase in pair})
    keys = [t.key for t in prediction.tenants]
    host = {t.key: t.host_bytes for t in prediction.tenants}
    movable = {t.key for t in prediction.tenants if t.movable}
    choices = []
    for phase in phases:
        needed = {key for key in keys if key in NEEDS[phase] or key not in movable}
        free = [key for key in keys if key not in needed]
        sets = [frozenset(needed).union(some) for n in range(len(free) + 1) for some in itertools.combinations(free, n)]
        choices.append([s for s in sets if fits(prediction, limits, phase, s) and not (KV in s and WEIGHTS not in s)])
    for chosen in itertools.product(*choices):
        residency = dict(zip(phases, chosen, strict=True))
        woken = any(WEIGHTS in residency[q] - residency[p] and q != "sync" for p, q in walk)
        gone = set(keys).difference(frozenset.intersection(*chosen))
        if not woken and sum(host[key] for key in gone) <= limits.tier_bytes:
            yield residency


def fits(prediction, limits, phase, keys):
    size = {t.key: t.device_bytes for t in prediction.tenants}
    base = sum(prediction.overhead.values()) + sum(u.working_bytes for u in prediction.phases if u.phase == phase)
    if phase != "init":
        return base + sum(size[key] for key in keys) <= limits.device_bytes
    roles = [role for role in ("rollout", "actor", "reference") if any(key[0] == role for key in size)]
    return all(
        base + sum(size[key] for key in size if key[0] == role or (key in keys and key[0] in roles[:n]))
        <= limits.device_bytes
        for n, role in enumerate(roles)
    )


def cost(prediction, walk):
    """Of a residency: seconds and moves per step, init's own departures for their share."""
    leave = {t.key: t.leave_bytes / 10.0 for t in prediction.tenants}
    come = {t.key: t.come_bytes / 20.0 for t in prediction.tenants}
    once = sum(times for (p, _), times in walk.items() if p == "init")

    def of(residency):
        seconds = moved = 0.0
        steps = [(times, residency[p], residency[q]) for (p, q), times in walk.items()]
        for times, before, after in [*steps, (once, leave.keys(), residency["init"])]:
            moved += times * (len(before - after) + len(after - before))
            seconds += times * (sum(leave[k] for k in before - after) + sum(come[k] for k in after - before))
        return round(seconds, 6), round(moved, 6)

    return of


def test_a_large_run_is_planned_in_under_a_second():
    gib = 2**30
    trained = [
        ((role, part), size)
        for role in ("actor", "critic")
        for part, size in (("weights", 2 * gib), ("gradients", 4 * gib), ("optimizer", 12 * gib + 12345))
    ]
    tenants = [tenant(key, size) for key, size in trained]
    tenants += [tenant(WEIGHTS, 16 * gib, 0, 0, 0), tenant(KV, 16 * gib, 0, 0, 0)]
    tenants += [tenant(REFERENCE, 2 * gib, 0), tenant(("reward", "weights"), 16 * gib, 0)]
    prediction = predict(
        *tenants, working={"train_actor": 9 * gib + 1, "train_critic": 8 * gib, "generate": gib}, overhead=5 * gib
    )
    step = ["generate", "score", "forward", *["train_critic", "train_actor"] * 4, "sync", "generate"]
    walk = {
        ("init", "sync"): 0.01,
        ("sync", "evaluate"): 0.01,
        ("evaluate", "checkpoint"): 0.01,
        ("checkpoint", "generate"): 0.0,
    }
    for pair in itertools.pairwise(step):
        walk[pair] = walk.get(pair, 0) + 1
    for size in (60, 70, 80):
        found = cheapest_schedule(prediction, walk, Limits(size * gib, 10**15), Speeds(20e9, 25e9))
        assert all(peak(prediction, found, phase)[0] <= size * gib for phase in found)
