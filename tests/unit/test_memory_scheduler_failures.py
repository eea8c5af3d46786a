"""A move, a phase or a worker fails: the scheduler says who and what, and nobody comes where somebody did not leave."""

# ruff: noqa: F811  fixtures are imported and asked for by one name

import pytest

from hybrid.errors import DeadlineExceeded, MemoryScheduleError, WorkerDied
from hybrid.memory.ledger import read_ledger
from tests.unit.scheduler_fakes import log, make, roles, walk  # noqa: F401


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
