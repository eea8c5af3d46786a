"""Advice speaks when its numbers are there, names the override, and is silent otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid.config import load_run
from hybrid.reports.advice import (
    RULES,
    advise,
    all_fits,
    kv_cache_full,
    kv_cache_unused,
    leak,
    nearly_full,
    plan_too_low,
    room_for_micro_batches,
    slow_tier,
)
from hybrid.reports.read import read_run
from hybrid.reports.summary import ResidueLine, summarize
from tests.unit.report_runs import GIB, MIB, RunWriter, add_plan
from tests.unit.report_runs import profile as write_profile


@pytest.fixture
def summary(tmp_path, monkeypatch):
    """Swapped, with a plan; train_actor measured at 3.3 GiB of 6 GiB."""
    run = RunWriter(tmp_path / "run", monkeypatch)
    run.start()
    for step in (1, 2, 3):
        run.step(step, kv_cache_share=0.31)
    write_profile(run.folder)
    add_plan(run.folder)
    return summarize(read_run(run.folder))


@pytest.fixture
def resident(tmp_path, monkeypatch):
    run = RunWriter(tmp_path / "resident", monkeypatch, swap=False)
    run.start()
    run.step(1, kv_cache_share=0.31)
    write_profile(run.folder, policy="resident")
    return summarize(read_run(run.folder))


def test_an_unused_kv_cache_goes_to_the_micro_batch_that_shares_the_gpu_with_it(resident, summary):
    found = kv_cache_unused(resident)
    assert "at most 31% used" in found.text and "306 MiB of its 500 MiB" in found.text
    assert found.override == "rollout.kv_cache=194MiB train.micro_batch_tokens=5376"
    assert kv_cache_unused(summary) is None  # it is away while training, and generate is not the fullest
    assert kv_cache_unused(replace(resident, kv_cache_share=0.8)) is None
    assert kv_cache_unused(replace(resident, kv_cache_share=None)) is None


def test_a_full_kv_cache_gets_what_generate_leaves(summary):
    assert kv_cache_full(replace(summary, kv_cache_share=1.5)).override == "rollout.kv_cache=750MiB"
    assert kv_cache_full(replace(summary, kv_cache_share=1.5, capacity=2 * GIB)) is None  # no room
    assert kv_cache_full(summary) is None


def test_all_may_stay_where_all_fits_and_moving_costs(summary):
    found = all_fits(summary)
    assert found.override == "memory.policy=auto" and "saves" in found.text
    assert all_fits(replace(summary, capacity=4 * GIB)) is None
    assert all_fits(replace(summary, step_seconds=1000.0)) is None


def test_a_nearly_full_gpu_is_told_with_what_its_phase_can_give(summary):
    full = replace(summary, capacity=int(summary.fullest.measured * 1.01))
    assert nearly_full(full).override == "model.gradient_checkpointing=true"
    recomputing = replace(full, settings=replace(full.settings, gradient_checkpointing=True))
    assert nearly_full(recomputing).override == "train.micro_batch_tokens=2048"
    assert nearly_full(summary) is None


def test_a_plan_that_promised_too_little_shrinks_the_next(summary):
    tight = replace(summary, capacity=4 * GIB)
    low = tuple(replace(p, predicted=p.measured // 2) if p.phase == "train_actor" else p for p in summary.phases)
    found = plan_too_low(replace(tight, phases=low))
    missing = summary.fullest.measured - summary.fullest.measured // 2
    assert found.override == f"memory.device_bytes={round((4 * GIB - missing) / MIB)}MiB"
    assert plan_too_low(tight) is None
    assert plan_too_low(replace(tight, phases=low, arrivals=False)) is None  # its measures are not the phase's own


def test_a_leak_that_will_fill_the_gpu_is_told(summary):
    line = ResidueLine("actor", tuple((i, i * 400 * MIB) for i in range(12)), 400.0 * MIB)
    growing = replace(summary, residue=(line,), settings=replace(summary.settings, steps=40))
    assert "400 MiB a step" in leak(growing).text and leak(growing).override is None
    assert leak(replace(growing, residue=(replace(line, growth=0.1 * MIB),))) is None
    assert leak(replace(growing, residue=(replace(line, points=line.points[:5]),))) is None


def test_files_are_slow_where_there_is_pinned_memory(summary):
    tight = replace(summary, capacity=4 * GIB)
    on_cuda = replace(tight, settings=replace(tight.settings, device="cuda"))
    assert slow_tier(on_cuda).override == "memory.tier=pinned"
    assert slow_tier(summary) is None  # nothing needs to move at all
    assert slow_tier(replace(on_cuda, settings=replace(on_cuda.settings, tier="pinned"))) is None


def test_room_is_for_larger_micro_batches(summary):
    assert room_for_micro_batches(summary).override == "train.micro_batch_tokens=12288"
    assert room_for_micro_batches(replace(summary, capacity=4 * GIB)) is None


def test_micro_batches_grow_to_what_a_rank_has_and_no_further(summary):
    sized = replace(
        summary.settings,
        gpus_per_node=2,
        prompts_per_update=16,
        samples_per_prompt=8,
        max_prompt_tokens=64,
        max_new_tokens=64,
    )
    assert sized.most_tokens == 8192
    assert room_for_micro_batches(replace(summary, settings=sized)).override == "train.micro_batch_tokens=8192"
    assert room_for_micro_batches(replace(summary, settings=replace(sized, prompts_per_update=8))) is None


def test_no_two_advices_change_the_same_setting(resident):
    """A resident run with room: the KV cache's advice and that of the room both speak of the micro-batch."""
    assert kv_cache_unused(resident) and room_for_micro_batches(resident)
    keys = [part.partition("=")[0] for advice in advise(resident) for part in (advice.override or "").split()]
    assert "train.micro_batch_tokens" in keys and len(keys) == len(set(keys))


def test_overrides_can_be_typed(summary, resident, profile):
    full = replace(summary, capacity=int(summary.fullest.measured * 1.01))
    found = [advice for s in (summary, resident, full) for advice in (rule(s) for rule in RULES) if advice]
    typed = [advice.override for advice in found if advice.override]
    assert len(typed) >= 5
    for override in typed:
        load_run(profile, override.split())
