"""From a profile to a plan: what is lowered, in which order, and what is suggested when nothing helps."""

import io
import json
from dataclasses import replace

import pytest
import yaml
from rich.console import Console

from hybrid.config import load_run, resolve
from hybrid.errors import ConfigError
from hybrid.planning.footprint import Speeds, peak
from hybrid.planning.plan import choose, make_plan
from hybrid.planning.prediction import KVCache, PhaseUse, Prediction, TenantSize
from hybrid.planning.rows import as_json, ledger_row, never_moving, phase_rows
from hybrid.planning.show import human, show
from hybrid.planning.suggest import suggestions
from hybrid.planning.walk import walk

MIB = 2**20
SPEEDS = Speeds(100 * MIB, 100 * MIB)
PROFILE = {
    "cluster": {"device": "cuda", "gpus_per_node": 2},
    "model": {"path": "model"},
    "actor": {"optimizer": "device"},
    "rollout": {"samples_per_prompt": 4, "max_new_tokens": 64},
    "reward": {"function": "math_verify"},
    "train": {"steps": 10, "prompts_per_step": 64},
    "data": {"train": "prompts.jsonl", "max_prompt_tokens": 64},
    "memory": {"tier_bytes": "1TiB", "device_bytes": "1000MiB"},
}
MODEL = {"num_attention_heads": 8, "hidden_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 4096}
"""KV: 8 layers x 512 x 2 x 2 bytes = 16 KiB a token; 128 sequences of 128 + 256 tokens: 768 MiB, one: 6 MiB."""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | {"vocab_size": 100, "model_type": "llama"}))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "label": "b"}\n')

    def make(*overrides):
        (tmp_path / "p.yaml").write_text(yaml.safe_dump(PROFILE))
        return resolve(load_run(tmp_path / "p.yaml", overrides))

    return make


def predict(cfg):
    """100 MiB of weights, masters in shards from stage 1 on, 10 KiB of activations a token."""
    optimizer = 600 * MIB // (cfg.world_size if cfg.actor.zero_stage else 1)
    activations = cfg.train.micro_batch_tokens * 10 * 1024
    activations //= 4 if cfg.model.gradient_checkpointing else 1
    phases = ["init", "generate", "score", "forward", "train_actor", "sync", "checkpoint"]
    return Prediction(
        tenants=(
            TenantSize("rollout", "weights", 100 * MIB),
            TenantSize("rollout", "kv_cache", cfg.rollout.kv_cache),
            TenantSize("actor", "weights", 100 * MIB, True, 100 * MIB, 100 * MIB, 100 * MIB),
            TenantSize("actor", "optimizer", optimizer, True, optimizer, optimizer, optimizer),
        ),
        phases=tuple(PhaseUse(p, {"activations": activations} if p == "train_actor" else {}) for p in phases),
        overhead={"CUDA context": 20 * MIB},
        host={"processes": 2**30},
        gpus_per_node=cfg.cluster.gpus_per_node,
        kv_cache=KVCache(cfg.rollout.kv_cache, 16384, cfg.rollout.kv_cache // 16384, 128, 6 * MIB),
    )


def chosen(plan):
    return plan.cfg.rollout.kv_cache // MIB, plan.cfg.train.micro_batch_tokens


def test_with_room_all_is_as_large_as_useful_and_nothing_moves(config):
    plan = choose(config("memory.device_bytes=2GiB"), predict, SPEEDS)
    assert plan.fits and plan.seconds_per_step == 0
    assert chosen(plan) == (768, 16384)
    assert len(never_moving(plan)) == 4


@pytest.mark.parametrize(
    ("overrides", "size", "kept"),
    [
        (["cluster.device=cpu"], "4GiB", True),
        (["cluster.device=cpu", "memory.keep_heap=false"], "4GiB", False),
        (["cluster.device=cpu"], "1400MiB", False),  # fits, but for what would be kept
        (["cluster.device=cpu", "memory.policy=swap_all"], "4GiB", False),
        (["cluster.device=cuda"], "4GiB", False),
        (["cluster.device=cpu", "memory.keep_heap=true"], "4GiB", True),
        (["cluster.device=cpu", "memory.keep_heap=true"], "1400MiB", False),
        (["cluster.device=cpu", "memory.keep_heap=true", "memory.policy=swap_all"], "4GiB", False),
        (["cluster.device=cuda", "memory.keep_heap=true"], "4GiB", False),
    ],
)
def test_heaps_are_kept_where_nothing_moves_and_they_have_room(config, overrides, size, kept):
    def with_heap(cfg):
        plain, held = predict(cfg), {"kept in the heap": 400 * MIB} if cfg.memory.keep_heap else {}
        phases = tuple(replace(use, parts=use.parts | held) for use in plain.phases)
        return replace(plain, phases=phases)

    plan = choose(config(*overrides, f"memory.device_bytes={size}", "rollout.kv_cache=768MiB"), with_heap, SPEEDS)
    assert plan.fits and plan.cfg.memory.keep_heap == kept


def test_a_smaller_kv_cache_is_taken_where_it_saves_movement_but_not_below_half(config):
    """Beside 300 of optimizer and 320 of weights and context, 580 are free: the cache shrinks and nothing is copied."""
    plan = choose(config("memory.device_bytes=1150MiB"), predict, SPEEDS)
    assert plan.fits and plan.seconds_per_step == 0
    assert 384 <= chosen(plan)[0] <= 1150 - 520 and chosen(plan)[0] == 576
    dear = choose(config("memory.device_bytes=850MiB"), predict, SPEEDS)
    assert dear.fits and dear.seconds_per_step > 0
    assert chosen(dear)[0] >= 384


def test_a_kv_cache_that_was_given_is_left_alone(config):
    plan = choose(config("memory.device_bytes=1150MiB", "rollout.kv_cache=768MiB"), predict, SPEEDS)
    assert chosen(plan)[0] == 768 and plan.seconds_per_step > 0


def test_a_kv_cache_without_room_for_one_sequence_is_refused_and_the_least_suggested(config):
    """vLLM would refuse at its start, minutes later."""
    cfg = config("memory.device_bytes=2GiB", "rollout.kv_cache=5.5MiB")
    plan = choose(cfg, predict, SPEEDS)
    (short,) = plan.shortages
    assert short.nbytes == MIB // 2 and "rollout.kv_cache" in short.where and "128 tokens" in short.where
    assert ("rollout.kv_cache=6MiB",) in [s.overrides for s in suggestions(plan, predict, SPEEDS)]
    assert choose(config("memory.device_bytes=2GiB", "rollout.kv_cache=6MiB"), predict, SPEEDS).fits


def test_to_fit_the_kv_cache_shrinks_as_little_as_it_must(config):
    """Half of the 384 MiB that 64 sequences an engine need is too much beside weights and context of 120."""
    cfg = config("memory.device_bytes=290MiB", "actor.zero_stage=1", "cluster.gpus_per_node=4")
    assert chosen(choose(cfg, predict, SPEEDS)) == (144, 2048)


def test_the_micro_batch_shrinks_only_to_fit_or_to_move_less(config):
    plan = choose(config("memory.device_bytes=560MiB"), predict, SPEEDS)
    assert plan.fits and chosen(plan)[1] == 8192  # 420 + 160 MiB of activations would be 580
    given = config("memory.device_bytes=560MiB", "train.micro_batch_tokens=16384")
    assert [s.where for s in choose(given, predict, SPEEDS).shortages] == ["train_actor"]


def test_what_does_not_fit_says_where_and_by_how_much(config):
    plan = choose(config("memory.device_bytes=400MiB"), predict, SPEEDS)
    assert not plan.fits
    least = 20 + 100 + 300 + 128 * 10 / 1024
    assert [s.where for s in plan.shortages] == ["loading the actor", "train_actor", "checkpoint"]
    assert plan.shortages[1].nbytes == pytest.approx((least - 400) * MIB)


def test_every_suggestion_is_a_plan_that_fits_and_the_smallest_of_its_kind(config):
    cfg = config(
        "memory.device_bytes=450MiB", "train.micro_batch_tokens=8192", "actor.zero_stage=0", "rollout.kv_cache=400MiB"
    )
    plan = choose(cfg, predict, SPEEDS)
    assert not plan.fits
    (both,) = suggestions(plan, predict, SPEEDS)  # two things are too large
    assert both.together and both.plan.fits
    assert {each.split("=")[0] for each in both.overrides} == {
        "train.micro_batch_tokens",
        "rollout.kv_cache",
        "actor.zero_stage",
    }
    cfg = config("memory.device_bytes=470MiB", "train.micro_batch_tokens=8192", "rollout.kv_cache=300MiB")
    found = {s.overrides: s.plan for s in suggestions(choose(cfg, predict, SPEEDS), predict, SPEEDS)}
    assert all(each.fits for each in found.values())
    tokens = next(int(o[0].split("=")[1]) for o in found if o[0].startswith("train.micro_batch_tokens"))
    assert 420 * MIB + tokens * 10240 <= 470 * MIB < 420 * MIB + (tokens + 512) * 10240
    assert ("model.gradient_checkpointing=true",) in found
    assert ("cluster.gpus_per_node=4", "rollout.engines=auto") in found
    assert not [o for o in found if "zero_stage" in o[0] or "kv_cache" in o[0]]  # these change nothing here


def test_more_gpus_and_zero_stages_are_tried_from_the_smallest(config):
    cfg = config("memory.device_bytes=560MiB", "actor.zero_stage=0", "train.micro_batch_tokens=1024")
    found = [s.overrides for s in suggestions(choose(cfg, predict, SPEEDS), predict, SPEEDS)]
    assert found == [("actor.zero_stage=1",)]


def test_a_tier_that_is_too_small_is_named(config):
    plan = choose(
        config("memory.device_bytes=600MiB", "memory.tier_bytes=100MiB", "rollout.kv_cache=300MiB"), predict, SPEEDS
    )
    assert [(s.where, s.nbytes // MIB, s.per) for s in plan.shortages] == [("host memory", 500, "node")]


def test_the_optimizer_goes_to_the_cpu_only_where_nothing_else_fits(config):
    tight = "memory.device_bytes=400MiB"
    plan = choose(config(tight, "actor.optimizer=auto"), predict, SPEEDS)
    assert plan.fits and plan.cfg.actor.optimizer == "cpu" and as_json(plan)["optimizer"] == {"actor": "cpu"}
    assert plan.prediction.host["actor/optimizer on the CPU"] == 2 * 2 * 300 * MIB
    assert choose(config("actor.optimizer=auto"), predict, SPEEDS).cfg.actor.optimizer == "device"
    given = choose(config(tight), predict, SPEEDS)
    assert not given.fits
    assert ("actor.optimizer=cpu",) in [s.overrides for s in suggestions(given, predict, SPEEDS)]


def test_forced_policies_are_planned_as_forced(config):
    tight = "memory.device_bytes=700MiB"
    resident = choose(config(tight, "memory.policy=resident", "rollout.kv_cache=300MiB"), predict, SPEEDS)
    assert resident.shortages[0].nbytes > 0
    ways = [each.overrides for each in suggestions(resident, predict, SPEEDS)]
    numbers = ("train.micro_batch_tokens=", "rollout.kv_cache=")
    assert next(way for way in ways if not way[0].startswith(numbers)) == ("memory.policy=auto",)
    everything = choose(config(tight, "memory.policy=swap_all", "rollout.kv_cache=300MiB"), predict, SPEEDS)
    auto = choose(config(tight, "rollout.kv_cache=300MiB"), predict, SPEEDS)
    assert everything.fits and auto.fits
    assert auto.seconds_per_step < everything.seconds_per_step == 2 * (1 + 3)


def test_the_walk_counts_every_update_and_what_happens_once_for_its_share(config):
    cfg = config("train.prompts_per_update=16", "train.epochs=2", "algorithm.advantage=gae", "algorithm.kl_coef=0.1")
    keys = [("rollout", "weights"), ("actor", "weights"), ("critic", "weights"), ("reference", "weights")]
    way = walk(cfg, keys)
    assert way["forward", "train_critic"] == 1 and way["train_critic", "train_actor"] == 8
    assert way["train_actor", "train_critic"] == 7 and way["train_actor", "sync"] == 1
    assert way["init", "sync"] == pytest.approx(0.1) and way["sync", "checkpoint"] == pytest.approx(0.1)
    assert "score" not in {phase for pair in way for phase in pair}


def test_rows_add_up_and_the_ledger_gets_them(config):
    plan = choose(config(), predict, SPEEDS)
    rows = {row.phase: row for row in phase_rows(plan)}
    assert all(row.peak_bytes <= plan.limits.device_bytes for row in rows.values())
    assert rows["train_actor"].peak_bytes == peak(plan.prediction, plan.residency, "train_actor")[0]
    assert rows["score"].tenants == rows["generate"].tenants
    row = ledger_row(plan)
    assert row["capacity_bytes"] == 1000 * MIB and row["policy"] == "auto"
    assert [p["phase"] for p in row["phases"]] == [use.phase for use in plan.prediction.phases]
    seconds = sum(
        m["seconds"] * t["times_per_step"]
        for t in as_json(plan)["transitions"]
        if t["times_per_step"] >= 1
        for m in t["moves"]
    )
    assert seconds == pytest.approx(row["seconds_per_step"], rel=0.2)
    assert json.loads(json.dumps(as_json(plan)))["fits"] is True


def test_a_plan_needs_to_know_the_gpu(config):
    with pytest.raises(ConfigError, match="--gpu"):
        make_plan(config("memory.device_bytes=auto"), predict, SPEEDS)


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_no_phase_of_the_table_loses_its_name_or_a_size_at_any_width(config, width):
    plan = choose(config("memory.device_bytes=600MiB"), predict, SPEEDS)
    console = Console(width=width, file=io.StringIO())
    show(plan, console)
    text = console.file.getvalue()
    phases = text[: text.index("Transitions")]
    assert max(map(len, text.splitlines())) <= width and "\N{HORIZONTAL ELLIPSIS}" not in phases
    assert all(row.phase in phases and human(row.peak_bytes) in phases for row in phase_rows(plan))
