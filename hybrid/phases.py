"""What happens inside each phase: one function per phase, each entering it through the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybrid.algorithms.kl import adaptive_kl
from hybrid.config import RunConfig
from hybrid.data.batches import Lengths, Plan, lengths_of, plan_micro_batches
from hybrid.data.samples import Sample
from hybrid.errors import TrainingStopped
from hybrid.experience import (
    Experience,
    Forward,
    kl_beyond_bound,
    policy_rows,
    sample_rows,
    sampler_bound,
    value_rows,
)
from hybrid.rewards import EarlyScores, RewardFunction, accuracy
from hybrid.rewards import score as score_by_function
from hybrid.rewards.shaping import shape, weighted_sum
from hybrid.roles.objective import PolicyObjective, batch_metrics, check_sampler
from hybrid.roles.packing import Row
from hybrid.roles.schedule import learning_rate
from hybrid.roles.shards import shard, unshard
from hybrid.rollout.requests import SamplingOptions

if TYPE_CHECKING:
    import torch

    from hybrid.roles.group import RoleGroup
    from hybrid.session import Session
    from hybrid.trainer import Progress

SELF_TEST_BOUND = 0.1
"""Mean absolute log-prob difference in nats that the self-test allows where the profile turns the step's bound off."""


def generate(s: Session, progress: Progress, count: int, round_: int, early: EarlyScores | None = None) -> list[Sample]:
    """Samples of the next `count` prompts, with a greedy answer to each where the estimator compares with one. `early` scores them
    meanwhile."""
    with s.phase("generate"):
        try:
            return s.engines.generate(
                s.prompts.take(count),
                sampling_options(s.cfg),
                step=progress.step,
                version=progress.weight_version,
                round_=round_,
                with_greedy=s.cfg.uses_greedy_answers,
                arrived=early.add if early else None,
                check=early.check if early else None,
            )
        finally:
            if early is not None:
                early.close()
                s.ledger.overlapped(early.seconds())


def sampling_options(cfg: RunConfig) -> SamplingOptions:
    """How the profile wants samples drawn."""
    rollout = cfg.rollout
    return SamplingOptions(
        n=rollout.samples_per_prompt,
        max_new_tokens=rollout.max_new_tokens,
        min_new_tokens=rollout.min_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        keep_special_tokens=cfg.reward.keep_special_tokens,
    )


def early_scores(s: Session) -> EarlyScores | None:
    """What scores during generation; None where every reward has to wait for its end: reward models need the engines' memory."""
    rewards = [s.reward, *(extra for _, extra in s.extra_rewards)]
    functions = [reward for reward in rewards if reward is not None and reward.by_group]
    return EarlyScores(functions, s.report.spans.span) if functions else None


def score(s: Session, progress: Progress, samples: list[Sample], early: EarlyScores | None = None) -> None:
    """Set `reward` of each sample, the weighted sum of what the profile's rewards say, and `score`, what shaping makes of it.

    early: has scored the samples, or does so still.
    """

    def by_function(reward: RewardFunction) -> list[float]:
        is_early = early is not None and reward in early.functions
        return early.of(reward, samples) if is_early else score_by_function(reward, samples)

    with s.phase("score"):
        terms = [(s.cfg.reward.weight, by_function(s.reward) if s.reward_model is None else _by_model(s, samples))]
        terms += [(weight, by_function(extra)) for weight, extra in s.extra_rewards]
    for sample, value in zip(samples, weighted_sum(terms), strict=True):
        sample.reward = value
    progress.reward_moments = shape(s.cfg, samples, progress.reward_moments)


def _by_model(s: Session, samples: list[Sample]) -> list[float]:
    rows = sample_rows(samples)
    lengths = [Lengths(i, len(row.prompt) + len(row.response), 0) for i, row in enumerate(rows)]
    plan = plan_micro_batches(lengths, s.cfg.world_size, sum(x.prompt for x in lengths), share_prompts=False)
    answers = s.reward_model.call_sharded("score", shard(plan, rows))
    return [float(score) for score in unshard(plan, [1] * len(rows), answers)]


def forward(s: Session, rows: list[Row]) -> Forward:
    """Log-probs of reference and old policy, and values: only the passes whose results are used."""
    old = s.cfg.needs_old_logprobs
    if not (old or s.reference or s.critic):
        return Forward()
    plan, lengths = plan_rows(s, rows, range(len(rows))), [len(row.response) for row in rows]
    temperature = s.cfg.rollout.temperature
    with s.phase("forward"):
        shards = s.actor.put(shard(plan, rows))

        def run(group: RoleGroup, method: str, *args) -> list[torch.Tensor]:
            return unshard(plan, lengths, group.call_sharded(method, shards, *args))

        return Forward(
            old_logprobs=run(s.actor, "logprobs", temperature, s.ends) if old else None,
            ref_logprobs=run(s.reference, "logprobs", temperature, s.ends) if s.reference else None,
            values=run(s.critic, "values") if s.critic else None,
        )


def check_rollout(s: Session, experience: Experience) -> None:
    """Stop before training when trainer and sampler disagree, where the forward pass can tell already."""
    mean, largest = (experience.metrics.get(f"sampler/logprob_diff_{kind}") for kind in ("mean", "max"))
    check_sampler(mean, largest, sampler_bound(s.cfg))


def train_critic(
    s: Session, progress: Progress, experience: Experience, rows: list[Row], plan: Plan
) -> dict[str, float | None]:
    """One optimizer step of the critic on those of `rows` that are in `plan`; nothing without a critic."""
    if s.critic is None:
        return {}
    shards = shard(plan, value_rows(experience, rows))
    _, tokens = _counts(rows, plan)
    rate = learning_rate(s.cfg.critic, progress.update, s.cfg.total_updates)
    with s.phase("train_critic"):
        results = s.critic.call_sharded("train", shards, s.cfg.algorithm.value_clip, float(tokens), rate)
    _count_skip(s, progress, results[0].applied, "critic")
    s.note_counted("critic", results)
    return results[0].metrics | {"lr/critic": rate}


def train_actor(
    s: Session, progress: Progress, experience: Experience, rows: list[Row], plan: Plan
) -> dict[str, float | None]:
    """One optimizer step of the actor on those of `rows` that are in `plan`; makes a new weight version when it was applied."""
    with_reference = s.cfg.algorithm.kl_in == "loss"
    shards = shard(plan, policy_rows(experience, rows, with_reference))
    before = s.cfg.critic_only_updates
    rate = learning_rate(s.cfg.actor, progress.update - before, s.cfg.total_updates - before)
    objective = _objective(s, progress, rows, plan)
    with s.phase("train_actor"):
        results = s.actor.call_sharded("train", shards, objective, rate)
    _count_skip(s, progress, results[0].applied, "actor")
    progress.weight_version += results[0].applied
    s.note_counted("actor", results)
    known = {key: value for key, value in results[0].metrics.items() if value is not None}
    known |= batch_metrics([result.fed for result in results])
    return known | {"lr/actor": rate, "train/skipped_steps": float(progress.skipped)}


def _objective(s: Session, progress: Progress, rows: list[Row], plan: Plan) -> PolicyObjective:
    a, max_tokens = s.cfg.algorithm, s.cfg.rollout.max_new_tokens
    count, tokens = _counts(rows, plan)
    normalizer = {"token_mean": tokens, "sequence_mean": count, "constant": count * max_tokens}[a.reduction]
    return PolicyObjective(
        kind=a.policy_loss,
        reduction=a.reduction,
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        dual_clip=a.dual_clip,
        correction=a.correction,
        correction_low=a.correction_low,
        correction_high=a.correction_high,
        entropy_coef=a.entropy_coef,
        entropy_metric=a.entropy_metric,
        kl_coef=progress.kl_coef,
        kl_kind=a.kl_kind,
        temperature=s.cfg.rollout.temperature,
        max_tokens=max_tokens,
        normalizer=float(normalizer),
        sampler_bound=sampler_bound(s.cfg),
        ends=s.ends,
    )


def _counts(rows: list[Row], plan: Plan) -> tuple[int, int]:
    """How many rows are in `plan`, and how many tokens their responses have."""
    lengths = [len(rows[i].response) for rank in plan for micro in rank for i in micro]
    return len(lengths), sum(lengths)


def adapt_kl(s: Session, progress: Progress, metrics: dict[str, float | None]) -> None:
    """Steer the KL coefficient towards its target, where there is one and the actor trains: before that the KL says nothing."""
    a, current = s.cfg.algorithm, metrics.get("kl/response")
    if a.kl_target is not None and current is not None and progress.step > a.critic_only_steps:
        samples = s.cfg.samples_per_step
        progress.kl_coef = adaptive_kl(progress.kl_coef, a.kl_target, a.kl_horizon, current, samples)


def guard_kl(s: Session, metrics: dict[str, float | None]) -> None:
    """Warn, or raise `TrainingStopped`, when the policy is further from its reference than the profile allows."""
    if said := kl_beyond_bound(s.cfg, metrics.get("kl/response")):
        if s.cfg.algorithm.kl_bound_action == "stop":
            raise TrainingStopped(said)
        s.report.warn(said)


def _count_skip(s: Session, progress: Progress, applied: bool, role: str) -> None:
    if applied:
        progress.skipped_in_a_row[role] = 0
        return
    progress.skipped += 1
    progress.skipped_in_a_row[role] = in_a_row = progress.skipped_in_a_row.get(role, 0) + 1
    s.report.warn(f"step {progress.step}: a gradient of the {role} was not finite; its optimizer step was skipped")
    if in_a_row >= s.cfg.train.max_skipped_steps:
        raise TrainingStopped(
            f"{in_a_row} optimizer steps of the {role} in a row had gradients that were not finite "
            f"(train.max_skipped_steps={s.cfg.train.max_skipped_steps}). Lower {role}.learning_rate, look at the rewards in "
            f"{s.run_dir / 'samples.jsonl'} for extreme values, or train in float32."
        )


def sync(s: Session, progress: Progress) -> None:
    """Give the engines the actor's weights, unless they hold them: after a skipped update nothing is sent."""
    if s.engines is None:
        return
    with s.phase("sync"):
        if s.engine_version != progress.weight_version:
            s.actor.call("send_weights", progress.weight_version)
            s.engine_version = progress.weight_version


def self_test(s: Session, progress: Progress) -> None:
    """Generate greedily from just synced weights and let the trainer score it. Raises `RolloutError` when the two do not agree."""
    if s.engines is None:
        return

    def trainer_logprobs(prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
        s.report.first_token()  # the engines have just answered
        rows = [Row(i, p, r) for i, (p, r) in enumerate(zip(prompts, responses, strict=True))]
        plan = plan_rows(s, rows, range(len(rows)))
        with s.phase("forward"):
            answers = s.actor.call_sharded("logprobs", shard(plan, rows), 1.0)
        return [logprobs.tolist() for logprobs in unshard(plan, [len(r) for r in responses], answers)]

    s.scheduler.enter("generate")
    s.engines.self_test(
        trainer_logprobs,
        s.self_test_prompts(),
        bound=s.cfg.algorithm.sampler_kl_bound or SELF_TEST_BOUND,
        version=progress.weight_version,
    )
    sync(s, progress)


def evaluate(s: Session, progress: Progress) -> dict[str, float | None]:
    """Greedy answers to the held-out problems: mean score, and the share that is right."""
    if s.engines is None or not s.held_out:
        return {}
    with s.phase("evaluate"):
        greedy = SamplingOptions(
            s.cfg.rollout.max_new_tokens,
            temperature=0.0,
            stop=tuple(s.cfg.rollout.stop),
            keep_special_tokens=s.cfg.reward.keep_special_tokens,
        )
        samples = s.engines.generate(s.held_out, greedy, step=0, version=progress.weight_version)
        scores = score_by_function(s.eval_reward, samples)
    return {"eval/reward": sum(scores) / len(scores), "eval/accuracy": accuracy(scores)}


def plan_rows(s: Session, rows: list[Row], chosen: Sequence[int]) -> Plan:
    """Micro-batches of the `rows` numbered in `chosen`, in those numbers."""
    budget, share = s.cfg.train.micro_batch_tokens, s.cfg.model.shares_prompts
    plan = plan_micro_batches(lengths_of([rows[i] for i in chosen]), s.cfg.world_size, budget, share)
    return [[[chosen[i] for i in micro] for micro in rank] for rank in plan]
