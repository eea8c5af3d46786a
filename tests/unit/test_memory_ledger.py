"""The ledger can be read back whatever happened, and adds up a step."""

from hybrid.memory.ledger import Ledger, read_ledger, read_lines
from hybrid.memory.tenants import RankMoved, RankPeak, Tenant


def row(rank, part, counted):
    return RankMoved(rank, "10.0.0.1", part, counted, counted // 2, 0.5, 3 * counted, 2 * counted)


def test_rows_come_back_with_step_and_phase(tmp_path):
    ledger = Ledger(tmp_path / "run" / "memory.jsonl")
    ledger.tenant(Tenant("rollout", "weights", movable=False))
    ledger.step = 3
    ledger.moves("leave", "train_actor", "reference", [row(0, "weights", 100), row(1, "weights", 120)])
    ledger.transition("forward", "train_actor", 1.5, 0.25)
    rows = read_ledger(tmp_path / "run" / "memory.jsonl")  # Not closed: a running or crashed run is read the same way.
    assert [r["kind"] for r in rows] == ["tenant", "leave", "leave", "transition"]
    assert all(r["time"] > 1.7e9 for r in rows)
    assert {k: rows[2][k] for k in rows[2] if k != "time"} == {
        "step": 3,
        "phase": "train_actor",
        "kind": "leave",
        "role": "reference",
        "rank": 1,
        "node": "10.0.0.1",
        "part": "weights",
        "counted_bytes": 120,
        "copied_bytes": 60,
        "seconds": 0.5,
        "before_bytes": 360,
        "after_bytes": 240,
    }
    assert rows[3]["previous"] == "forward" and rows[3]["leave_seconds"] == 1.5


def test_step_totals_are_named_as_metrics_and_start_again(tmp_path):
    ledger = Ledger(tmp_path / "memory.jsonl")
    ledger.tenant(Tenant("rollout", "weights", movable=False, counted_bytes=70))
    ledger.moves("come", "train_actor", "actor", [row(0, "optimizer", 100), row(1, "optimizer", 120)])
    ledger.transition("forward", "train_actor", 1.5, 0.5)
    ledger.transition("train_actor", "sync", 0.0, 1.0)
    ledger.phase("train_actor", 4.0, [RankPeak("actor", 0, 900), RankPeak("actor", 1, 800), RankPeak("rollout", 0, 50)])
    ledger.phase("train_actor", 2.0, [RankPeak("actor", 0, 700), RankPeak("actor", 1, 950)])
    assert ledger.take_step_totals() == {
        "time/transitions": 3.0,
        "time/train_actor": 6.0,
        "memory/counted/rollout.weights": 70,
        "memory/counted/actor.optimizer": 120,
        "memory/peak/actor": 950,
        "memory/peak/rollout": 50,
    }
    assert ledger.take_step_totals() == {
        "time/transitions": 0.0,
        "memory/counted/rollout.weights": 70,
        "memory/counted/actor.optimizer": 120,
    }


def test_a_line_cut_by_a_crash_is_left_out_and_spoils_no_other(tmp_path):
    path = tmp_path / "memory.jsonl"
    first = Ledger(path)
    first.transition("init", "sync", 0.0, 1.0)
    first.close()
    with path.open("a") as file:
        file.write('{"time": 17')
    assert len(read_ledger(path)) == 1
    second = Ledger(path)
    second.transition("sync", "generate", 0.0, 1.0)
    assert [r["phase"] for r in read_ledger(path)] == ["sync", "generate"]


def test_bytes_that_are_no_row_spoil_no_other(tmp_path):
    path = tmp_path / "memory.jsonl"
    ledger = Ledger(path)
    ledger.transition("init", "sync", 0.0, 1.0)
    with path.open("ab") as file:
        file.write(b"\xff\x00\x9c\n[1, 2]\n")
    ledger.transition("sync", "generate", 0.0, 1.0)
    assert [row and row["phase"] for row in read_lines(path)] == ["sync", None, None, "generate"]
