"""Rules between fields, one small function each: what is wrong, with its values and the fix, or None.

A rule names the keys it reads; it is left out while one of them is itself in error. Rules see resolved values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hybrid.config import machine
from hybrid.config.run import RunConfig
from hybrid.config.violations import Violation

Finding = tuple[str, str]
"""The rule with its values, and the fix."""


@dataclass(frozen=True)
class Rule:
    keys: tuple[str, ...]
    find: Callable[[RunConfig], Finding | Iterable[Finding] | None]


RULES: list[Rule] = []


def rule(*keys: str) -> Callable:
    """Register a function of the resolved config as a rule over `keys`."""

    def register(find: Callable) -> Callable:
        RULES.append(Rule(keys, find))
        return find

    return register


def find_violations(cfg: RunConfig, broken: frozenset[str]) -> list[Violation]:
    """All rules that the resolved `cfg` breaks. `broken`: keys and sections that are in error already."""
    violations = []
    for each in RULES:
        if broken.isdisjoint((*each.keys, *(key.split(".")[0] for key in each.keys))):
            found = each.find(cfg)
            findings = [found] if isinstance(found, tuple) else found or []
            violations += [Violation(each.keys, said, fix) for said, fix in findings]
    return violations


# Placement


@rule("cluster.gpus_per_node", "cluster.device")
def gpus_are_found(cfg: RunConfig) -> Finding | None:
    if cfg.cluster.gpus_per_node == 0:
        return (
            "cluster.gpus_per_node: auto finds no CUDA GPU here, and cluster.device is cuda",
            _hidden_gpus() + "Give the number of GPUs per node, or set cluster.device=cpu.",
        )


@rule("cluster.device", "cluster.address")
def gpus_are_whole(cfg: RunConfig) -> Finding | None:
    if cfg.cluster.device == "cuda" and cfg.cluster.address is None and (why := machine.gpu_slice()):
        return (
            f"cluster.device: cuda is invalid: {why} (MIG), and CUDA shares no memory between processes there (IPC), which carries the "
            "weights to the engines",
            "Turn MIG off (nvidia-smi -mig 0), or name whole GPUs in CUDA_VISIBLE_DEVICES.",
        )


def _hidden_gpus() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if hidden is None else f"CUDA_VISIBLE_DEVICES={hidden} may hide them: unset it. "


@rule("rollout.tensor_parallel_size", "cluster.gpus_per_node")
def engines_stay_on_a_node(cfg: RunConfig) -> Finding | None:
    tp, gpus = cfg.rollout.tensor_parallel_size, cfg.cluster.gpus_per_node
    if gpus and gpus % tp:
        sizes = ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)
        return (
            f"rollout.tensor_parallel_size {tp} does not divide cluster.gpus_per_node {gpus}: an engine lies on one node",
            f"Use one of {sizes}.",
        )


@rule("rollout.engines", "rollout.tensor_parallel_size", "cluster.num_nodes", "cluster.gpus_per_node")
def engines_fill_the_pool(cfg: RunConfig) -> Finding | None:
    engines, tp, gpus = cfg.rollout.engines, cfg.rollout.tensor_parallel_size, cfg.world_size
    if gpus and cfg.cluster.gpus_per_node % tp == 0 and engines * tp != gpus:
        return (
            f"rollout.engines {engines} x rollout.tensor_parallel_size {tp} = {engines * tp}, but "
            f"cluster.num_nodes {cfg.cluster.num_nodes} x cluster.gpus_per_node {cfg.cluster.gpus_per_node} = {gpus} GPUs",
            f"Leave rollout.engines at auto, or set it to {gpus // tp}.",
        )


@rule("cluster.num_nodes", "cluster.address")
def many_nodes_need_a_cluster(cfg: RunConfig) -> Finding | None:
    if cfg.cluster.num_nodes > 1 and cfg.cluster.address is None:
        return (
            f"cluster.num_nodes {cfg.cluster.num_nodes} without cluster.address: Ray started here has this node only",
            "Start Ray on all nodes (launch/ray_node.sh) and set cluster.address=auto.",
        )


@rule("cluster.bind_numa", "cluster.device")
def binding_needs_cuda(cfg: RunConfig) -> Finding | None:
    if cfg.cluster.bind_numa and cfg.cluster.device == "cpu":
        return (
            "cluster.bind_numa: true is invalid: with cluster.device cpu there is no GPU to stay beside",
            "Set cluster.bind_numa to auto or false.",
        )


@rule("memory.tier", "cluster.device")
def pinned_memory_needs_cuda(cfg: RunConfig) -> Finding | None:
    if cfg.memory.tier == "pinned" and cfg.cluster.device == "cpu":
        return (
            "memory.tier pinned with cluster.device cpu: there, device memory is host memory",
            "Set memory.tier to auto or file.",
        )


@rule("actor", "critic", "cluster.device")
def host_optimizers_need_cuda_and_shards(cfg: RunConfig) -> Iterable[Finding]:
    trained = {"actor": cfg.actor, **({"critic": cfg.critic} if cfg.uses_critic and cfg.critic else {})}
    for name, role in trained.items():
        if role.optimizer == "cpu" and (cfg.cluster.device == "cpu" or role.zero_stage == 0):
            yield (
                f"{name}.optimizer cpu with cluster.device {cfg.cluster.device} and {name}.zero_stage {role.zero_stage}",
                f"Set {name}.optimizer to auto or device, or use cuda and {name}.zero_stage 1 to 3.",
            )


# Portions


@rule("train.prompts_per_step", "train.prompts_per_update")
def updates_divide_the_step(cfg: RunConfig) -> Finding | None:
    step, update = cfg.train.prompts_per_step, cfg.train.prompts_per_update
    if step % update:
        return (
            f"train.prompts_per_update {update} does not divide train.prompts_per_step {step}",
            f"Use {_nearest_divisor(step, update)}, or another divisor of {step}.",
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: abs(n - wanted))


@rule("train.prompts_per_update", "train.prompts_per_step", "cluster.num_nodes", "cluster.gpus_per_node")
def every_rank_has_a_prompt(cfg: RunConfig) -> Finding | None:
    if cfg.train.prompts_per_update < cfg.world_size:
        return (
            f"train.prompts_per_update {cfg.train.prompts_per_update} (prompts_per_step when null) is less than the "
            f"{cfg.world_size} GPUs: every rank trains on at least one prompt",
            f"Raise it to at least {cfg.world_size}, or use fewer GPUs.",
        )


@rule("train.micro_batch_tokens", "data.max_prompt_tokens", "rollout.max_new_tokens")
def longest_sample_fits_a_micro_batch(cfg: RunConfig) -> Finding | None:
    return _fits(cfg, "train.micro_batch_tokens", cfg.train.micro_batch_tokens)


@rule("reward.batch_tokens", "reward.model", "data.max_prompt_tokens", "rollout.max_new_tokens")
def longest_sample_fits_the_reward_model(cfg: RunConfig) -> Finding | None:
    return _fits(cfg, "reward.batch_tokens", cfg.reward.batch_tokens) if cfg.uses_reward_model else None


def _fits(cfg: RunConfig, key: str, tokens: int) -> Finding | None:
    if tokens < cfg.max_sequence_tokens:
        return (
            f"{key} {tokens} is less than data.max_prompt_tokens {cfg.data.max_prompt_tokens} + "
            f"rollout.max_new_tokens {cfg.rollout.max_new_tokens} = {cfg.max_sequence_tokens}: the longest sample must fit",
            f"Raise {key} to at least {cfg.max_sequence_tokens}, or shorten prompts or responses.",
        )


@rule("rollout.min_new_tokens", "rollout.max_new_tokens")
def responses_can_end(cfg: RunConfig) -> Finding | None:
    low, high = cfg.rollout.min_new_tokens, cfg.rollout.max_new_tokens
    if low > high:
        return f"rollout.min_new_tokens {low} is more than rollout.max_new_tokens {high}", f"Use at most {high}."


@rule("rollout.replay", "rollout.record")
def replay_or_record(cfg: RunConfig) -> Finding | None:
    if cfg.rollout.replay and cfg.rollout.record:
        return (
            "rollout.replay and rollout.record are both given: replayed rollouts are recorded already",
            "Set one of them to null.",
        )


@rule("actor", "critic", "train.steps", "train.epochs", "train.prompts_per_step", "train.prompts_per_update")
def schedules_end(cfg: RunConfig) -> Iterable[Finding]:
    trained = {"actor": cfg.actor, **({"critic": cfg.critic} if cfg.uses_critic and cfg.critic else {})}
    for name, role in trained.items():
        if role.schedule == "constant" and role.min_lr_ratio:
            yield (
                f"{name}.min_lr_ratio {role.min_lr_ratio:g} with {name}.schedule constant, which never falls",
                f"Set {name}.schedule to linear or cosine, or {name}.min_lr_ratio=0.",
            )
        updates = cfg.total_updates - (cfg.critic_only_updates if name == "actor" else 0)
        if role.schedule != "constant" and role.warmup_steps and role.warmup_steps >= updates - 1:
            yield (
                f"{name}.warmup_steps {role.warmup_steps} of a {role.schedule} schedule in a run of {updates} "
                "optimizer steps: none is left in which the rate falls",
                f"Set {name}.warmup_steps to at most {max(0, updates - 2)}, or train longer.",
            )


@rule("logging.profile", "train.steps")
def profiled_step_is_one_of_the_run(cfg: RunConfig) -> Finding | None:
    if cfg.logging.profile is not None and cfg.logging.profile > cfg.train.steps:
        return (
            f"logging.profile {cfg.logging.profile} is more than train.steps {cfg.train.steps}: that step never comes",
            f"Name a step from 1 to {cfg.train.steps}, or set it to null.",
        )


# Rewards and data


@rule("reward.function", "reward.model")
def one_source_of_scores(cfg: RunConfig) -> Finding | None:
    if cfg.reward.function and cfg.reward.model:
        return (
            f"reward.function {cfg.reward.function} and reward.model {cfg.reward.model} are both given",
            "Set one of them to null.",
        )
    if not cfg.reward.function and not cfg.reward.model:
        return (
            "neither reward.function nor reward.model is given: nothing gives scores",
            "Set reward.function to reasoning_gym, math_verify or file.py:function, or reward.model to a model.",
        )


@rule("reward.function", "data.train")
def task_scorer_needs_its_task(cfg: RunConfig) -> Finding | None:
    if cfg.reward.function == "reasoning_gym" and not is_task(cfg.data.train):
        return (
            f"reward.function reasoning_gym with data.train {cfg.data.train}: the scorer belongs to a reasoning_gym task",
            "Set data.train=reasoning_gym:TASK, or reward.function to math_verify or file.py:function.",
        )


@rule("data.task_args", "data.train")
def task_args_need_a_task(cfg: RunConfig) -> Finding | None:
    if cfg.data.task_args and not is_task(cfg.data.train):
        names = ", ".join(cfg.data.task_args)
        return (
            f"data.task_args ({names}) with data.train {cfg.data.train}, which is no reasoning_gym task",
            "Remove data.task_args, or set data.train=reasoning_gym:TASK.",
        )


TEMPLATE_OPTIONS = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "max_length", "messages",
    "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs", "tools", "truncation",
)  # fmt: skip
"""What `apply_chat_template` of transformers takes for itself: set by us, or not a variable of the template."""


@rule("data.template_args")
def template_args_are_the_templates(cfg: RunConfig) -> Finding | None:
    taken = [name for name in TEMPLATE_OPTIONS if name in cfg.data.template_args]
    if taken:
        return (
            f"data.template_args sets {', '.join(taken)}, which the run sets itself",
            "Remove it: the messages come from data.prompt_field, tools from data.tools_field; other variables are the template's.",
        )


def is_task(data: str) -> bool:
    """Whether `data.train` or `data.eval` names a reasoning_gym task."""
    return data.startswith("reasoning_gym:")
