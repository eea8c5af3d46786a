"""Micro-batches: every row once, ranks equal in number, balanced, within the budget."""

from hypothesis import given
from hypothesis import strategies as st

from hybrid.data.batches import Lengths, plan_micro_batches

rows_strategy = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), min_size=1, max_size=40).map(
    lambda items: [Lengths(group, 10 + group, response) for group, response in items]
)


@given(rows_strategy, st.integers(1, 4), st.integers(16, 200), st.booleans())
def test_every_row_once_and_equal_counts(rows, ranks, budget, share):
    plan = plan_micro_batches(rows, ranks, budget, share)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(rows)))


@given(rows_strategy, st.integers(1, 3), st.integers(60, 200), st.booleans())
def test_budget_holds_unless_one_row_exceeds_it(rows, ranks, budget, share):
    for rank in plan_micro_batches(rows, ranks, budget, share):
        for micro in rank:
            prompts = (
                {rows[i].group: rows[i].prompt for i in micro}.values() if share else [rows[i].prompt for i in micro]
            )
            assert sum(prompts) + sum(rows[i].response - 1 for i in micro) <= budget


def test_equal_work_is_spread_evenly():
    rows = [Lengths(group, 20, 10) for group in range(16) for _ in range(4)]
    plan = plan_micro_batches(rows, 4, 1000, True)
    assert [sum(len(m) for m in rank) for rank in plan] == [16] * 4


def test_short_rank_gets_an_empty_micro_batch_rather_than_waiting():
    rows = [Lengths(0, 90, 5), Lengths(1, 90, 5), Lengths(2, 90, 5)]
    plan = plan_micro_batches(rows, 2, 100, True)
    assert [[len(m) for m in rank] for rank in plan] == [[1, 1], [1, 0]]
