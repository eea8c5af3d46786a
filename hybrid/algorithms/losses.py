"""Losses of the policy and the value function, as shares of a mean over the whole optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.algorithms.kl import clipped_exp
from hybrid.algorithms.masked import zero_masked

POLICY_LOSSES = ("ppo", "gspo", "cispo", "reinforce")
CORRECTIONS = ("none", "tis", "icepop", "seq_mask")
REDUCTIONS = ("token_mean", "sequence_mean", "constant")


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    kind: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    reduction: str,
    max_tokens: int,
    rollout_logprobs: Tensor | None,
    correction: str,
    correction_low: float = 0.5,
    correction_high: float = 2.0,
    normalizer: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss whose gradient trains the policy, and metrics (detached scalars). Tensors are B x T; only `logprobs` gets a gradient.

    With `r = exp(logprob - old)` and the range `[1 - clip_low, 1 + clip_high]`, per token:
    - ppo: `max(-A r, -A clip(r))` (Schulman et al. 2017, arXiv:1707.06347); with dual_clip c > 1, where A < 0, at most `-A c`
      (Ye et al. 2020, arXiv:1912.09729); clip_high above clip_low is DAPO's clip-higher (arXiv:2503.14476);
    - gspo: the same with the mean log-ratio of the row in place of each token's (Zheng et al. 2025, arXiv:2507.18071);
    - cispo: `-stop_gradient(clip(r)) A logprob` (MiniMax-M1 2025, arXiv:2506.13585);
    - reinforce: `-A logprob` (Williams 1992).
    Times the weight of `correction_weights` for `correction`, reduced by `reduce_tokens`.

    rollout_logprobs: the sampler's, None only when correction is "none". normalizer: divisor of the whole optimizer step.
    Metrics, over unmasked tokens, 0 when there are none: clip_fraction (share where the clip takes the gradient away; for cispo, where
    it changes the ratio), ratio_mean, ratio_max, approx_kl (k3 of old against new), and with a correction correction_weight_mean,
    correction_clipped_share (weights that the bounds changed), correction_square_mean and correction_ess (effective sample size, share
    of the tokens: the square of the mean over the mean of squares).
    Raises ValueError for an unknown kind, correction or reduction, and for a correction without rollout_logprobs.
    """
    mask_BT = mask.bool()
    logprobs_BT = zero_masked(logprobs, mask_BT)
    old_BT, advantages_BT = (zero_masked(x.detach(), mask_BT) for x in (old_logprobs, advantages))
    log_ratio_BT = logprobs_BT - old_BT
    if kind == "gspo":
        log_ratio_BT = torch.where(mask_BT, _row_mean(log_ratio_BT, mask_BT)[:, None], 0.0)
    ratio_BT = clipped_exp(log_ratio_BT)
    bounded_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)

    if kind in ("ppo", "gspo"):
        free_BT, clipped_BT = -advantages_BT * ratio_BT, -advantages_BT * bounded_BT
        loss_BT = torch.maximum(free_BT, clipped_BT)
        is_clipped_BT = clipped_BT > free_BT
        if dual_clip is not None:
            ceiling_BT = torch.where(advantages_BT < 0, -advantages_BT * dual_clip, torch.inf)
            is_clipped_BT = is_clipped_BT | (loss_BT > ceiling_BT)
            loss_BT = torch.minimum(loss_BT, ceiling_BT)
    elif kind == "cispo":
        loss_BT = -bounded_BT.detach() * advantages_BT * logprobs_BT
        is_clipped_BT = bounded_BT != ratio_BT
    elif kind == "reinforce":
        loss_BT = -advantages_BT * logprobs_BT
        is_clipped_BT = torch.zeros_like(mask_BT)
    else:
        raise ValueError(f"Unknown policy loss {kind!r}; known: {', '.join(POLICY_LOSSES)}.")

    metrics = _ratio_metrics(ratio_BT.detach(), log_ratio_BT.detach(), is_clipped_BT, mask_BT)
    if correction != "none":
        if rollout_logprobs is None:
            raise ValueError(f"correction={correction} needs rollout_logprobs.")
        weights_BT, raw_BT = correction_weights(
            old_BT, rollout_logprobs, mask_BT, correction, correction_low, correction_high
        )
        loss_BT = loss_BT * weights_BT
        metrics |= _correction_metrics(weights_BT, raw_BT, mask_BT)
    return reduce_tokens(loss_BT, mask_BT, reduction, max_tokens, normalizer), metrics


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float | None,
    normalizer: float | Tensor | None = None,
) -> Tensor:
    """`0.5 max((v - R)^2, (clip(v, old - c, old + c) - R)^2)`, without `clip` the first alone; the mean over unmasked tokens.

    Tensors are B x T; only `values` gets a gradient. normalizer: tokens of the whole optimizer step, in place of those counted here.
    PPO's value clipping as in the implementation of Schulman et al. 2017, arXiv:1707.06347.
    """
    mask_BT = mask.bool()
    values_BT = zero_masked(values, mask_BT)
    old_BT, returns_BT = (zero_masked(x.detach(), mask_BT) for x in (old_values, returns))
    loss_BT = (values_BT - returns_BT).square()
    if clip is not None:
        near_BT = values_BT.clamp(old_BT - clip, old_BT + clip)
        loss_BT = torch.maximum(loss_BT, (near_BT - returns_BT).square())
    return reduce_tokens(0.5 * loss_BT, mask_BT, "token_mean", 0, normalizer)


def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, correction: str, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Weights that correct for a sampler whose log-probs differ from the trainer's, without gradient: (weights, `exp d`), B x T.

    With `d = old - rollout`:
    - tis: `min(exp d, high)` (truncated importance sampling, Yao et al. 2025); `low` plays no part;
    - icepop: `exp d` within [low, high], else 0 (Ling Team 2025, arXiv:2510.18855);
    - seq_mask: `exp d` in rows whose `exp(mean d)` is within [low, high], else 0 for the whole row.
    Raises ValueError for an unknown correction.
    """
    mask_BT = mask.bool()
    difference_BT = (zero_masked(old_logprobs, mask_BT) - zero_masked(rollout_logprobs, mask_BT)).detach()
    raw_BT = clipped_exp(difference_BT)
    if correction == "tis":
        return raw_BT.clamp(max=high), raw_BT
    if correction == "icepop":
        judged_BT = raw_BT
    elif correction == "seq_mask":
        judged_BT = clipped_exp(_row_mean(difference_BT, mask_BT))[:, None]
    else:
        raise ValueError(f"Unknown correction {correction!r}; known: {', '.join(CORRECTIONS)}.")
    return torch.where((judged_BT >= low) & (judged_BT <= high), raw_BT, 0.0), raw_BT


def reduce_tokens(
    values: Tensor, mask: Tensor, reduction: str, max_tokens: int, normalizer: float | Tensor | None = None
) -> Tensor:
    """One number from B x T: its mean over unmasked tokens in one of three senses; a mean over nothing is 0 with the graph kept.

    - token_mean: over all unmasked tokens;
    - sequence_mean: over rows with a token, of each row's token mean;
    - constant: sum over unmasked tokens / (B * max_tokens) (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    normalizer: the divisor counted over the whole optimizer step (tokens; rows with a token; rows * max_tokens), so that the results
    of micro-batches and ranks add up to the loss of the uncut batch. Raises ValueError for an unknown reduction.
    """
    mask_BT = mask.bool()
    values_BT = zero_masked(values, mask_BT)
    if reduction == "token_mean":
        total, count = values_BT.sum(), mask_BT.sum()
    elif reduction == "sequence_mean":
        total, count = _row_mean(values_BT, mask_BT).sum(), mask_BT.any(1).sum()
    elif reduction == "constant":
        total, count = values_BT.sum(), len(mask_BT) * max_tokens
    else:
        raise ValueError(f"Unknown reduction {reduction!r}; known: {', '.join(REDUCTIONS)}.")
    divisor = count if normalizer is None else normalizer
    return total / (divisor + (divisor == 0))  # 0 / 1 for a mean over nothing, wherever the divisor was counted


def _row_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean of each row over its unmasked tokens, 0 for a row without any; masked slots of `values_BT` hold 0."""
    return values_BT.sum(1) / mask_BT.sum(1).clamp(min=1)


def _ratio_metrics(ratio_BT: Tensor, log_ratio_BT: Tensor, is_clipped_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    count = mask_BT.sum().clamp(min=1)
    kept_BT = torch.where(mask_BT, ratio_BT, 0.0)
    return {
        "clip_fraction": (is_clipped_BT & mask_BT).sum() / count,
        "ratio_mean": kept_BT.sum() / count,
        "ratio_max": kept_BT.max() if kept_BT.numel() else kept_BT.sum(),
        "approx_kl": torch.where(mask_BT, ratio_BT - 1 - log_ratio_BT, 0.0).sum() / count,
    }


def _correction_metrics(weights_BT: Tensor, raw_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    count = mask_BT.sum().clamp(min=1)
    kept_BT = torch.where(mask_BT, weights_BT, 0.0)
    total, squares = kept_BT.sum(), kept_BT.square().sum()
    return {
        "correction_weight_mean": total / count,
        "correction_clipped_share": ((weights_BT != raw_BT) & mask_BT).sum() / count,
        "correction_square_mean": squares / count,
        "correction_ess": torch.where(squares > 0, total.square() / (squares * count), 0.0),
    }
