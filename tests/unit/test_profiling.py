"""The timeline of a step is made where it is asked for, and never costs the run."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest

from hybrid.errors import DeadlineExceeded, WorkerDied
from hybrid.profiling import profiled
from hybrid.telemetry.spans import Spans
from hybrid.telemetry.timeline import ProcessTrace


class Worker(SimpleNamespace):
    def submit(self, method):
        return self, method


class Pool:
    """Answers `start_trace`, and `stop_trace` with a trace of the worker; `fails`: what a method raises."""

    def __init__(self, fails=None, problem=None):
        self.workers = [
            Worker(role="actor", rank=0),
            Worker(role="rollout", rank=0),
            Worker(role="rollout-holder", rank=1),
        ]
        self.fails, self.problem, self.asked = fails or {}, problem, []

    def wait(self, calls, what, timeout_s):
        for worker, method in calls:
            self.asked.append((worker.role, method))
            if method in self.fails:
                raise self.fails[method]
        return [ProcessTrace(100 + i, [], [], self.problem) for i, _ in enumerate(calls)]


def session(tmp_path, pool, step=2):
    warnings = []
    return SimpleNamespace(
        cfg=SimpleNamespace(logging=SimpleNamespace(profile=step), cluster=SimpleNamespace(call_timeout_s=1)),
        pool=pool,
        report=SimpleNamespace(warn=warnings.append, spans=Spans()),
        run_dir=tmp_path,
        warnings=warnings,
    )


def train(s, steps=3) -> list[int]:
    done = []
    for step in range(1, steps + 1):
        with profiled(s, step), s.report.spans.span("generate"):
            done.append(step)
    return done


def test_only_the_named_step_is_recorded_with_a_lane_for_each_process(tmp_path):
    s = session(tmp_path, Pool())
    assert train(s) == [1, 2, 3]
    assert s.pool.asked == [(role, m) for m in ("start_trace", "stop_trace") for role in ("actor", "rollout")]
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [name.split(" (")[0] for name in names] == ["driver", "actor 0", "engine 0"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["generate", "step 2"]
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0
    assert s.warnings == []


@pytest.mark.parametrize("method", ["start_trace", "stop_trace"])
def test_a_timeline_that_cannot_be_made_is_a_warning(tmp_path, method):
    s = session(tmp_path, Pool({method: DeadlineExceeded("actor rank 0 is silent")}))
    assert train(s) == [1, 2, 3]
    assert len(s.warnings) == 1 and "actor rank 0 is silent" in s.warnings[0]
    assert list(tmp_path.iterdir()) == []


def test_a_process_without_operations_is_warned_of_and_the_rest_is_written(tmp_path):
    s = session(tmp_path, Pool(problem="RuntimeError: no kineto"))
    train(s)
    assert len(s.warnings) == 2 and "no kineto" in s.warnings[0]
    assert (tmp_path / "trace.json.gz").is_file()


def test_a_dead_process_and_a_failing_step_end_the_run_as_ever(tmp_path):
    with pytest.raises(WorkerDied):
        train(session(tmp_path, Pool({"stop_trace": WorkerDied("actor rank 0 died")})))
    s = session(tmp_path, Pool())
    with pytest.raises(ZeroDivisionError), profiled(s, 2):
        1 / 0  # noqa: B018
    assert list(tmp_path.iterdir()) == []
