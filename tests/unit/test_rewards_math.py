"""What `math_verify` reads in labels and responses: each case with the score that a person would give."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from hybrid.answers.labels import BadLabel, label_text
from hybrid.rewards.verifiers import MathVerify

GOLDEN = Path(__file__).parents[1] / "golden"
SHARED = json.loads((GOLDEN / "math_cases.json").read_text(encoding="utf-8"))
BY_KIND = defaultdict(list)
for row in json.loads((GOLDEN / "math_answers.json").read_text(encoding="utf-8")):
    BY_KIND[row["kind"]].append(row)


@pytest.fixture(scope="module")
def verifier():
    return MathVerify()


def outcome(verifier: MathVerify, case: dict) -> float | str:
    """1.0, 0.0, or "load" where the label is refused when the data is read."""
    try:
        text = label_text(case["label"])
    except BadLabel:
        return "load"
    if case["right"] == "load" and verifier.unreadable(text):
        return "load"
    return verifier([case["response"]], [case["label"]])[0]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: f"{case['label']!r} {case['response'][:40]}")
def test_c28_to_c30_responses_are_scored_as_a_person_would(verifier, case):
    """Includes C10 (currency in labels) and C11 (labels that are not text)."""
    assert case["right"] is None or outcome(verifier, case) == case["right"]


@pytest.mark.parametrize("kind", BY_KIND)
def test_answers_of_a_kind_are_scored_as_a_person_would(verifier, kind):
    got = [(case["label"], case["response"], case["right"], outcome(verifier, case)) for case in BY_KIND[kind]]
    assert [row for row in got if row[2] != row[3]] == []


@pytest.mark.parametrize("kind", [kind for kind in BY_KIND if kind not in ("refused", "not text")])
def test_every_label_that_has_a_right_answer_can_be_read(verifier, kind):
    labels = {str(case["label"]) for case in BY_KIND[kind] if case["right"] == 1}
    assert {label: reason for label in labels if (reason := verifier.unreadable(label))} == {}


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        (r"\frac{1}{2", "braces"),
        (r"\boxed{}", "nothing in it"),
        (
            "The proof goes by induction over the number of edges, where the first case is clear and others follow from it "
            * 2,
            "prose",
        ),
        ("print(x[0]) if y else {", "braces"),
    ],
)
def test_a_label_that_cannot_be_read_has_a_reason(verifier, label, reason):
    assert reason in verifier.unreadable(label)


@pytest.mark.parametrize(
    "text", ["\n" * 100_000, "-" * 50_000, "(" * 50_000, "$" * 50_000, "1, " * 30_000, r"\boxed{" * 2000]
)
def test_a_response_that_went_astray_is_read_in_time(verifier, text):
    """Searching is not quadratic in the length: the process that compares does not pass its limit, which would warn."""
    assert verifier([text, text + r" \boxed{7}"], ["7", "7"]) == [0.0, 0.0 if text.startswith("\\") else 1.0]


@pytest.mark.parametrize(
    "tower", ["9^{9^{9^{9}}}", "(10^9)!", "((9!)!)!", r"\binom{1000000}{500000}", "e^{e^{e^{e^{e}}}}", "1" * 30_000]
)
def test_numbers_too_large_to_work_out_are_not_worked_out(verifier, tower):
    assert verifier([rf"\boxed{{{tower}}}"], ["7"]) == [0.0]
