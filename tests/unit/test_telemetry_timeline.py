"""One timeline of many processes: what each recorded, on one clock, in a lane of its own."""

from __future__ import annotations

import gzip
import json
import time

import torch

from hybrid.telemetry.spans import Span, Spans
from hybrid.telemetry.timeline import ProcessTrace, chrome_trace
from hybrid.telemetry.torch_trace import Op, OpTrace, TorchRecorder, read_torch_trace

MS = 1_000_000
START = 1_790_000_000_000 * MS


def read(*processes) -> tuple[dict[str, list[dict]], list[dict]]:
    """Timed events by the title of their lane, and all others."""
    trace = json.loads(gzip.decompress(chrome_trace(processes, START)))
    titles = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    lanes = {
        title: [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid] for pid, title in titles.items()
    }
    return lanes, [e for e in trace["traceEvents"] if e["ph"] == "M"]


def span(name: str, start_ms: float, ms: float, thread: str = "MainThread") -> Span:
    return Span(name, START + round(start_ms * MS), round(ms * MS), thread)


def op(name: str, start_ms: float, us: float, category: str = "cpu_op", thread: str = "thread 7") -> Op:
    return Op(START + round(start_ms * MS), us, name, category, thread)


def test_processes_lie_on_one_clock_each_in_its_lane():
    driver = ProcessTrace(10, [span("train_actor", 5, 20)])
    actor = ProcessTrace(11, [span("train", 6, 18)], [OpTrace(11, [op("aten::mm", 7.5, 250.5)])])
    lanes, _ = read(("driver", driver), ("actor 0", actor))
    assert list(lanes) == ["driver (pid 10)", "actor 0 (pid 11)"]
    (phase,) = lanes["driver (pid 10)"]
    call, mm = lanes["actor 0 (pid 11)"]
    assert (phase["name"], phase["ts"], phase["dur"]) == ("train_actor", 5000, 20000)
    assert (call["name"], call["ts"], call["dur"]) == ("train", 6000, 18000)
    assert (mm["name"], mm["ts"], mm["dur"], mm["cat"]) == ("aten::mm", 7500, 250.5, "cpu_op")


def test_threads_and_streams_are_rows_of_their_process_by_name():
    ops = [op("mm", 1, 2), op("gemm", 1, 2, "kernel", "GPU 0 stream 7")]
    trace = ProcessTrace(11, [span("train", 0, 5), span("score", 1, 2, "hybrid-score")], [OpTrace(11, ops)])
    lanes, about = read(("actor 0", trace))
    rows = {e["tid"]: e["args"]["name"] for e in about if e["name"] == "thread_name"}
    assert [(e["name"], rows[e["tid"]]) for e in lanes["actor 0 (pid 11)"]] == [
        ("train", "calls, MainThread"),
        ("score", "calls, hybrid-score"),
        ("mm", "thread 7"),
        ("gemm", "GPU 0 stream 7"),
    ]


def test_worker_processes_of_an_engine_have_lanes_of_their_own():
    engine = ProcessTrace(
        20, [span("generate", 0, 5)], [OpTrace(21, [op("mm", 1, 2)]), OpTrace(22, [op("mm", 1, 2)], 5)]
    )
    lanes, about = read(("engine 0", engine))
    assert {title: len(events) for title, events in lanes.items()} == {
        "engine 0 (pid 20)": 1,
        "engine 0 worker 0 (pid 21)": 1,
        "engine 0 worker 1 (pid 22)": 1,
    }
    assert [e["args"]["labels"] for e in about if e["name"] == "process_labels"] == ["5 shorter operations left out"]


def test_torch_and_our_spans_keep_the_same_clock():
    spans = Spans()
    recorder = TorchRecorder("cpu")
    spans.start()
    with spans.span("work"):
        for _ in range(20):
            torch.ones(100, 100) @ torch.ones(100, 100)
    trace = recorder.stop()
    (work,) = spans.take()
    products = [o for o in trace.ops if o.name == "aten::mm"]
    assert len(products) == 20
    assert work.start_ns - MS < products[0].start_ns < products[-1].start_ns < work.start_ns + work.duration_ns + MS


def test_the_longest_operations_are_kept_in_order_and_devices_are_told_apart(tmp_path):
    def event(name, ts, dur, pid=5, tid=6, **more):
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur} | more

    about = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7 "}}
    events = [event("step", 10.5, 100), event("tiny", 11, 1), event("outer", 9, 50)]
    events += [event("gemm", 12, 30, pid=0, tid=7, cat="kernel"), event("whole", 0, 999, pid="Spans"), about]
    file = tmp_path / "t.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"baseTimeNanoseconds": START, "traceEvents": events}).encode()))
    trace = read_torch_trace(file, most=3)
    assert (trace.pid, trace.left_out) == (5, 1)
    assert [(o.name, o.start_ns - START, o.thread) for o in trace.ops] == [
        ("outer", 9000, "thread 6"),
        ("step", 10500, "thread 6"),
        ("gemm", 12000, "GPU 0 stream 7"),
    ]


def test_spans_are_kept_only_between_start_and_take():
    spans = Spans()
    with spans.span("before"):
        spans.start()
    with spans.span("outer"), spans.span("inner"):
        time.sleep(0.002)
    try:
        with spans.span("raises"):
            raise ValueError
    except ValueError:
        pass
    taken = spans.take()
    with spans.span("after"):
        pass
    assert [s.name for s in taken] == ["inner", "outer", "raises"]
    assert taken[0].duration_ns >= 2 * MS and taken[1].start_ns <= taken[0].start_ns
    assert spans.take() == []
