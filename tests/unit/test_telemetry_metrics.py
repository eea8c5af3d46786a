"""Every step's line has every key, is JSON, and can be read at any moment."""

import json

import numpy as np
import pytest
import torch

from hybrid.errors import DataError
from hybrid.telemetry.metrics import MetricsWriter, metric_keys, read_metrics


def writer(path):
    return MetricsWriter(path, metric_keys())


def test_keys_cover_what_a_run_can_measure():
    keys = metric_keys()
    assert len(keys) == len(set(keys))
    promised = """step reward/mean reward/std response/length_mean response/truncated_share kl/reference kl/sampler loss/policy
        loss/value grad_norm/actor lr/actor tokens/per_second time/step time/generate time/train_critic time/transitions
        memory/counted/rollout.kv_cache memory/counted/critic.optimizer memory/peak/rollout memory/peak/reference gpu/utilization"""
    assert set(promised.split()) <= set(keys)


def test_keys_of_given_tenants_and_phases():
    keys = metric_keys([("actor", "weights"), ("actor", "optimizer")], ["generate"])
    assert [k for k in keys if k.startswith("memory/")] == [
        "memory/counted/actor.weights",
        "memory/counted/actor.optimizer",
        "memory/peak/actor",
    ]
    assert "time/generate" in keys and "time/sync" not in keys


def test_what_does_not_apply_is_null_never_absent(tmp_path):
    written = writer(tmp_path / "metrics.jsonl").write({"step": 1, "reward/mean": 0.5, "kl/reference": None})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert list(row) == metric_keys() and row == written
    assert {k: v for k, v in row.items() if v is not None} == {"step": 1, "reward/mean": 0.5}


def test_lines_stay_json_whatever_the_numbers_are(tmp_path):
    metrics = writer(tmp_path / "metrics.jsonl")
    metrics.write(
        {
            "step": 1,
            "loss/policy": float("nan"),
            "loss/value": float("-inf"),
            "grad_norm/actor": torch.tensor(float("inf")),
        }
    )
    metrics.write({"step": 2, "loss/policy": np.float32(0.5), "grad_norm/actor": torch.tensor(2.0), "lr/actor": 1e-7})

    def no_constants(name):
        raise AssertionError(f"{name} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line, parse_constant=no_constants) for line in lines)
    assert first["loss/policy"] is first["loss/value"] is first["grad_norm/actor"] is None
    assert (second["step"], second["loss/policy"], second["grad_norm/actor"], second["lr/actor"]) == (2, 0.5, 2.0, 1e-7)


def test_unknown_key_is_refused_with_the_nearest(tmp_path):
    metrics = writer(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="'reward/maen'; the nearest is 'reward/mean'"):
        metrics.write({"step": 1, "reward/maen": 0.5})
    with pytest.raises(ValueError, match="'step'"):
        metrics.write({"reward/mean": 0.5})
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_crash_costs_at_most_the_line_it_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = writer(path)
    metrics.write({"step": 1})
    metrics.write({"step": 2})
    path.write_bytes(path.read_bytes()[:-20])
    assert [row["step"] for row in read_metrics(path)] == [1]
    writer(path).write({"step": 2})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_damage_elsewhere_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 is not JSON"):
        read_metrics(path)
    with pytest.raises(DataError, match=r"absent\.jsonl cannot be read"):
        read_metrics(tmp_path / "absent.jsonl")
