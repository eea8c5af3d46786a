"""Rules about what profiles point to: models, data, reward functions. They look at files here, never at the network."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterable
from pathlib import Path

from hybrid.config.kind_rules import role_models
from hybrid.config.paths import is_hub_name, path_roots
from hybrid.config.resolve import model_config
from hybrid.config.rules import Finding, is_task, rule
from hybrid.config.run import RunConfig

BUILT_IN_FUNCTIONS = ("reasoning_gym", "math_verify")


@rule("model.path")
def model_exists(cfg: RunConfig) -> Finding | None:
    return _model_is_there(cfg, "model.path", cfg.model.path)


@rule("critic", "algorithm.advantage", "model.path")
def critic_exists(cfg: RunConfig) -> Finding | None:
    if cfg.uses_critic and cfg.critic.path != cfg.model.path:
        return _model_is_there(cfg, "critic.path", cfg.critic.path)


@rule("critic", "algorithm.advantage", "model.path")
def critic_reads_the_actors_tokens(cfg: RunConfig) -> Finding | None:
    if not cfg.uses_critic or cfg.critic.path == cfg.model.path:
        return None
    ours, others = ((model_config(path) or {}).get("vocab_size") for path in (cfg.model.path, cfg.critic.path))
    if ours and others and ours > others:
        return (
            f"critic.path {cfg.critic.path} knows {others} tokens, model.path {cfg.model.path} writes {ours}: a critic reads the "
            "actor's tokens",
            "Start it from a model with the same tokenizer, or set critic.path=null.",
        )


@rule("reference", "algorithm.kl_coef", "model.path")
def reference_exists(cfg: RunConfig) -> Finding | None:
    if cfg.uses_reference and cfg.reference.path != cfg.model.path:
        return _model_is_there(cfg, "reference.path", cfg.reference.path)


@rule("reward.model")
def reward_model_exists(cfg: RunConfig) -> Finding | None:
    return _model_is_there(cfg, "reward.model", cfg.reward.model) if cfg.reward.model else None


def _model_is_there(cfg: RunConfig, key: str, value: str) -> Finding | None:
    path = Path(value)
    if path.is_dir():
        return _folder_is_a_model(key, path)
    if path.is_file() or not is_hub_name(cfg, value):
        return (
            f"{key} {value} is no model folder, {_looked_in(cfg, value)}",
            "Correct the path, make the folder (the scripts in launch/ make the small models of the CPU profiles), "
            "or give a hub name such as Qwen/Qwen2.5-0.5B-Instruct.",
        )


def _folder_is_a_model(key: str, path: Path) -> Finding | None:
    file = path / "config.json"
    if not file.is_file():
        return (
            f"{key} {path} has no config.json: it is no Hugging Face model folder",
            "Point to the folder that has it.",
        )
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        return f"{key}: {file} is not JSON ({error})", "Make the model folder anew."
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        return f"{key}: {file} names no model_type: it is no model's configuration", "Make the model folder anew."


def _looked_in(cfg: RunConfig, value: str) -> str:
    """Where a path was looked for, for messages."""
    if Path(value).expanduser().is_absolute():
        return "as there is nothing at this path"
    return "looked for in " + ", ".join(dict.fromkeys(str(root) for root in path_roots(cfg)))


@rule("data.train")
def training_data_exists(cfg: RunConfig) -> Finding | None:
    return _data_is_there(cfg, "data.train", cfg.data.train)


@rule("data.eval")
def evaluation_data_exists(cfg: RunConfig) -> Finding | None:
    return _data_is_there(cfg, "data.eval", cfg.data.eval) if cfg.data.eval else None


def _data_is_there(cfg: RunConfig, key: str, value: str) -> Finding | None:
    if is_task(value):
        return _task_is_known(key, value)
    if Path(value).exists() or (not value.endswith((".jsonl", ".json")) and is_hub_name(cfg, value)):
        return None
    return (
        f"{key} {value} does not exist, {_looked_in(cfg, value)}",
        "Correct the path, or give reasoning_gym:TASK or the hub name of a dataset.",
    )


def _task_is_known(key: str, value: str) -> Finding | None:
    name = value.removeprefix("reasoning_gym:")
    if not name:
        return f"{key} {value} names no task", f"Write {key}=reasoning_gym:TASK, for example reasoning_gym:chain_sum."
    hint = unknown_task(name)
    return (f"{key} {value}: reasoning-gym has no such task", hint) if hint else None


def unknown_task(name: str) -> str | None:
    """What to do about a task that reasoning-gym has not; None where it has it."""
    # Tasks import matplotlib, which warns where it cannot write to the home folder; that is told, if it matters, by who needs the folder.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from reasoning_gym.factory import DATASETS  # a second: only for those who use it

    if name in DATASETS:
        return None
    near = difflib.get_close_matches(name, DATASETS, n=3)
    return f"Did you mean {' or '.join(near)}?" if near else f"Tasks: {', '.join(sorted(DATASETS))}."


@rule("reward.function")
def reward_function_exists(cfg: RunConfig) -> Finding | None:
    return _function_is_there(cfg, "reward.function", cfg.reward.function) if cfg.reward.function else None


@rule("reward.extra")
def extra_reward_functions_exist(cfg: RunConfig) -> Iterable[Finding]:
    for function in cfg.reward.extra:
        if found := _function_is_there(cfg, "reward.extra", function):
            yield found


@rule("data.eval_function", "reward.function")
def evaluation_function_exists(cfg: RunConfig) -> Finding | None:
    function = cfg.data.eval_function
    return (
        _function_is_there(cfg, "data.eval_function", function)
        if function and function != cfg.reward.function
        else None
    )


def _function_is_there(cfg: RunConfig, key: str, function: str) -> Finding | None:
    """The file is not read here: `hybrid.rewards.load.started_functions` imports it, in a process of its own."""
    if function in BUILT_IN_FUNCTIONS:
        return None
    file, _, name = function.rpartition(":")
    fix = f"Write {key}=file.py:function, or one of {', '.join(BUILT_IN_FUNCTIONS)}."
    if not file.endswith(".py") or not name.isidentifier():
        return f"{key} {function} is neither a built-in function nor file.py:function", fix
    if not Path(file).is_file():
        return f"{key}: the file {file} does not exist", fix


@rule("rollout.replay")
def replay_exists(cfg: RunConfig) -> Finding | None:
    if cfg.rollout.replay and not Path(cfg.rollout.replay).is_file():
        return (
            f"rollout.replay {cfg.rollout.replay} does not exist",
            "Record rollouts first: run once with rollout.record=FILE.",
        )


@rule("model.path", "rollout.tensor_parallel_size")
def engines_split_the_heads(cfg: RunConfig) -> Finding | None:
    config, tp = model_config(cfg.model.path), cfg.rollout.tensor_parallel_size
    if config and config["num_attention_heads"] % tp:
        heads = config["num_attention_heads"]
        return (
            f"rollout.tensor_parallel_size {tp} does not divide the {heads} attention heads of {cfg.model.path}",
            f"Use one of {', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)}.",
        )


@rule("model.path", "critic", "reference", "reward.model", "rollout.max_new_tokens", "data.max_prompt_tokens")
def models_read_the_longest_sample(cfg: RunConfig) -> Iterable[Finding]:
    for key, (path, _) in role_models(cfg).items():
        longest = (model_config(path) or {}).get("max_position_embeddings")
        if isinstance(longest, int) and 0 < longest < cfg.max_sequence_tokens:
            yield (
                f"data.max_prompt_tokens {cfg.data.max_prompt_tokens} + rollout.max_new_tokens {cfg.rollout.max_new_tokens} = "
                f"{cfg.max_sequence_tokens}, but {key} {path} reads {longest} tokens",
                "Shorten prompts or responses.",
            )
