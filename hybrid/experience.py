"""From samples, scores and log-probs to what actor and critic train on. Tensors on the CPU, no Ray."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid.algorithms.advantages import compute_advantages
from hybrid.algorithms.kl import kl_estimate
from hybrid.config import RunConfig
from hybrid.data.batches import Plan
from hybrid.data.samples import Sample


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
    scores_B: torch.Tensor
    advantages: list[torch.Tensor]
    returns: list[torch.Tensor]
    rollout_logprobs: list[torch.Tensor]
    forward: Forward
    metrics: dict[str, float | None]


def sampler_bound(cfg: RunConfig) -> float | None:
    """How far trainer and sampler may differ, or None where they must: recorded rollouts come from other weights as soon as a setting
    changes, and top_p, top_k or min_p renormalise the sampler's log-probs over the tokens they keep.
    """
    rollout = cfg.rollout
    cut = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    return None if cut or not cfg.uses_engines else cfg.algorithm.sampler_kl_bound


def make_experience(cfg: RunConfig, samples: list[Sample], scores: list[float], forward: Forward) -> Experience:
    """Advantages and returns of a rollout, with the metrics that only need what is here."""
    lengths = [len(s.token_ids) for s in samples]
    scores_B = torch.tensor(scores, dtype=torch.float32)
    rollout = [torch.tensor(s.logprobs, dtype=torch.float32) for s in samples]
    mask_BT = _pad([torch.ones(n) for n in lengths]).bool()
    penalty_BT, metrics = _kl_penalty(cfg, forward, mask_BT)
    advantages_BT, returns_BT = compute_advantages(
        cfg.algorithm.advantage,
        scores_B,
        penalty_BT,
        None if forward.values is None else _pad(forward.values),
        mask_BT,
        torch.tensor([s.group for s in samples]),
        cfg.algorithm.gamma,
        cfg.algorithm.lam,
    )
    metrics |= {
        "reward/mean": float(scores_B.mean()),
        "reward/std": float(scores_B.std(correction=0)),
        "response/length_mean": sum(lengths) / len(lengths),
        "response/truncated_share": sum(s.truncated for s in samples) / len(samples),
        "tokens/generated": float(sum(lengths)),
        **_sampler_metrics(forward, rollout),
    }
    return Experience(
        samples, scores_B, _unpad(advantages_BT, lengths), _unpad(returns_BT, lengths), rollout, forward, metrics
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


def shard(plan: Plan, rows: list) -> list[list[list]]:
    """`rows` laid out as `plan` says: by rank, then micro-batch."""
    return [[[rows[i] for i in micro] for micro in rank] for rank in plan]


def unshard(plan: Plan, results: list[list[list]]) -> list:
    """The inverse of `shard`: one result per row, in row order."""
    by_row = {
        index: result
        for rank_plan, rank_results in zip(plan, results, strict=True)
        for micro_plan, micro_results in zip(rank_plan, rank_results, strict=True)
        for index, result in zip(micro_plan, micro_results, strict=True)
    }
    return [by_row[i] for i in range(len(by_row))]


def _kl_penalty(
    cfg: RunConfig, forward: Forward, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float | None]]:
    """Token rewards from the KL to the reference (B x T, zero where it is in the loss or off), and its mean as a metric."""
    zeros_BT = torch.zeros(mask_BT.shape)
    if forward.ref_logprobs is None or forward.old_logprobs is None:
        return zeros_BT, {"kl/reference": None}
    kl_BT = kl_estimate(_pad(forward.old_logprobs), _pad(forward.ref_logprobs), cfg.algorithm.kl_kind)
    metrics = {"kl/reference": float(kl_BT[mask_BT].mean())}
    if cfg.algorithm.kl_in == "loss":
        return zeros_BT, metrics
    return -cfg.algorithm.kl_coef * kl_BT, metrics


def _sampler_metrics(forward: Forward, rollout: list[torch.Tensor]) -> dict[str, float]:
    """Agreement of sampler and trainer, where the old log-probs are here; else the training step reports it."""
    if forward.old_logprobs is None:
        return {}
    difference_R = torch.cat(rollout) - torch.cat(forward.old_logprobs)
    return {
        "kl/sampler": float(difference_R.mean()),
        "sampler/logprob_diff_mean": float(difference_R.abs().mean()),
        "sampler/logprob_diff_max": float(difference_R.abs().max()),
    }


def _pad(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _unpad(values_BT: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return [row[:n] for row, n in zip(values_BT, lengths, strict=True)]
