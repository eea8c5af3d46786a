"""A micro-batch's share of the actor's loss, and the figures of a step. Tensors only: runs in one process as on many ranks."""

from __future__ import annotations

import torch

from hybrid.algorithms.kl import kl_estimate
from hybrid.algorithms.losses import policy_loss, reduce_tokens
from hybrid.roles.objective import PolicyObjective, PolicyRow
from hybrid.roles.packing import PackedBatch, column, lengths_mask, to_rows
from hybrid.roles.reduction import Totals

BY_TOKEN = {
    "clip_fraction": "policy/clip_fraction",
    "ratio_mean": "policy/ratio_mean",
    "approx_kl": "policy/approx_kl",
    "correction_weight_mean": "correction/weight_mean",
    "correction_clipped_share": "correction/clipped_share",
    "correction_square_mean": None,
}
"""Means over tokens that `policy_loss` gives of a micro-batch, and the step's metric that each becomes."""


def policy_objective(
    rows: list[PolicyRow],
    batch: PackedBatch,
    logprobs_R: torch.Tensor,
    entropies_R: torch.Tensor | None,
    objective: PolicyObjective,
    totals: Totals,
) -> torch.Tensor:
    """Policy loss + kl_coef * KL - entropy_coef * entropy of `rows`, each reduced alike over the whole step; figures go to `totals`."""
    lengths = batch.row_lengths
    width = max(lengths)
    mask_BT = lengths_mask(lengths, width, logprobs_R.device)
    logprobs_BT = to_rows(logprobs_R, lengths, width)
    rollout_BT = column(rows, "rollout_logprobs", batch)
    old_BT = logprobs_BT.detach() if rows[0].old_logprobs is None else column(rows, "old_logprobs", batch)

    def reduce(values_BT: torch.Tensor) -> torch.Tensor:
        return reduce_tokens(values_BT, mask_BT, objective.reduction, objective.max_tokens, objective.normalizer)

    loss, metrics = policy_loss(
        logprobs_BT,
        old_BT,
        column(rows, "advantages", batch),
        mask_BT,
        kind=objective.kind,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        reduction=objective.reduction,
        max_tokens=objective.max_tokens,
        rollout_logprobs=rollout_BT,
        correction=objective.correction,
        correction_low=objective.correction_low,
        correction_high=objective.correction_high,
        normalizer=objective.normalizer,
    )
    tokens = sum(lengths)
    for name in BY_TOKEN:
        if name in metrics:
            totals.add(name, metrics[name][None], weight=tokens)
    totals.add("ratio_max", metrics["ratio_max"][None])
    if rows[0].ref_logprobs is not None:
        ref_BT = column(rows, "ref_logprobs", batch)
        kl_BT = kl_estimate(logprobs_BT, ref_BT, objective.kl_kind)
        loss = loss + objective.kl_coef * reduce(kl_BT)
        totals.add("kl", kl_BT.detach()[mask_BT])
        totals.add("kl_response", kl_estimate(logprobs_BT.detach(), ref_BT, "k1").sum(1))
    if entropies_R is not None:
        if objective.entropy_coef:
            loss = loss - objective.entropy_coef * reduce(to_rows(entropies_R, lengths, width))
        totals.add("entropy", entropies_R.detach())
    totals.add("loss", loss.detach()[None])
    if rows[0].old_logprobs is None:
        fresh_B = torch.tensor([row.is_fresh for row in rows], device=mask_BT.device)
        difference_R = (rollout_BT - old_BT)[mask_BT & fresh_B[:, None]]
        totals.add("sampler_kl", difference_R)
        totals.add("sampler_diff", difference_R.abs())
    return loss


def step_metrics(totals: Totals) -> dict[str, float | None]:
    """The actor's metrics of a step from its united totals."""
    weight, square = totals.mean("correction_weight_mean"), totals.mean("correction_square_mean")
    return {
        "loss/policy": totals.sum("loss"),
        **{metric: totals.mean(name) for name, metric in BY_TOKEN.items() if metric},
        "policy/ratio_max": totals.maximum("ratio_max"),
        "policy/entropy": totals.mean("entropy"),
        "correction/ess": weight**2 / square if weight is not None and square else None,
        "kl/reference": totals.mean("kl"),
        "kl/response": totals.mean("kl_response"),
        "kl/sampler": totals.mean("sampler_kl"),
        "sampler/logprob_diff_mean": totals.mean("sampler_diff"),
        "sampler/logprob_diff_max": totals.maximum("sampler_diff"),
    }
