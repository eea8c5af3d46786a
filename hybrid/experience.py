"""From samples, scores and log-probs to what actor and critic train on. Tensors on the CPU, no Ray."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hybrid.algorithms.advantages import compute_advantages
from hybrid.algorithms.kl import kl_estimate
from hybrid.config import RunConfig
from hybrid.data.samples import Sample
from hybrid.roles.objective import PolicyRow, ValueRow
from hybrid.roles.packing import Row


@dataclass
class Forward:
    """What the forward passes gave: one tensor of a float per response token for each row, or None where a pass was not needed."""

    old_logprobs: list[torch.Tensor] | None = None
    ref_logprobs: list[torch.Tensor] | None = None
    values: list[torch.Tensor] | None = None


@dataclass
class Experience:
    """A rollout ready to train on. Lists hold one tensor of T_b floats per row."""

    samples: list[Sample]
    is_fresh: list[bool]
    """False for rows made by older weights, which waited for this step."""
    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]
    rollout_logprobs: list[torch.Tensor]
    forward: Forward
    metrics: dict[str, float | None]


def sampler_bound(cfg: RunConfig) -> float | None:
    """How far trainer and sampler may differ, or None where they must: recorded rollouts come from other weights as soon as a setting
    changes, and top_p, top_k or min_p renormalise the sampler's log-probs over the tokens they keep.
    """
    return None if cfg.distribution_is_cut or not cfg.uses_engines else cfg.algorithm.sampler_kl_bound


def kl_beyond_bound(cfg: RunConfig, kl: float | None) -> str | None:
    """What to say when `kl`, in nats per response, exceeds the profile's bound; None within it or where there is no KL."""
    bound = cfg.algorithm.kl_bound
    if kl is None or bound is None or kl <= bound:
        return None
    return (
        f"The policy has left its reference: KL {kl:.1f} nats, summed over a response and averaged over the batch, exceeds "
        f"algorithm.kl_bound={bound:g}. Lower actor.learning_rate or raise algorithm.kl_coef; where answers are long or the policy is "
        "meant to go far, raise the bound or set algorithm.kl_bound_action=warn."
    )


def make_experience(
    cfg: RunConfig,
    samples: list[Sample],
    forward: Forward,
    *,
    kl_coef: float,
    greedy: list[Sample] = [],  # noqa: B006 (read only)
    version: int | None = None,
) -> Experience:
    """Advantages and returns of scored `samples`, with the metrics that only need what is here.

    greedy: the scored greedy answer to each prompt, in the order of groups. version: of the weights that are trained; samples of
    another waited. None: all samples count as made by them.
    """
    lengths = [len(s.token_ids) for s in samples]
    scores_B = torch.tensor([s.score for s in samples], dtype=torch.float64)
    rewards_B = torch.tensor([s.reward for s in samples], dtype=torch.float32)
    is_fresh = [version is None or s.weight_version == version for s in samples]
    rollout = [torch.tensor(s.logprobs, dtype=torch.float32) for s in samples]
    mask_BT = _pad([torch.ones(n) for n in lengths]).bool()
    penalty_BT, metrics = _kl_penalty(cfg, kl_coef, forward, mask_BT)
    values_BT = None if forward.values is None else _pad(forward.values)
    advantages_BT, returns_BT = compute_advantages(
        cfg.algorithm.advantage,
        scores_B,
        penalty_BT,
        values_BT,
        mask_BT,
        torch.tensor([s.group for s in samples]),
        cfg.algorithm.gamma,
        cfg.algorithm.lam,
        torch.tensor([s.score for s in greedy], dtype=torch.float64) if greedy else None,
    )
    metrics |= {
        "reward/mean": float(rewards_B.mean()),
        "reward/std": float(rewards_B.std(correction=0)),
        "reward/shaped_mean": float(scores_B.mean()),
        "value/explained_variance": None
        if values_BT is None
        else explained_variance(values_BT[mask_BT], returns_BT[mask_BT]),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/truncated_share": sum(s.truncated for s in samples) / len(samples),
        **_sampler_metrics(forward, rollout, is_fresh),
    }
    return Experience(
        samples, is_fresh, _unpad(advantages_BT, lengths), _unpad(returns_BT, lengths), rollout, forward, metrics
    )


def update_batches(cfg: RunConfig, step: int) -> list[list[int]]:
    """Prompt groups of each optimizer step on a rollout: every epoch cuts all groups anew, in an order drawn from (seed, step, epoch)."""
    groups, size = cfg.train.prompts_per_step, cfg.train.prompts_per_step // cfg.updates_per_epoch
    batches = []
    for epoch in range(cfg.train.epochs):
        order = list(range(groups))
        if cfg.updates_per_epoch > 1:
            generator = torch.Generator().manual_seed((cfg.train.seed * 1_000_003 + step) * 1_009 + epoch)
            order = torch.randperm(groups, generator=generator).tolist()
        batches += [order[i : i + size] for i in range(0, groups, size)]
    return batches


def sample_rows(samples: list[Sample]) -> list[Row]:
    """The tokens of `samples` as ranks take them, made once a step. Samples of a group share their prompt's array."""
    prompts: dict[int, np.ndarray] = {}
    for sample in samples:
        if sample.group not in prompts:
            prompts[sample.group] = np.array(sample.prompt.token_ids, np.int32)
    return [Row(sample.group, prompts[sample.group], np.array(sample.token_ids, np.int32)) for sample in samples]


def policy_rows(experience: Experience, rows: list[Row], with_reference: bool) -> list[PolicyRow]:
    """`rows` as the actor trains on them; `with_reference` where the KL to the reference is part of the loss."""
    old, ref = experience.forward.old_logprobs, experience.forward.ref_logprobs
    return [
        PolicyRow(
            row=row,
            advantages=experience.advantages[i],
            rollout_logprobs=experience.rollout_logprobs[i],
            old_logprobs=old[i] if old else None,
            ref_logprobs=ref[i] if ref and with_reference else None,
            is_fresh=experience.is_fresh[i],
        )
        for i, row in enumerate(rows)
    ]


def value_rows(experience: Experience, rows: list[Row]) -> list[ValueRow]:
    """`rows` as the critic trains on them."""
    return [ValueRow(row, experience.returns[i], experience.forward.values[i]) for i, row in enumerate(rows)]


def _kl_penalty(
    cfg: RunConfig, kl_coef: float, forward: Forward, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float | None]]:
    """Token rewards from the KL to the reference (B x T, zero where it is in the loss or off), and its mean as a metric."""
    zeros_BT = torch.zeros(mask_BT.shape)
    if forward.ref_logprobs is None or forward.old_logprobs is None:
        return zeros_BT, {}
    old_BT, ref_BT = _pad(forward.old_logprobs), _pad(forward.ref_logprobs)
    kl_BT = kl_estimate(old_BT, ref_BT, cfg.algorithm.kl_kind)
    metrics = {
        "kl/reference": float(kl_BT[mask_BT].mean()),
        "kl/response": float(kl_estimate(old_BT, ref_BT, "k1").sum(1).mean()),
    }
    if cfg.algorithm.kl_in == "loss":
        return zeros_BT, metrics
    return -kl_coef * kl_BT, metrics


def explained_variance(values_N: torch.Tensor, returns_N: torch.Tensor) -> float | None:
    """`1 - var(return - value) / var(return)`: 1 for a critic that knows the returns, 0 for one that knows their mean; None where all
    returns are equal."""
    variance = float(returns_N.var(correction=0))
    return 1 - float((returns_N - values_N).var(correction=0)) / variance if variance > 0 else None


def _sampler_metrics(forward: Forward, rollout: list[torch.Tensor], is_fresh: list[bool]) -> dict[str, float]:
    """Agreement of sampler and trainer, where the old log-probs are here; else the training step reports it. Only the same weights
    must agree: rows that waited are left out."""
    if forward.old_logprobs is None or not any(is_fresh):
        return {}
    pairs = zip(rollout, forward.old_logprobs, is_fresh, strict=True)
    difference_R = torch.cat([sampler - trainer for sampler, trainer, fresh in pairs if fresh])
    return {
        "kl/sampler": float(difference_R.mean()),
        "sampler/logprob_diff_mean": float(difference_R.abs().mean()),
        "sampler/logprob_diff_max": float(difference_R.abs().max()),
    }


def _pad(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _unpad(values_BT: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Views of `values_BT`: they are for this process. `roles.shards` sends their numbers alone."""
    return [row[:n] for row, n in zip(values_BT, lengths, strict=True)]
