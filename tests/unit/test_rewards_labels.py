"""Labels are checked when the data is read: C11, C12 and those that the verifier cannot read."""

from __future__ import annotations

import json
from decimal import Decimal

import numpy
import pytest

from hybrid.answers.labels import label_text
from hybrid.data.prompts import load_eval, load_prompts
from hybrid.errors import DataError
from hybrid.rewards import RewardFunction, load_reward
from hybrid.rewards.check_labels import check_labels
from tests.unit.data_files import config, tokenizer, write_jsonl


@pytest.fixture(scope="module")
def math_verify():
    return load_reward("math_verify", 60)


def check(tmp_path, labels: list, reward: RewardFunction, **fields) -> list[str]:
    """Notes on prompts with these labels; `...` is a record without one."""
    rows = [{"prompt": f"question {i}"} | ({} if label is ... else {"label": label}) for i, label in enumerate(labels)]
    cfg = config(write_jsonl(tmp_path / "train.jsonl", rows), **fields)
    notes: list[str] = []
    check_labels([reward], load_prompts(cfg, tokenizer()), None, [], notes.append)
    return notes


def test_c12_one_record_without_a_label_is_refused_with_its_line(tmp_path, math_verify):
    labels = ["1"] * 50
    labels[39] = ...
    with pytest.raises(DataError, match=r"train\.jsonl:40: .*missing"):
        check(tmp_path, labels, math_verify)


@pytest.mark.parametrize(
    "label",
    [
        None,
        "",
        "  ",
        "$ $",
        r"\boxed{}",
        "N/A",
        "null",
        "\u200b",
        True,
        {"ground_truth": "18", "style": "rule"},
        ["18", "19"],
        [],
        float("nan"),
        float("inf"),
    ],
    ids=repr,
)
def test_c11_labels_that_are_not_answers_are_refused_with_their_line(tmp_path, math_verify, label):
    with pytest.raises(DataError, match=r"train\.jsonl:2: ") as error:
        check(tmp_path, ["1", label, "3"], math_verify)
    assert "Give the record an answer" in str(error.value) or "text or a number" in str(error.value)


def test_c10_c11_numbers_and_currency_are_read(tmp_path, math_verify):
    labels = [0.00001, 1e16, 1.5e20, 7, -3.5, 10**30, 10**400, 0, r"\$18.90", r"\$32,\!348", "€5"]
    assert check(tmp_path, labels, math_verify) == []


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (Decimal("0.10"), "0.10"),
        (numpy.float64(1e-05), "1e-05"),
        (numpy.int64(7), "7"),
        (0.1, "0.1"),
        (2**70, str(2**70)),
        (10**400, str(10**400)),  # beyond all floats
    ],
)
def test_numbers_keep_every_digit(label, text):
    assert label_text(label) == text


@pytest.mark.parametrize("label", ["\ud800", "5\udc00"], ids=ascii)
def test_c36_a_lone_surrogate_in_a_label_is_refused_with_its_line(tmp_path, math_verify, label):
    with pytest.raises(DataError, match=r"train\.jsonl:2: .*surrogate"):
        check(tmp_path, ["1", label], math_verify)


def test_a_function_of_the_user_may_take_any_label(tmp_path):
    any_label = RewardFunction(lambda responses, labels: [0.0] * len(responses), "mine.py:any", 10)
    assert check(tmp_path, [None, ..., {"a": 1}, [1], True], any_label) == []


def test_labels_that_cannot_be_read_are_counted_and_five_are_shown(tmp_path, math_verify):
    prose = "the first case is clear and the others follow from it by induction over the number of edges of the graph that we took"
    [note] = check(tmp_path, ["1", *[f"{prose} {i}" for i in range(7)], r"\frac{1}{2"], math_verify)
    assert "8 of 9 labels" in note
    assert note.count("train.jsonl:") == 5


def test_data_of_which_no_label_can_be_read_is_refused(tmp_path, math_verify):
    with pytest.raises(DataError, match=r"none of 2 labels[\s\S]*train\.jsonl:2"):
        check(tmp_path, [r"\frac{1}{2", r"\sqrt{3"], math_verify)


def test_reading_labels_ends_in_time_and_says_how_many_were_left(tmp_path, math_verify):
    rows = [{"prompt": "q", "label": f"{i}" if i % 2 else f"\\frac{{{i}}}{{2"} for i in range(64)]
    cfg = config(write_jsonl(tmp_path / "train.jsonl", rows))
    # No time at all: the first label alone is tried, and it is one that cannot be read.
    with pytest.raises(DataError, match="none of 1 labels that were tried, of 64"):
        check_labels([math_verify], load_prompts(cfg, tokenizer()), None, [], print, seconds=0.0)


def test_evaluation_data_gets_the_same_checks(tmp_path, math_verify):
    train = write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a", "label": "1"}])
    held_out = write_jsonl(tmp_path / "eval.jsonl", [{"prompt": "a", "label": "1"}, {"prompt": "b", "label": {"x": 1}}])
    cfg = config(train, eval=held_out, eval_size=2)
    with pytest.raises(DataError, match=r"eval\.jsonl:2: "):
        check_labels([None], load_prompts(cfg, tokenizer()), math_verify, load_eval(cfg, tokenizer()), print)


def test_extra_rewards_are_checked_too(tmp_path, math_verify):
    other = RewardFunction(lambda responses: [0.0] * len(responses), "mine.py:other", 10)
    cfg = config(write_jsonl(tmp_path / "train.jsonl", [{"prompt": "a", "label": None}]))
    with pytest.raises(DataError, match="missing"):
        check_labels([other, math_verify], load_prompts(cfg, tokenizer()), None, [], print)


def test_looking_at_a_stream_takes_nothing(tmp_path):
    source = load_prompts(config("reasoning_gym:chain_sum", reward={"function": "reasoning_gym"}), tokenizer())
    before = json.dumps(source.state_dict())
    seen = source.look(3)
    assert json.dumps(source.state_dict()) == before
    assert [p.text for p in source.take(3)] == [p.text for p in seen]
