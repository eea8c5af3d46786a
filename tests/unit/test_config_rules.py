"""What a profile is refused for: rules between its fields, what it points to, and where a run would write."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from hybrid.config import check, check_start, load_run
from hybrid.errors import ConfigError
from tests.unit.config_profile import PROFILE, refusal


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.engines=1"], "rollout.engines 1 x rollout.tensor_parallel_size 1 = 1"),
        (["cluster.gpus_per_node=6", "rollout.tensor_parallel_size=4"], "does not divide cluster.gpus_per_node 6"),
        (["rollout.tensor_parallel_size=4"], "does not divide cluster.gpus_per_node 2"),
        (["train.prompts_per_update=3"], "does not divide train.prompts_per_step 8"),
        (["train.prompts_per_update=1"], "less than the 2 GPUs"),
        (["train.prompts_per_step=1"], "less than the 2 GPUs"),
        (["actor.optimizer=cpu"], "actor.optimizer cpu with cluster.device cpu"),
        (["train.micro_batch_tokens=79"], "64 + rollout.max_new_tokens 16 = 80"),
        (["rollout.samples_per_prompt=1"], "group_norm with rollout.samples_per_prompt 1"),
        (["rollout.samples_per_prompt=1", "algorithm.advantage=opo"], "opo with rollout.samples_per_prompt 1"),
        (["critic.learning_rate=1e-5"], "a critic is given"),
        (["reference.zero_stage=3"], "a reference is given"),
        (["reward.function=null"], "neither reward.function nor reward.model"),
        (["reward.model=models/reward"], "both given"),
        (["reward.function=null", "reward.model=models/reward", "reward.batch_tokens=79"], "reward.batch_tokens 79"),
        (["algorithm.policy_loss=gspo"], "gspo with algorithm.reduction token_mean"),
        (["algorithm.policy_loss=cispo", "algorithm.dual_clip=3"], "dual_clip 3"),
        (["rollout.samples_per_prompt=1", "algorithm.advantage=remax", "algorithm.dynamic_sampling=true"], "left out"),
        (["algorithm.critic_only_steps=1"], "there is no critic"),
        (["algorithm.advantage=gae", "algorithm.critic_only_steps=3"], "the actor would never train"),
        (["algorithm.kl_target=0.1"], "would stay 0"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_target=10"], "not below algorithm.kl_bound 10"),
        (
            ["algorithm.kl_coef=0.1", "algorithm.kl_target=1", "algorithm.kl_horizon=12"],
            "kl_horizon 12 with 64 responses",
        ),
        (["algorithm.kl_coef=0.1", "algorithm.kl_kind=k1"], "the gradient of k1"),
        (["algorithm.correction=icepop", "algorithm.correction_low=1.5"], "leave out 1"),
        (["algorithm.correction=tis", "algorithm.correction_high=0.9"], "leave out 1"),
        (["reward.extra={reasoning_gym: 0.5}"], "stands in reward.extra, too"),
        (["reward.extra={none.py:score: 0.5}"], "none.py does not exist"),
        (["reward.clip=[1, -1]"], "is no interval"),
        (["reward.unfinished_penalty=1", "reward.unfinished_score=0"], "both given"),
        (["reward.overlong_buffer=17"], "overlong_buffer 17"),
        (["reward.source_field=source"], "source_field without reward.source_weights"),
        (["reward.source_field=source", "reward.source_weights={a: 2}"], "a factor common to them cancels"),
        (["model.attention=flash_attention_2", "model.dtype=bfloat16"], "flash_attention_2 with cluster.device cpu"),
        (["cluster.device=cuda", "model.attention=flash_attention_2", "model.dtype=float32"], "model.dtype float32"),
        (["model.attention=varlen", "model.dtype=bfloat16"], "varlen with cluster.device cpu"),
        (["cluster.device=cuda", "model.attention=varlen", "model.dtype=float32"], "varlen with model.dtype float32"),
        (["cluster.bind_numa=true"], "there is no GPU to stay beside"),
        (["memory.tier=pinned"], "memory.tier pinned"),
        (["rollout.min_new_tokens=17"], "min_new_tokens 17"),
        (["logging.profile=99"], "logging.profile 99 is more than train.steps"),
        (["rollout.record=b.jsonl", "rollout.replay=../profiles/p.yaml"], "both given"),
        (["rollout.replay=none.jsonl"], "none.jsonl does not exist"),
        (["model.path=models/torn"], "config.json is not JSON"),
        (["model.path=models/list"], "names no model_type"),
        (["data.train=reasoning_gym:chain_sums"], "Did you mean chain_sum"),
        (["cluster.num_nodes=2"], "without cluster.address"),
        (["actor.schedule=cosine", "actor.warmup_steps=3"], "actor.warmup_steps 3"),
        (["actor.schedule=linear", "actor.warmup_steps=2"], "to at most 1, or"),
        (["reward.weight=0"], "every response would score 0"),
        (["actor.min_lr_ratio=0.1"], "schedule constant"),
        (["algorithm.advantage=gae", "critic.min_lr_ratio=0.1"], "critic.min_lr_ratio"),
        (["data.train=openai/gsm8k"], "the scorer belongs to a reasoning_gym task"),
        (["data.train=openai/gsm8k", "reward.function=math_verify", "data.task_args.a=1"], "data.task_args (a)"),
        (["data.train='reasoning_gym:'"], "names no task"),
        (["data.train=train.jsonl", "reward.function=math_verify"], "train.jsonl does not exist"),
        (["data.eval=./held_out"], "./held_out does not exist"),
        (["model.path=models/none"], "models/none is no model folder"),
        (["model.path=./tiny"], "./tiny is no model folder"),
        (["model.path=a/b/c"], "a/b/c is no model folder"),
        (["model.path=../profiles"], "has no config.json"),
        (["reward.function=scores"], "neither a built-in function nor file.py:function"),
        (["reward.function=scores.py:f"], "scores.py does not exist"),
        (["data.eval_function=none.py:f"], "data.eval_function: the file"),
        (["data.max_prompt_tokens=2040"], "reads 2048 tokens"),
        (
            ["cluster.gpus_per_node=6", "train.prompts_per_step=6", "rollout.tensor_parallel_size=3"],
            "4 attention heads",
        ),
    ],
)
def test_a_broken_rule_is_told_alone_with_its_values(profile, overrides, said):
    for name, text in {"torn": '{"a": ', "list": "[1]"}.items():
        (profile.parent.parent / "models" / name).mkdir()
        (profile.parent.parent / "models" / name / "config.json").write_text(text)
    message = refusal(profile, *overrides)
    assert "one problem" in message, message
    assert said in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.engines=1", "rollout.tensor_parallel_size=2"],
        ["rollout.engines=2", "rollout.tensor_parallel_size=1"],
        ["train.prompts_per_update=2", "train.epochs=2"],
        ["algorithm.advantage=gae", "rollout.samples_per_prompt=1", "critic.learning_rate=1e-5"],
        ["algorithm.advantage=reinforce", "rollout.samples_per_prompt=1"],
        ["algorithm.kl_coef=0.1", "reference.zero_stage=3"],
        ["algorithm.policy_loss=gspo", "algorithm.reduction=sequence_mean"],
        ["model.path=Qwen/Qwen2.5-0.5B-Instruct"],
        ["model.path=gpt2"],
        ["data.train=openai/gsm8k", "reward.function=math_verify"],
        ["reward.function=null", "reward.model=some-org/some-reward-model"],
        ["cluster.num_nodes=2", "cluster.address=auto"],
        ["critic=null", "reference=null"],
        ["actor.schedule=linear", "actor.warmup_steps=1"],
        ["cluster.device=cuda", "cluster.gpus_per_node=8"],
    ],
)
def test_a_sound_profile_passes(profile, overrides):
    check(load_run(profile, overrides))


def test_keys_that_yaml_reads_as_numbers_are_unknown_keys(profile):
    profile.write_text(PROFILE + "memory: {2: 2, on: 3}\n")
    message = refusal(profile)
    assert "memory.2 is unknown" in message and "memory.True is unknown" in message


# What only a start must hold


def starting(profile: Path, *overrides: str) -> str:
    """The message that a start is refused with, empty when it is not."""
    try:
        check_start(load_run(profile, list(overrides)))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def weights(profile):
    save_file({"w": numpy.zeros(4, numpy.float32)}, profile.parent.parent / "models" / "tiny" / "model.safetensors")


def test_a_folder_without_weights_is_planned_but_not_started(profile):
    load_run(profile)
    assert "it has no weights (model.safetensors" in starting(profile)


@pytest.mark.usefixtures("weights")
def test_a_run_does_not_start_where_it_cannot_write(profile, tmp_path):
    assert starting(profile) == ""
    here = Path.cwd()
    (here / "file").write_text("kept")
    (here / "runs" / "taken").mkdir(parents=True)
    message = starting(profile, "logging.name=taken", "memory.swap_dir=file/swap", f"rollout.record={here}")
    assert "3 problems" in message
    assert all(part in message for part in ("taken exists already", "memory.swap_dir", "is a folder"))
    assert "file is a file" in starting(profile, "logging.runs_dir=file")
    assert "not mixed" in starting(profile, "rollout.record=file")
