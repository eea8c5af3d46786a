"""The results of reward functions as plain numbers: which are lists of scores, and which are scores."""

from __future__ import annotations

import math
from collections import deque
from decimal import Decimal
from fractions import Fraction
from itertools import count

import numpy as np
import pytest
import torch

from hybrid.rewards import plain


@pytest.mark.parametrize(
    "result",
    [
        [1.0, 0.5],
        (1.0, 0.5),
        np.array([1.0, 0.5]),
        np.array([[1.0], [0.5]], dtype=np.float32),
        torch.tensor([1.0, 0.5], dtype=torch.bfloat16),
        torch.tensor([[1.0], [0.5]], requires_grad=True),
        (value for value in (1.0, 0.5)),
        map(float, ["1", ".5"]),
        deque([1.0, 0.5]),
        {"a": 1.0, "b": 0.5}.values(),
    ],
)
def test_whatever_has_an_order_is_a_list(result):
    assert plain.listed(result, 2) == [1.0, 0.5]


@pytest.mark.parametrize(
    "result", [None, 1.0, "ab", b"ab", {0: 1.0, 1: 2.0}, {1.0, 2.0}, np.array(1.0), torch.tensor(1.0)]
)
def test_whatever_has_none_is_not(result):
    assert plain.listed(result, 2) is None


def test_a_generator_without_end_is_cut_one_beyond_the_responses():
    assert plain.listed(count(), 2) == [0, 1, 2]


def test_rows_that_are_no_column_are_not_flattened():
    assert plain.listed(np.ones((1, 2)), 2) == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (True, 1.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (np.bool_(False), 0.0),
        (np.float32(0.5), 0.5),
        (np.array([0.5]), 0.5),
        (torch.tensor(2), 2.0),
        ({"score": 0.5, "acc": True}, 0.5),
        ({"score": torch.tensor(0.5)}, 0.5),
        (-1e15, -1e15),
    ],
)
def test_numbers_of_all_kinds_are_floats(value, score):
    assert plain.number(value) == score and type(plain.number(value)) is float


class Unreadable:
    def __repr__(self):
        raise ValueError


@pytest.mark.parametrize(
    "value",
    [
        *(None, math.nan, math.inf, -math.inf, "1.0", [1.0], 10**400, 1j, np.float64("nan"), 2e15),
        *(torch.ones(2), np.ones(2), {"acc": 1.0}, {"score": "1"}, {"score": None}),
        *(Decimal("nan"), Decimal("sNaN"), Unreadable()),
    ],
)
def test_what_is_no_finite_number_is_shown(value):
    assert isinstance(plain.number(value), str)


def test_what_is_shown_is_short():
    assert plain.number("x" * 10_000) == "'" + "x" * 299 + " ..."
    assert "Unreadable" in plain.number(Unreadable())


def test_an_exception_is_told_with_its_line_and_without_ours():
    try:
        plain.number_of_nothing()
    except AttributeError as error:
        told = plain.raised(error, ("nothing like this",))
    assert told["kind"] == "builtins.AttributeError" and "number_of_nothing" in told["text"]
    assert "test_rewards_plain.py:" in told["where"] and "(plain.number_of_nothing())" in told["where"]
    assert plain.raised(ValueError("x" * 10_000), ())["where"] == ""
    assert len(plain.raised(ValueError("x" * 10_000), ())["text"]) < 2100
