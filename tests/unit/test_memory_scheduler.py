"""The scheduler moves only what must move, and everyone out before anyone in."""

# ruff: noqa: F811  fixtures are imported and asked for by one name

import subprocess
import sys

from hybrid.memory.ledger import read_ledger
from hybrid.memory.residency import all_resident
from hybrid.memory.tenants import FOLLOWS, NEEDS, PHASES, RankPeak
from tests.unit.scheduler_fakes import GIB, TRAINED, Fake, log, make, roles, walk  # noqa: F401


def test_each_role_leaves_as_soon_as_it_has_started(make, roles, log):
    scheduler = make(roles)
    assert log == [
        ("leave", "rollout", "weights", "kv_cache"),
        ("leave", "actor", *TRAINED),
        ("leave", "critic", *TRAINED),
        ("leave", "reference", "weights"),
        ("leave", "reward", "weights"),
    ]
    assert scheduler.resident == set()


def test_a_ppo_step_moves_what_must_move_and_all_leave_before_any_comes(make, roles, log):
    moves = walk(
        make(roles), log, "sync", "generate", "score", "forward", "train_critic", "train_actor", "sync", "evaluate"
    )
    assert moves == {
        "generate": [("leave", "actor", "weights"), ("come", "rollout", "kv_cache")],
        "score": [("leave", "rollout", "weights", "kv_cache"), ("come", "reward", "weights")],
        "forward": [
            ("leave", "reward", "weights"),
            ("come", "critic", "weights"),
            ("come", "reference", "weights"),
            ("come", "actor", "weights"),
        ],
        "train_critic": [
            ("leave", "actor", "weights"),
            ("leave", "reference", "weights"),
            ("come", "critic", "gradients", "optimizer"),
        ],
        "train_actor": [("leave", "critic", *TRAINED), ("come", "actor", *TRAINED)],
        "sync": [("leave", "actor", "gradients", "optimizer"), ("come", "rollout", "weights")],
        "evaluate": [("leave", "actor", "weights"), ("come", "rollout", "kv_cache")],
    }


def test_grpo_without_reference_keeps_what_two_phases_share(make, log):
    grpo = {
        "rollout": Fake(log, "rollout", ("weights", "kv_cache"), fixed=("weights",)),
        "actor": Fake(log, "actor", TRAINED),
    }
    scheduler = make(grpo)
    moves = walk(scheduler, log, "sync", "generate", "score", "forward", "train_actor", "sync")
    assert moves["score"] == []  # The reward is a function: nothing is needed, so nothing moves.
    assert moves["forward"] == [("leave", "rollout", "kv_cache"), ("come", "actor", "weights")]
    assert moves["train_actor"] == [("come", "actor", "gradients", "optimizer")]
    assert moves["sync"] == [("leave", "actor", "gradients", "optimizer")]
    assert ("rollout", "weights") in scheduler.resident


def test_resident_moves_nothing(make, roles, log):
    scheduler = make(roles, all_resident((role, part) for role, fake in roles.items() for part in fake.parts))
    walk(scheduler, log, "sync", "generate", "score", "forward", "train_critic", "train_actor", "sync")
    assert log == [] and len(scheduler.resident) == 10


def test_a_schedule_is_carried_out_to_the_letter(make, roles, log):
    """The reference leaves for training only, the engine's KV cache stays for sync, the actor's optimizer never moves."""
    keys = {(role, part) for role in ("rollout", "actor", "reference") for part in roles[role].parts}
    kv, reference, gradients = ("rollout", "kv_cache"), ("reference", "weights"), ("actor", "gradients")
    residency = {
        "init": frozenset(keys - {reference}),
        "sync": frozenset(keys - {gradients}),
        "generate": frozenset(keys - {gradients}),
        "forward": frozenset(keys - {kv, gradients}),
        "train_actor": frozenset(keys - {kv, reference}),
    }
    scheduler = make({role: roles[role] for role in ("rollout", "actor", "reference")}, residency)
    assert log == [("leave", "reference", "weights")]
    for _ in range(2):
        for phase, keys_there in residency.items():
            if phase != "init":
                scheduler.enter(phase)
                assert scheduler.resident == keys_there, phase
    moves = walk(scheduler, log, "sync", "generate", "score", "forward", "train_actor")
    assert moves == {
        "sync": [("leave", "actor", "gradients"), ("come", "reference", "weights"), ("come", "rollout", "kv_cache")],
        "generate": [],
        "score": [],
        "forward": [("leave", "rollout", "kv_cache")],
        "train_actor": [("leave", "reference", "weights"), ("come", "actor", "gradients")],
    }


def test_tables_speak_of_declared_phases_and_roles_only():
    assert set(NEEDS) == set(PHASES)
    assert set(FOLLOWS) == {*PHASES, "failed"}
    assert {phase for after in FOLLOWS.values() for phase in after} == set(PHASES) - {"init"}


def test_phases_and_moves_are_in_the_ledger(make, roles, tmp_path):
    scheduler = make(roles, peaks=lambda: [RankPeak("actor", 0, 7 * GIB)])
    scheduler.ledger.take_step_totals()
    scheduler.ledger.step = 1
    with scheduler.running("train_actor"):
        pass
    rows = [r for r in read_ledger(tmp_path / "memory.jsonl") if r["step"] == 1]
    assert [r["kind"] for r in rows] == ["come"] * 6 + ["transition", "phase"]
    assert rows[-1]["peaks"] == [{"role": "actor", "rank": 0, "peak_bytes": 7 * GIB}]
    assert rows[-1]["arrival"] == rows[-1]["peaks"]
    with scheduler.running("train_actor"):
        pass
    assert read_ledger(tmp_path / "memory.jsonl")[-1]["arrival"] == []  # nothing moved, so nothing to tell apart
    totals = scheduler.ledger.take_step_totals()
    assert totals["memory/peak/actor"] == 7 * GIB and totals["memory/counted/actor.optimizer"] == GIB
    assert totals["time/train_actor"] >= 0 and totals["time/transitions"] > 0


def test_caches_are_given_back_before_the_next_phase_moves_anything(make, roles, log):
    scheduler = make(roles, tidy=lambda: log.append("tidy"))
    with scheduler.running("sync"):
        pass
    log.clear()
    with scheduler.running("generate"):
        log.append("work")
    assert log[-2:] == ["work", "tidy"] and log[0] == ("leave", "actor", "weights")


def test_deciding_needs_neither_ray_nor_torch():
    code = (
        "import sys, hybrid.memory.scheduler; sys.exit(bool({'ray', 'torch', 'vllm', 'deepspeed'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
