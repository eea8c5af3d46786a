"""Profiles: what is read, what is refused, and how it is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid.config import SECTIONS, dump, load_run, machine, placement, resolve, resolve_path
from hybrid.config.base import format_bytes, parse_bytes
from hybrid.config.violations import all_keys, describe
from tests.unit.config_profile import PROFILE, refusal

# Reading


def test_overrides_win_over_the_profile_and_the_profile_over_defaults(profile):
    cfg = load_run(profile, ["train.steps=7", "rollout.stop=['###', end]", "data.task_args.min_terms=2"])
    assert (cfg.train.steps, cfg.train.prompts_per_step, cfg.train.epochs) == (7, 8, 1)
    assert cfg.rollout.stop == ["###", "end"]
    assert cfg.data.task_args == {"min_terms": 2}


@pytest.mark.parametrize("text", ["1e-6", "1.0e-6", "0.000001", "1E-6"])
def test_every_way_to_write_a_small_number_is_a_number(profile, text):
    assert load_run(profile, [f"actor.learning_rate={text}"]).actor.learning_rate == pytest.approx(1e-6)


def test_sizes_read_in_units_and_print_back_exactly(profile):
    cfg = load_run(profile, ["rollout.kv_cache=1.5GiB", "memory.residue_slack=1000001"])
    assert (cfg.rollout.kv_cache, cfg.memory.residue_slack) == (3 * 2**29, 1000001)
    for size in (0, 1, 1023, 2**20, 3 * 2**29, 2**30, 10**9 + 7):
        assert parse_bytes(format_bytes(size)) == size


def test_a_section_left_empty_has_its_defaults(profile):
    profile.write_text(PROFILE + "\nmemory:\n  # tier: file\n")
    assert load_run(profile).memory.policy == "auto"


def test_every_section_and_key_is_documented():
    assert not [key for key in (*SECTIONS, *all_keys()) if len(describe(key)) < 15]


def test_a_config_cannot_change_under_a_run(profile):
    with pytest.raises(ValueError, match="frozen"):
        load_run(profile).train.steps = 5


# Refusing, part one: keys, types, bounds


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stps=3", ["train.stps is unknown", "Did you mean train.steps?"]),
        ("rollout.learning_rate=1", ["Did you mean actor.learning_rate or critic.learning_rate?"]),
        ("rollot.engines=1", ["rollot is no section", "Did you mean rollout?"]),
        ("steps=3", ["steps is no section", "train.steps"]),
        ("train.xyzzy=3", ["train.xyzzy is unknown", "prompts_per_step"]),
        ("train.steps=0", ["train.steps = 0 must be at least 1"]),
        ("train.steps=many", ["train.steps = 'many' must be a whole number"]),
        ("train.steps=2.5", ["a whole number"]),
        ("train.steps=true", ["a whole number"]),
        ("rollout.temperature=0", ["rollout.temperature = 0 must be at least 0.01"]),
        ("rollout.top_p=0", ["above 0"]),
        ("rollout.top_p=1.1", ["at most 1"]),
        ("rollout.top_k=-1", ["at least 0"]),
        ("rollout.min_p=1.5", ["at most 1"]),
        ("actor.zero_stage=4", ["at most 3"]),
        ("actor.learning_rate=.inf", ["a finite number"]),
        ("actor.betas=[0.9]", ["actor.betas"]),
        ("cluster.gpus_per_node=atuo", ["a whole number or 'auto'"]),
        ("memory.device_bytes=much", ["a size such as 512MiB"]),
        ("memory.tier=disk", ["'auto', 'file' or 'pinned'"]),
        ("logging.name=a/b", ["logging.name = 'a/b' must be letters"]),
        ("train", ["Write section.key=value"]),
        ("train=3", ["Write train.key=value"]),
        ("rollout.stop=[", ["not valid YAML"]),
        ("model.path=null", ["model.path = None must be a text"]),
    ],
)
def test_a_wrong_override_is_told_with_value_and_fix(profile, override, said):
    message = refusal(profile, override)
    assert "one problem" in message
    assert not [part for part in said if part not in message], message


def test_a_wrong_key_in_the_file_is_told_with_its_line(profile):
    profile.write_text(PROFILE + "memory:\n  policy: swap_all\n  teir: file\n")
    message = refusal(profile)
    line = profile.read_text().splitlines().index("  teir: file") + 1
    assert f"({profile}:{line})" in message
    assert "Did you mean memory.tier?" in message


def test_a_key_that_stands_twice_is_refused(profile):
    profile.write_text(PROFILE + "train: {steps: 4}\n")
    assert "train stands twice" in refusal(profile)


def test_missing_keys_are_told_with_their_meaning(profile):
    profile.write_text("model: {}\nreward: {function: math_verify}\n")
    message = refusal(profile)
    assert "3 problems" in message
    assert all(f"{key} is missing" in message for key in ("model.path", "train.steps", "data.train"))


@pytest.mark.parametrize("text", ["- a\n- b", "model: [", "just text"])
def test_a_file_that_is_no_profile_is_refused(profile, text):
    profile.write_text(text)
    assert str(profile) in refusal(profile)


def test_a_missing_profile_is_told_with_its_neighbours(profile):
    assert "p.yaml" in refusal(profile.with_name("q.yaml"))


def test_all_violations_come_at_once(profile):
    wrong = [
        "train.stepss=1",
        "rollout.top_p=2",
        "rollout.engines=5",
        "train.prompts_per_update=3",
        "reward.function=null",
    ]
    message = refusal(profile, *wrong)
    assert "5 problems" in message
    for part in (
        "train.stepss",
        "rollout.top_p",
        "rollout.engines 5",
        "prompts_per_update 3",
        "neither reward.function",
    ):
        assert part in message


def test_rules_over_a_key_in_error_keep_silent(profile):
    message = refusal(profile, "rollout.tensor_parallel_size=zwei", "rollout.engines=5")
    assert "one problem" in message


# Paths


def test_paths_are_found_from_the_working_directory_then_from_the_profile(profile, tmp_path):
    cfg = load_run(profile)
    assert resolve_path(cfg, "models/tiny") == tmp_path / "models" / "tiny"
    here = Path.cwd() / "models" / "tiny"
    here.mkdir(parents=True)
    assert resolve_path(cfg, "models/tiny") == here
    assert resolve_path(cfg, "nowhere") == Path.cwd() / "nowhere"


# Resolving


def test_resolve_leaves_no_auto_and_reads_back_as_the_same_run(profile, tmp_path):
    profile.with_name("scores.py").write_text("def f(prompts, responses, labels): ...\n")
    written = ["algorithm.advantage=gae", "algorithm.kl_coef=0.1", "reward.function=scores.py:f"]
    cfg = resolve(load_run(profile, written), tmp_path / "runs" / "one")
    text = dump(cfg)
    assert [line.strip() for line in text.splitlines() if ": auto" in line] == [
        "policy: auto",  # a way to plan, not a gap
        "progress: auto",  # whoever looks at the run decides
    ]
    assert cfg.critic.path == cfg.reference.path == cfg.model.path == str(tmp_path / "models" / "tiny")
    assert cfg.reward.function == f"{profile.with_name('scores.py')}:f" == cfg.data.eval_function
    assert (cfg.rollout.engines, cfg.train.prompts_per_update, cfg.memory.tier) == (2, 8, "file")
    assert (cfg.logging.runs_dir, cfg.logging.name) == (str(tmp_path / "runs"), "one")

    again = tmp_path / "elsewhere" / "deep" / "profile.yaml"
    again.parent.mkdir()
    again.write_text(text)
    assert dump(resolve(load_run(again), tmp_path / "runs" / "one")) == text


def test_auto_follows_the_device(profile, monkeypatch):
    monkeypatch.setattr(machine, "visible_gpus", lambda: 4)
    monkeypatch.setattr(machine, "gpu_bytes", lambda: 80 * 2**30)
    monkeypatch.setattr(machine, "gpu_has_bf16", lambda: True)
    wanted = ["cluster.device=auto", "cluster.gpus_per_node=auto", "rollout.tensor_parallel_size=2"]
    cfg = resolve(load_run(profile, wanted))
    assert (cfg.cluster.device, cfg.cluster.gpus_per_node, cfg.rollout.engines) == ("cuda", 4, 2)
    assert (cfg.model.attention, cfg.memory.tier, cfg.memory.device_bytes) == (
        "varlen",
        "pinned",
        int(0.95 * 80 * 2**30),
    )
    assert (cfg.rollout.repeatable, cfg.rollout.enforce_eager) == (False, False)

    monkeypatch.setattr(machine, "visible_gpus", lambda: 0)
    cfg = resolve(load_run(profile, wanted))
    assert (cfg.cluster.device, cfg.cluster.gpus_per_node, cfg.rollout.engines) == ("cpu", 2, 1)
    assert (cfg.model.attention, cfg.rollout.repeatable) == ("sdpa", True)
    assert cfg.memory.device_bytes == int(0.8 * machine.ram_bytes() / 2)
    assert "auto finds no CUDA GPU" in refusal(profile, "cluster.device=cuda", "cluster.gpus_per_node=auto")


def test_a_cpu_without_bf16_gets_fp32_and_a_word(profile, monkeypatch):
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: False)
    cfg = resolve(load_run(profile))
    assert cfg.model.dtype == "float32"
    assert "bf16" in cfg.notes[0]
    assert resolve(load_run(profile, ["model.dtype=bfloat16"])).notes == ()
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: True)
    assert resolve(load_run(profile)).model.dtype == "bfloat16"


def test_choices_that_go_together_are_taken(profile):
    for wanted in (
        ["algorithm.advantage=remax", "rollout.samples_per_prompt=1"],
        ["algorithm.kl_coef=0.1", "algorithm.kl_kind=k1", "algorithm.kl_in=reward", "algorithm.kl_target=2"],
        ["algorithm.correction=tis", "algorithm.correction_low=1.5"],
        ["algorithm.advantage=gae", "algorithm.critic_only_steps=2", "critic.path=models/reward"],
        ["algorithm.advantage=dr_grpo", "reward.source_field=entry.source", "reward.source_weights={a: 2}"],
    ):
        load_run(profile, wanted)


def test_a_corrected_ratio_over_a_cut_distribution_gets_a_word(profile):
    wanted = ["model.dtype=bfloat16", "algorithm.correction=tis"]
    assert resolve(load_run(profile, wanted)).notes == ()
    notes = resolve(load_run(profile, [*wanted, "rollout.top_p=0.9"])).notes
    assert len(notes) == 1 and "biased" in notes[0]


def test_a_critic_reads_the_actors_tokens(profile):
    for name, tokens in (("tiny", 512), ("reward", 500)):
        file = profile.parent.parent / "models" / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": tokens}))
    assert "knows 500 tokens" in refusal(profile, "algorithm.advantage=gae", "critic.path=models/reward")
    load_run(profile, ["algorithm.advantage=gae", "model.path=models/reward", "critic.path=models/tiny"])


def test_kv_cache_holds_an_engines_sequences_at_full_length(profile):
    cfg = resolve(load_run(profile, ["model.dtype=bfloat16", "data.eval_size=8"]))
    tokens = 32 * (64 + 16)  # 8 prompts x 8 samples over 2 engines
    per_token = 2 * 2 * 2 * 32 * 2  # keys and values, layers, kv heads, head size, bytes
    assert tokens * per_token <= cfg.rollout.kv_cache < 2 * tokens * per_token + 32 * 256 * per_token


def test_without_a_config_json_the_kv_cache_is_a_quarter_of_the_device(profile):
    unknown = resolve(load_run(profile, ["memory.device_bytes=8MiB", "model.path=some-org/some-model"]))
    assert unknown.rollout.kv_cache == 2 * 2**20


def test_a_micro_batch_holds_a_ranks_update_up_to_a_bound_and_the_longest_sequence(profile):
    def tokens(*overrides):
        return resolve(load_run(profile, overrides)).train.micro_batch_tokens

    assert tokens() == 32 * 80  # 8 prompts x 8 samples over 2 ranks
    assert tokens("train.prompts_per_step=512") == 4096
    assert tokens("train.prompts_per_step=2", "rollout.samples_per_prompt=2") == 2 * 80
    assert tokens("train.micro_batch_tokens=100") == 100


def test_what_was_auto_is_remembered(profile):
    cfg = resolve(load_run(profile, ["rollout.kv_cache=1GiB"]))
    assert "train.micro_batch_tokens" in cfg.autos and "rollout.kv_cache" not in cfg.autos
    assert "memory.policy" not in cfg.autos and resolve(cfg).autos == cfg.autos


# Derived


def test_counts_that_the_loop_uses(profile):
    cfg = resolve(load_run(profile, ["train.prompts_per_update=4", "train.epochs=3", "algorithm.kl_coef=0.1"]))
    assert (cfg.world_size, cfg.samples_per_step, cfg.max_sequence_tokens) == (2, 64, 80)
    assert (cfg.updates_per_epoch, cfg.updates_per_rollout, cfg.total_updates) == (2, 6, 18)
    assert cfg.roles == ("actor", "reference")
    cfg = resolve(load_run(profile, ["algorithm.advantage=gae", "algorithm.critic_only_steps=1", "train.epochs=3"]))
    assert (cfg.critic_only_updates, cfg.total_updates) == (3, 9)


def test_placement_gives_each_gpu_a_rank_of_every_role_and_engines_consecutive_gpus(profile):
    wanted = [
        "cluster.num_nodes=2",
        "cluster.gpus_per_node=4",
        "cluster.address=auto",
        "rollout.tensor_parallel_size=2",
    ]
    places = placement(resolve(load_run(profile, [*wanted, "algorithm.advantage=gae"])))
    assert [(p.node, p.gpu) for p in places] == [(n, g) for n in range(2) for g in range(4)]
    assert [(p.engine, p.tp_rank) for p in places] == [(e, t) for e in range(4) for t in range(2)]
    assert {(p.roles, p.processes) for p in places} == {(("actor", "critic"), 3)}
