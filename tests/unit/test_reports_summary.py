"""From a ledger to numbers: who held what on the fullest GPU, what was measured beside it, and what moving cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid.errors import ConfigError, DataError
from hybrid.reports.document import document
from hybrid.reports.read import Settings, find_run, read_run
from hybrid.reports.summary import summarize
from tests.unit.report_runs import GIB, MIB, REST, SIZES, RunWriter, add_plan, profile


@pytest.fixture
def swapped(tmp_path, monkeypatch):
    run = RunWriter(tmp_path / "swapped", monkeypatch)
    run.start()
    for step in (1, 2, 3):
        run.step(step)
    profile(run.folder)
    return run


def phase(summary, name):
    return next(line for line in summary.phases if line.phase == name)


def test_a_phase_is_split_into_tenants_rest_and_work(swapped):
    summary = summarize(read_run(swapped.folder))
    train = phase(summary, "train_actor")
    assert train.tenants == {
        "rollout/weights": 300 * MIB,
        "actor/weights": 250 * MIB,
        "actor/gradients": 125 * MIB,  # counted at the height of training: away before and after
        "actor/optimizer": 800 * MIB,
    }
    assert train.overhead == sum(REST.values())
    # Rank 1 is the fullest, and shared pages are counted once; the ledger's peak holds the gradients' bytes too.
    assert train.measured == 300 * MIB + 250 * MIB + 800 * MIB + 1010 * MIB + sum(REST.values())
    assert train.working == (1010 - 125) * MIB
    assert train.counted + train.overhead + train.working == train.measured
    assert summary.timeline.place.gpu == 1


def test_a_tenant_is_there_only_between_coming_and_leaving(swapped):
    spans = [s for s in summarize(read_run(swapped.folder)).timeline.spans if s.step == 2 and s.kind == "phase"]
    assert [(s.phase, "rollout/kv_cache" in s.tenants, "actor/optimizer" in s.tenants) for s in spans] == [
        ("generate", True, False),
        ("train_actor", False, True),
        ("sync", False, False),
    ]
    assert spans[0].start < spans[0].end <= spans[1].start < spans[1].end <= spans[2].start


def test_transitions_have_bytes_seconds_rate_and_share(swapped):
    summary = summarize(read_run(swapped.folder))
    into = {(line.previous, line.phase): line for line in summary.transitions}
    train = into["generate", "train_actor"]
    assert train.count == 3 and train.out == {"rollout/kv_cache": 500 * MIB}
    assert train.into["actor/optimizer"] == 800 * MIB
    assert train.copied == 1050 * MIB and train.seconds == pytest.approx(1.0)
    assert train.rate == pytest.approx(1050 * MIB)
    assert summary.step_seconds == pytest.approx(13.5, abs=0.6)
    assert train.share == pytest.approx(1.0 / summary.step_seconds)


def test_residue_is_what_processes_hold_beside_their_tenants(tmp_path, monkeypatch):
    run = RunWriter(tmp_path / "leaking", monkeypatch)
    run.start()
    for step in range(1, 13):
        run.step(step, grew=3 * MIB)
    lines = {line.role: line for line in summarize(read_run(run.folder)).residue}
    assert lines["actor"].points[-1] == (12, REST["actor"] + 36 * MIB)
    assert lines["actor"].growth == pytest.approx(3 * MIB) and lines["rollout"].growth == pytest.approx(0)


def test_a_resident_run_moves_nothing_and_keeps_all_tenants(tmp_path, monkeypatch):
    run = RunWriter(tmp_path / "resident", monkeypatch, swap=False)
    run.start()
    run.step(1)
    summary = summarize(read_run(run.folder))
    assert summary.transitions == () and summary.moving_seconds == 0
    assert set(phase(summary, "generate").tenants) == {"/".join(key) for key in SIZES}
    assert phase(summary, "generate").working == 110 * MIB
    assert {line.role: line.points[-1] for line in summary.residue} == {role: (1, size) for role, size in REST.items()}


def test_a_torn_ledger_is_read_up_to_the_crash(swapped):
    swapped.ledger.step = 4
    swapped.enter("generate", leave=[("actor", "weights")], come=[("rollout", "kv_cache")])
    swapped.ledger.failed("generate", RuntimeError("engine died\nin a long story"))
    with (swapped.folder / "memory.jsonl").open("a") as ledger:
        ledger.write('{"time": 1069.5, "step": 4, "pha')
    summary = summarize(read_run(swapped.folder))
    assert summary.steps == 3
    assert f"1 of the ledger's {summary.lines} lines cannot be read" in " ".join(document(summary).notes)
    assert summary.failure["error"] == "RuntimeError: engine died"
    assert summary.timeline.spans[-1].step == 4


def test_predicted_stands_beside_measured(swapped):
    add_plan(swapped.folder)
    summary = summarize(read_run(swapped.folder))
    generate = phase(summary, "generate")
    assert generate.predicted == 1900 * MIB and generate.measured == 1910 * MIB
    assert generate.error == pytest.approx(1900 / 1910 - 1)
    assert summary.capacity == 6 * GIB
    assert {t.tenant: t.predicted for t in summary.tenants}["actor/optimizer"] == 800 * MIB
    train = next(t for t in summary.transitions if t.phase == "train_actor")
    assert train.predicted_seconds == 0.5


def test_an_engine_over_two_gpus_gives_each_its_half(tmp_path, monkeypatch):
    run = RunWriter(tmp_path / "tp", monkeypatch, more=0)
    run.start()
    run.step(1)
    ledger = run.folder / "memory.jsonl"
    lines = [line for line in ledger.read_text().splitlines()]
    kept = [
        line
        for line in lines
        if '"kind": "phase"' not in line and not ('"role": "rollout"' in line and '"rank": 1' in line)
    ]
    ledger.write_text("\n".join(kept) + "\n")
    tenants = {t.tenant: t.counted for t in summarize(read_run(run.folder)).tenants}
    assert tenants["rollout/kv_cache"] == 250 * MIB and tenants["actor/optimizer"] == 800 * MIB


def test_a_folder_without_a_ledger_is_refused(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"memory\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "memory.jsonl").write_text('{"time": 1')
    with pytest.raises(DataError, match="none of its 1 lines can be read"):
        read_run(tmp_path)
    (tmp_path / "memory.jsonl").write_text("")
    with pytest.raises(DataError, match="no row"):
        read_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "named").mkdir(parents=True)
    assert find_run("named").name == "named"
    assert find_run(str(tmp_path / "memory.jsonl")) == tmp_path
    for name in ("elsewhere", "x" * 5000):
        with pytest.raises(ConfigError, match=f"no run {name}"):
            find_run(name)


def test_rows_that_lack_what_their_kind_has_are_left_out(swapped):
    whole = read_run(swapped.folder)
    with (swapped.folder / "memory.jsonl").open("a") as file:
        file.write('{"kind": "phase"}\n7\n{"time": 0, "step": 9, "phase": "sync", "kind": "leave", "role": "actor"}\n')
    assert replace(read_run(swapped.folder), unread=0, lines=whole.lines) == whole


@pytest.mark.parametrize(
    "profile", [b"\xff\xfe\x00", b"cluster: [1]", b"memory: text", b"rollout: {kv_cache: 12parsecs}", b""]
)
def test_a_profile_that_cannot_be_read_is_done_without(swapped, profile):
    (swapped.folder / "profile.yaml").write_bytes(profile)
    assert read_run(swapped.folder).settings == Settings()
