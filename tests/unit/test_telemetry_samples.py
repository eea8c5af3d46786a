"""samples.jsonl shows the range of a step, not its luckiest corner."""

import json

import pytest

from hybrid.data.samples import Prompt, Sample
from hybrid.telemetry.samples import SamplesWriter, choose


def samples(*rewards):
    return [
        Sample(
            Prompt(i, f"prompt {i}", [1, 2], label="42"), i, [3, 4, 5], [-0.5] * 3, f"answer {i} é", i == 1, 7, reward
        )
        for i, reward in enumerate(rewards)
    ]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_best_worst_and_between_best_first(tmp_path):
    path = tmp_path / "samples.jsonl"
    SamplesWriter(path, 3).write(5, samples(0.1, 0.9, 0.5, 0.2, 0.0, 0.6, 0.8))
    rows = read(path)
    assert [row["reward"] for row in rows] == [0.9, 0.5, 0.0]
    assert rows[0] == {
        "step": 5,
        "reward": 0.9,
        "prompt": "prompt 1",
        "response": "answer 1 é",
        "label": "42",
        "truncated": True,
        "tokens": 3,
        "weight_version": 7,
        "group": 1,
    }
    assert "é" in path.read_text()


@pytest.mark.parametrize("count, chosen", [(0, []), (1, [1]), (2, [1, 0]), (3, [1, 2, 0]), (9, [1, 2, 0])])
def test_how_many(count, chosen):
    assert choose(samples(0.0, 1.0, 0.5), count) == chosen


def test_equal_rewards_and_missing_ones(tmp_path):
    assert choose(samples(1.0, 1.0, 1.0, 1.0, 1.0), 3) == [0, 2, 4]
    assert choose(samples(None, float("nan"), 0.0), 2) == [2, 1]
    SamplesWriter(tmp_path / "s.jsonl", 2).write(1, samples(None, float("nan"), 0.0))
    assert [row["reward"] for row in read(tmp_path / "s.jsonl")] == [0.0, None]


def test_extra_columns_follow_their_sample_and_any_label_can_be_shown(tmp_path):
    chosen = samples(0.0, 1.0)
    chosen[1].prompt.label = {"set": {1}}
    SamplesWriter(tmp_path / "s.jsonl", 1).write(1, chosen, [{"advantage": -1.0}, {"advantage": 1.0}])
    (row,) = read(tmp_path / "s.jsonl")
    assert row["advantage"] == 1.0 and row["label"] == {"set": "{1}"}


class Shy:
    def __str__(self):
        raise RuntimeError("no")


def deep(levels):
    return [deep(levels - 1)] if levels else 1


@pytest.mark.parametrize(
    ("label", "written"),
    [
        ("\ud800", "\ud800"),
        ({"\udfff": ["é\ud800"]}, {"\udfff": ["é\ud800"]}),
        (float("nan"), "nan"),
        ([float("-inf"), (1, 2)], ["-inf", [1, 2]]),
        ({(1, 2): b"\xff"}, {"(1, 2)": "b'\\xff'"}),
        (Shy(), "Shy that cannot be shown (RuntimeError)"),
    ],
)
def test_c36_no_label_keeps_samples_from_being_written(tmp_path, label, written):
    chosen = samples(1.0)
    chosen[0].prompt.label = label
    SamplesWriter(tmp_path / "s.jsonl", 1).write(1, chosen)
    (row,) = read(tmp_path / "s.jsonl")
    assert row["label"] == written
    assert "NaN" not in (tmp_path / "s.jsonl").read_text(encoding="utf-8")


def test_c36_a_label_that_is_nested_deep_is_written(tmp_path):
    chosen = samples(1.0)
    chosen[0].prompt.label = deep(300)
    SamplesWriter(tmp_path / "s.jsonl", 1).write(1, chosen)
    assert str(read(tmp_path / "s.jsonl")[0]["label"]).count("[") == 300
