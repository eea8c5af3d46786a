"""Rules about the mathematics: which choices of scores, advantages, losses and KL go together."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid.config.rules import Finding, rule
from hybrid.config.run import RunConfig

GROUP_ESTIMATORS = ("reinforce_baseline", "rloo", "group_norm", "dr_grpo", "maxrl", "opo")
"""Estimators that compare a sample with the other samples of its prompt."""
SCALE_FREE = ("group_norm", "maxrl")
"""Estimators that divide by the group's own size of scores: a factor common to the group has no effect."""


@rule("algorithm.advantage", "rollout.samples_per_prompt")
def groups_have_members(cfg: RunConfig) -> Finding | None:
    if cfg.algorithm.advantage in GROUP_ESTIMATORS and cfg.rollout.samples_per_prompt == 1:
        return (
            f"algorithm.advantage {cfg.algorithm.advantage} with rollout.samples_per_prompt 1: "
            "it compares the samples of a prompt",
            "Set rollout.samples_per_prompt to 2 or more (8 is usual), or algorithm.advantage to gae, reinforce or remax.",
        )


@rule("algorithm.dynamic_sampling", "rollout.samples_per_prompt")
def dynamic_sampling_compares_samples(cfg: RunConfig) -> Finding | None:
    if cfg.algorithm.dynamic_sampling and cfg.rollout.samples_per_prompt == 1:
        return (
            "algorithm.dynamic_sampling with rollout.samples_per_prompt 1: one sample always scores like itself, and every "
            "prompt would be left out",
            "Set rollout.samples_per_prompt to 2 or more, or algorithm.dynamic_sampling=false.",
        )


@rule("critic", "algorithm.advantage")
def critic_only_with_gae(cfg: RunConfig) -> Finding | None:
    if cfg.critic is not None and not cfg.uses_critic:
        return (
            f"a critic is given, but algorithm.advantage {cfg.algorithm.advantage} has no use for one",
            "Remove the section (or override critic=null), or set algorithm.advantage=gae.",
        )


@rule("algorithm.critic_only_steps", "algorithm.advantage", "train.steps")
def critic_steps_end(cfg: RunConfig) -> Finding | None:
    steps = cfg.algorithm.critic_only_steps
    if steps and not cfg.uses_critic:
        return (
            f"algorithm.critic_only_steps {steps} with algorithm.advantage {cfg.algorithm.advantage}: there is no critic",
            "Set algorithm.critic_only_steps=0, or algorithm.advantage=gae.",
        )
    if steps >= cfg.train.steps:
        return (
            f"algorithm.critic_only_steps {steps} of train.steps {cfg.train.steps}: the actor would never train",
            f"Set it below {cfg.train.steps}, or train longer.",
        )


@rule("reference", "algorithm.kl_coef")
def reference_only_with_kl(cfg: RunConfig) -> Finding | None:
    if cfg.reference is not None and not cfg.uses_reference:
        return (
            "a reference is given, but algorithm.kl_coef is 0: nothing is compared with it",
            "Remove the section (or override reference=null), or set algorithm.kl_coef above 0.",
        )


@rule("algorithm.kl_target", "algorithm.kl_coef")
def adaptive_kl_has_a_start(cfg: RunConfig) -> Finding | None:
    if cfg.algorithm.kl_target is not None and not cfg.uses_reference:
        return (
            f"algorithm.kl_target {cfg.algorithm.kl_target:g} with algorithm.kl_coef 0: the coefficient is multiplied, and "
            "would stay 0",
            "Set algorithm.kl_coef to its first value, or algorithm.kl_target=null.",
        )


@rule("algorithm.kl_target", "algorithm.kl_bound", "algorithm.kl_coef")
def kl_target_is_within_the_bound(cfg: RunConfig) -> Finding | None:
    a = cfg.algorithm
    if cfg.uses_reference and a.kl_target and a.kl_bound and a.kl_target >= a.kl_bound:
        return (
            f"algorithm.kl_target {a.kl_target:g} is not below algorithm.kl_bound {a.kl_bound:g}: the KL is steered to where "
            "the run counts as astray",
            f"Raise algorithm.kl_bound (for example to {3 * a.kl_target:g}), or lower algorithm.kl_target.",
        )


@rule("algorithm.kl_target", "algorithm.kl_horizon", "train.prompts_per_step", "rollout.samples_per_prompt")
def adaptive_kl_stays_positive(cfg: RunConfig) -> Finding | None:
    samples, horizon = cfg.samples_per_step, cfg.algorithm.kl_horizon
    if cfg.algorithm.kl_target is not None and samples >= 5 * horizon:
        return (
            f"algorithm.kl_horizon {horizon} with {samples} responses per step: the coefficient, which moves by a fifth per horizon, "
            "would reach 0 or less in one step",
            f"Set algorithm.kl_horizon to {samples} or more (10000 is usual), or algorithm.kl_target=null.",
        )


@rule("algorithm.kl_kind", "algorithm.kl_in", "algorithm.kl_coef")
def kl_in_the_loss_has_a_gradient(cfg: RunConfig) -> Finding | None:
    a = cfg.algorithm
    if cfg.uses_reference and a.kl_in == "loss" and a.kl_kind == "k1":
        return (
            "algorithm.kl_kind k1 with algorithm.kl_in loss: the gradient of k1 is the mean score function, which is 0 on "
            "average: it would add noise and hold nothing",
            "Set algorithm.kl_kind to k2 or k3, or algorithm.kl_in=reward.",
        )


@rule("algorithm.policy_loss", "algorithm.reduction")
def gspo_means_sequences(cfg: RunConfig) -> Finding | None:
    if cfg.algorithm.policy_loss == "gspo" and cfg.algorithm.reduction != "sequence_mean":
        return (
            f"algorithm.policy_loss gspo with algorithm.reduction {cfg.algorithm.reduction}: its ratio is per sequence",
            "Set algorithm.reduction=sequence_mean.",
        )


@rule("algorithm.policy_loss", "algorithm.dual_clip")
def dual_clip_bounds_a_ratio(cfg: RunConfig) -> Finding | None:
    if cfg.algorithm.dual_clip is not None and cfg.algorithm.policy_loss not in ("ppo", "gspo"):
        return (
            f"algorithm.dual_clip {cfg.algorithm.dual_clip:g} with algorithm.policy_loss {cfg.algorithm.policy_loss}",
            "Set algorithm.dual_clip=null, or algorithm.policy_loss to ppo or gspo.",
        )


@rule("algorithm.correction", "algorithm.correction_low", "algorithm.correction_high")
def correction_bounds_hold_one(cfg: RunConfig) -> Finding | None:
    a = cfg.algorithm
    if a.correction == "none":
        return None
    if a.correction_high < 1 or (a.correction != "tis" and a.correction_low > 1):
        return (
            f"algorithm.correction_low {a.correction_low:g} and algorithm.correction_high {a.correction_high:g} leave out 1, the "
            "weight where sampler and trainer agree",
            "Use bounds on both sides of 1, such as 0.5 and 2.",
        )


@rule("reward.weight", "reward.extra")
def some_reward_counts(cfg: RunConfig) -> Finding | None:
    if not cfg.reward.weight and not any(cfg.reward.extra.values()):
        return (
            f"reward.weight {cfg.reward.weight:g}, and no other weight in reward.extra: every response would score 0",
            "Set reward.weight to 1, or give reward.extra a function with a weight.",
        )


@rule("reward.extra", "reward.function")
def rewards_are_different(cfg: RunConfig) -> Finding | None:
    if cfg.reward.function in cfg.reward.extra:
        return (
            f"reward.function {cfg.reward.function} stands in reward.extra, too",
            "Remove it there, and set reward.weight to its weight.",
        )


@rule("reward.clip")
def reward_clip_is_an_interval(cfg: RunConfig) -> Finding | None:
    if cfg.reward.clip and not cfg.reward.clip[0] < cfg.reward.clip[1]:
        return f"reward.clip {list(cfg.reward.clip)} is no interval", "Give the lower bound first: reward.clip=[-5, 5]."


@rule("reward.unfinished_penalty", "reward.unfinished_score")
def unfinished_one_way(cfg: RunConfig) -> Finding | None:
    if cfg.reward.unfinished_penalty is not None and cfg.reward.unfinished_score is not None:
        return (
            f"reward.unfinished_penalty {cfg.reward.unfinished_penalty:g} and reward.unfinished_score "
            f"{cfg.reward.unfinished_score:g} are both given",
            "Set one of them to null.",
        )


@rule("reward.overlong_buffer", "rollout.max_new_tokens")
def overlong_buffer_fits(cfg: RunConfig) -> Finding | None:
    if cfg.reward.overlong_buffer and cfg.reward.overlong_buffer > cfg.rollout.max_new_tokens:
        return (
            f"reward.overlong_buffer {cfg.reward.overlong_buffer} is more than rollout.max_new_tokens "
            f"{cfg.rollout.max_new_tokens}: even an empty response would be penalised",
            f"Use at most {cfg.rollout.max_new_tokens}; a quarter of it is usual.",
        )


@rule("reward.source_field", "reward.source_weights", "algorithm.advantage")
def source_weights_count(cfg: RunConfig) -> Iterable[Finding]:
    field, weights = cfg.reward.source_field, cfg.reward.source_weights
    if bool(field) != bool(weights):
        given, missing = ("source_field", "source_weights") if field else ("source_weights", "source_field")
        yield f"reward.{given} without reward.{missing}", "Give both, or neither."
    if weights and cfg.algorithm.advantage in SCALE_FREE:
        yield (
            f"reward.source_weights with algorithm.advantage {cfg.algorithm.advantage}: it divides by the size of a prompt's own "
            "scores, so a factor common to them cancels",
            "Set algorithm.advantage to dr_grpo or rloo, or remove reward.source_weights.",
        )
