"""Dispatch is a pure function of (step, prompt index): the same run asks the same engine for the same prompts with the same seeds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.rollout.dispatch import assign, engine_seed, request_seed

lengths = st.lists(st.integers(1, 2000), max_size=60)


@given(lengths, st.integers(1, 8), st.integers(0, 1000))
def test_every_prompt_goes_to_one_engine_in_ascending_order(lengths, engines, step):
    shares = assign(lengths, engines, step)
    assert len(shares) == engines
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    assert shares == assign(lengths, engines, step)


@given(lengths, st.integers(1, 8), st.integers(0, 1000))
def test_loads_differ_by_at_most_the_longest_prompt(lengths, engines, step):
    load = [sum(lengths[i] for i in share) for share in assign(lengths, engines, step)]
    assert max(load) - min(load) <= max(lengths, default=0)


def test_equal_prompts_are_split_evenly():
    assert [len(share) for share in assign([7] * 16, 4, step=3)] == [4, 4, 4, 4]


def test_a_single_prompt_takes_turns_over_the_engines():
    assert [[len(s) for s in assign([5], 3, step)].index(1) for step in range(4)] == [0, 1, 2, 0]


def test_seeds_differ_by_run_step_and_prompt_and_stay_the_same():
    seeds = {request_seed(run, step, prompt) for run in range(3) for step in range(20) for prompt in range(50)}
    assert len(seeds) == 3 * 20 * 50
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert request_seed(0, 0, 0) == request_seed(0, 0, 0)
    # Samples of a prompt draw with seed + i: neighbours must not lie within a group's size of each other.
    ordered = sorted(seeds)
    assert min(b - a for a, b in itertools.pairwise(ordered)) > 4096


@pytest.mark.parametrize("engine", [0, 1])
def test_engine_seed_fits_numpy(engine):
    assert 0 <= engine_seed(0, 10, engine) < 2**32
