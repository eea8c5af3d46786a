"""The scheduler moves only what must move, everyone out before anyone in, and says what went wrong."""

import subprocess
import sys

import pytest

from hybrid.errors import DeadlineExceeded, MemoryScheduleError, WorkerDied
from hybrid.memory.ledger import Ledger, read_ledger
from hybrid.memory.residency import all_resident, swap_all
from hybrid.memory.scheduler import MemoryScheduler
from hybrid.memory.tenants import FOLLOWS, NEEDS, PHASES, RankMoved, RankPeak, Tenant

GIB = 2**30
TRAINED = ("weights", "gradients", "optimizer")


class Fake:
    """Two ranks that move nothing but write down what they were asked; `falls` is the share of counted bytes that really goes."""

    def __init__(self, log, role, parts, fixed=(), falls=1.0):
        self.log, self.role, self.parts, self.fixed, self.falls = log, role, parts, fixed, falls
        self.error = {}
        self.kept = 0
        self.deadlines = []

    def tenants(self):
        return [Tenant(self.role, part, movable=part not in self.fixed) for part in self.parts]

    def leave(self, parts, deadline_s):
        return self._answer("leave", parts, deadline_s)

    def come(self, parts, deadline_s):
        return self._answer("come", parts, deadline_s)

    def _answer(self, kind, parts, deadline_s):
        self.log.append((kind, self.role, *parts))
        self.deadlines.append(deadline_s)
        if kind in self.error:
            raise self.error[kind]
        rows = []
        for rank in (0, 1):
            at = 10 * GIB + self.kept
            for part in parts:
                after = at - int(GIB * (self.falls if rank else 1.0))
                rows.append(RankMoved(rank, f"node{rank}", part, GIB, GIB, 0.1, at, after))
                at = after
        return rows


@pytest.fixture
def log():
    return []


@pytest.fixture
def roles(log):
    """PPO on CUDA: everything moves."""
    return {
        "rollout": Fake(log, "rollout", ("weights", "kv_cache")),
        "actor": Fake(log, "actor", TRAINED),
        "critic": Fake(log, "critic", TRAINED),
        "reference": Fake(log, "reference", ("weights",)),
        "reward": Fake(log, "reward", ("weights",)),
    }


@pytest.fixture
def make(tmp_path, log):
    def scheduler(roles, residency=None, **options):
        tenants = [t for fake in roles.values() for t in fake.tenants()]
        residency = residency or swap_all([t.key for t in tenants], [t.key for t in tenants if t.movable])
        made = MemoryScheduler({}, residency=residency, ledger=Ledger(tmp_path / "memory.jsonl"), **options)
        for role, fake in roles.items():
            made.adopt(role, fake)
        return made

    return scheduler


def walk(scheduler, log, *phases):
    """Moves on the way into each phase."""
    moves = {}
    for phase in phases:
        log.clear()
        scheduler.enter(phase)
        moves[phase] = list(log)
    return moves


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


def test_off_the_schedules_way_only_what_is_needed_comes(make, roles, log):
    """After a failure the engine sleeps: checkpoint, in whose residency it is, cannot wake what only a sync fills."""
    everything = frozenset((role, part) for role in ("rollout", "actor") for part in roles[role].parts)
    residency = {phase: everything for phase in ("init", "sync", "generate", "checkpoint")}
    residency |= {"train_actor": frozenset(key for key in everything if key[0] == "actor")}
    scheduler = make({role: roles[role] for role in ("rollout", "actor")}, residency)
    scheduler.abort()
    log.clear()
    scheduler.enter("checkpoint")
    assert log == []
    scheduler.enter("sync")
    assert log == [("come", "rollout", "weights", "kv_cache")]


def test_residue_that_grows_is_reported_with_its_owner(make, roles, log, tmp_path):
    warnings = []
    scheduler = make(roles, warn=warnings.append, residue_slack=64 * 2**20)
    for step in range(1, 20):
        scheduler.ledger.step = step
        for role, leak in (("critic", 20 * 2**20), ("actor", 0)):
            roles[role].kept = leak * step
        walk(scheduler, log, "sync", "generate", "forward", "train_critic", "train_actor")
    rows = [r for r in read_ledger(tmp_path / "memory.jsonl") if r["kind"] == "growth"]
    assert {(r["role"], r["phase"]) for r in rows} == {("critic", "train_actor")}
    assert [(r["step"], r["rank"], r["grown_bytes"]) for r in rows][:2] == [(6, 0, 100 * 2**20), (6, 1, 100 * 2**20)]
    assert rows[2]["step"] == 11 and len(warnings) == len(rows) == 6
    assert warnings[0].startswith("critic rank 0 on node node0 holds") and "20.0 MiB a step" in warnings[0]


@pytest.mark.parametrize("wrong", ["generate", "evaluate", "init"])
def test_generating_with_old_weights_is_refused(make, roles, log, wrong):
    scheduler = make(roles)
    walk(scheduler, log, "sync", "generate", "train_actor")
    log.clear()
    with pytest.raises(
        MemoryScheduleError, match=rf"{wrong} may not follow train_actor; after train_actor come: .*sync"
    ) as error:
        scheduler.enter(wrong)
    assert "generate" not in str(error.value).split("come:")[1]
    assert log == [] and scheduler.phase == "train_actor"


def test_discarded_weights_are_woken_by_sync_only(make, roles, log):
    scheduler = make(roles)
    with pytest.raises(MemoryScheduleError, match=r"rollout/weights, which lost its contents .* enter sync first"):
        scheduler.enter("generate")
    walk(scheduler, log, "sync", "generate", "score")
    with pytest.raises(MemoryScheduleError, match="generate after score would wake rollout/weights"):
        scheduler.enter("generate")


def test_tables_speak_of_declared_phases_and_roles_only():
    assert set(NEEDS) == set(PHASES)
    assert set(FOLLOWS) == {*PHASES, "failed"}
    assert {phase for after in FOLLOWS.values() for phase in after} == set(PHASES) - {"init"}


def test_roles_start_in_init_only(make, roles, log):
    scheduler = make({"actor": roles["actor"]})
    scheduler.enter("train_actor")
    with pytest.raises(MemoryScheduleError, match="critic starts in phase train_actor"):
        scheduler.adopt("critic", roles["critic"])


def test_memory_that_did_not_fall_names_role_rank_and_part(make, roles, log):
    roles["critic"].falls = 0.5
    with pytest.raises(MemoryScheduleError) as error:
        make(roles)
    message = str(error.value)
    for word in (
        "critic rank 1 on node node1",
        "optimizer (1024 MiB)",
        "3072 MiB counted",
        "only 1536 MiB",
        "Likely causes",
        "residue_slack",
    ):
        assert word in message


def test_residue_within_tolerance_and_slack_is_fine(make, roles):
    for role in roles.values():
        role.falls = 0.9
    make(roles, residue_tolerance=0.1, residue_slack=1024)
    roles["actor"].falls = 0.89
    with pytest.raises(MemoryScheduleError, match="actor rank 1"):
        make(roles, residue_tolerance=0.1, residue_slack=1024)
    make(roles, residue_tolerance=0.1, residue_slack=2**26)


def test_nobody_comes_when_somebody_did_not_leave(make, roles, log):
    scheduler = make(roles)
    walk(scheduler, log, "sync", "generate")
    roles["rollout"].error["leave"] = DeadlineExceeded("leave: no answer within 300 s from rollout rank 1")
    log.clear()
    with pytest.raises(DeadlineExceeded, match="rollout rank 1"):
        scheduler.enter("forward")
    assert [move[0] for move in log] == ["leave", "leave"]  # The second is the attempt to bring the engines to sleep.
    with pytest.raises(MemoryScheduleError, match=r"rollout/kv_cache, rollout/weights failed half-way"):
        scheduler.enter("sync")


def test_the_deadline_is_for_the_whole_barrier(make, roles, log):
    scheduler = make(roles, barrier_timeout_s=50)
    scheduler.enter("forward")
    given = [roles[role].deadlines[-1] for role in ("critic", "reference", "actor")]
    assert 49 < given[0] <= 50 and given == sorted(given, reverse=True)


def test_a_failing_phase_puts_the_engines_to_sleep_and_keeps_its_error(make, roles, log, tmp_path):
    scheduler = make(roles)
    scheduler.enter("sync")
    log.clear()
    with pytest.raises(ZeroDivisionError), scheduler.running("generate"):
        raise ZeroDivisionError("boom")
    assert log[-1] == ("leave", "rollout", "weights", "kv_cache")
    assert scheduler.phase == "failed" and scheduler.resident == set()
    assert [(r["phase"], r["error"]) for r in read_ledger(tmp_path / "memory.jsonl") if r["kind"] == "failed"] == [
        ("generate", "ZeroDivisionError: boom")
    ]
    with pytest.raises(MemoryScheduleError, match="may not follow failed"):
        scheduler.enter("generate")
    scheduler.enter("sync")


def test_a_dead_worker_ends_the_run_without_more_waiting(make, roles, log):
    scheduler = make(roles)
    scheduler.enter("sync")
    log.clear()
    with pytest.raises(WorkerDied), scheduler.running("generate"):
        log.clear()
        raise WorkerDied("actor rank 0 on node a died")
    assert log == [] and scheduler.phase == "failed"


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
