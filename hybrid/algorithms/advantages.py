"""From scores, KL penalties and values to advantages and returns."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.algorithms.masked import zero_masked

ESTIMATORS = ("gae", "reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo", "maxrl", "opo", "remax")
_WHITENED = ("gae", "reinforce", "reinforce_baseline")


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438).

    `d_t = r_t + gamma V_next - V_t`, `A_t = d_t + gamma lam A_next`, where next is the next unmasked token, and 0 after the last:
    a response with tool output inside equals the same response without. Returns (advantages, returns = A + V), B x T, 0 where masked.
    """
    mask_BT = mask.bool()
    rewards_BT, values_BT = zero_masked(rewards, mask_BT), zero_masked(values, mask_BT)
    deltas_BT = rewards_BT + gamma * _next_unmasked(values_BT, mask_BT) - values_BT
    advantages_BT = _discounted_sum(deltas_BT, mask_BT, gamma * lam)
    return advantages_BT, advantages_BT + values_BT


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """`G_t = r_t + gamma G_next` over unmasked tokens, B x T, 0 where masked."""
    mask_BT = mask.bool()
    return _discounted_sum(zero_masked(rewards, mask_BT), mask_BT, gamma)


def compute_advantages(
    estimator: str,
    scores: Tensor,
    kl_penalty: Tensor,
    values: Tensor | None,
    mask: Tensor,
    groups: Tensor,
    gamma: float,
    lam: float,
    greedy_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a whole rollout, both B x T, 0 where masked; the returns are those before whitening.

    estimator: one of `ESTIMATORS`. scores B: one per response. kl_penalty B x T: the KL term as a reward, already negated and scaled.
    values B x T: only for gae. groups B: the prompt of each row, 0..G-1, in any order, groups of any size. greedy_scores G: only for
    remax, the score of the greedy answer to each prompt. lam: only for gae. gamma: only for gae and reinforce, 1 for the others.

    The score, compared with its group by `_group_transform` where the estimator says so, is paid on the last unmasked token; then
    - gae: `gae`, advantages whitened over all unmasked tokens of the batch;
    - reinforce (REINFORCE++, Hu et al. 2025, arXiv:2501.03262): discounted returns, whitened;
    - reinforce_baseline (the same paper): undiscounted returns, whitened;
    - the others: undiscounted returns as they are.
    Raises ValueError for an unknown estimator, gae without values, remax without greedy_scores.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"Unknown advantage estimator {estimator!r}; known: {', '.join(ESTIMATORS)}.")
    mask_BT = mask.bool()
    if estimator not in ("gae", "reinforce"):
        scores = _group_transform(estimator, scores, mask_BT.sum(1), groups.long(), greedy_scores)
        gamma = 1.0
    rewards_BT = zero_masked(kl_penalty, mask_BT)
    rewards_BT = torch.where(_is_last(mask_BT), rewards_BT + scores.to(rewards_BT.dtype)[:, None], rewards_BT)

    if estimator == "gae":
        if values is None:
            raise ValueError("The estimator gae needs values.")
        advantages_BT, returns_BT = gae(rewards_BT, values, mask_BT, gamma, lam)
    else:
        advantages_BT = returns_BT = discounted_returns(rewards_BT, mask_BT, gamma)
    return (whiten(advantages_BT, mask_BT) if estimator in _WHITENED else advantages_BT), returns_BT


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`(x - mean) / sqrt(max(var, 1e-8))` over the unmasked tokens of the batch, biased variance; 0 where masked."""
    mask_BT = mask.bool()
    count = mask_BT.sum().clamp(min=1)
    values_BT = zero_masked(values, mask_BT)
    centred_BT = zero_masked(values_BT - values_BT.sum() / count, mask_BT)
    variance = centred_BT.square().sum() / count
    return centred_BT / variance.clamp(min=1e-8).sqrt()


def _group_transform(
    estimator: str, scores_B: Tensor, lengths_B: Tensor, groups_B: Tensor, greedy_scores_G: Tensor | None
) -> Tensor:
    """Each score beside the others of its prompt, float64. A group of one carries no signal: 0 (remax excepted).

    - rloo: minus the mean of the others (Ahmadian et al. 2024, arXiv:2402.14740)
    - reinforce_baseline, dr_grpo: minus the mean (Liu et al. 2025, arXiv:2503.20783)
    - group_norm: minus the mean, over std + 1e-6, n - 1 in the std (GRPO: Shao et al. 2024, arXiv:2402.03300)
    - maxrl: minus the mean, over the mean; 0 where the mean is not positive beyond rounding (Tajwar et al. 2026, maximum-likelihood RL)
    - opo: minus the mean weighted by length (Hao et al. 2025, arXiv:2505.23585)
    - remax: minus the score of the greedy answer (Li et al. 2023, arXiv:2310.10505)
    """
    precision = torch.finfo(scores_B.dtype).eps if scores_B.is_floating_point() else 0.0
    scores_B = scores_B.double()
    if estimator == "remax":
        if greedy_scores_G is None:
            raise ValueError("The estimator remax needs greedy_scores, one per prompt.")
        return scores_B - greedy_scores_G.double()[groups_B]

    unique_G, index_B = groups_B.unique(return_inverse=True)
    zeros_G = scores_B.new_zeros(len(unique_G))

    def group_sum(values_B: Tensor) -> Tensor:
        return zeros_G.index_add(0, index_B, values_B)[index_B]

    size_B = group_sum(torch.ones_like(scores_B))
    total_B = group_sum(scores_B)
    centred_B = scores_B - total_B / size_B
    if estimator == "rloo":
        result_B = scores_B - (total_B - scores_B) / (size_B - 1).clamp(min=1)
    elif estimator == "group_norm":
        std_B = (group_sum(centred_B.square()) / (size_B - 1).clamp(min=1)).sqrt()
        # Equal scores are told by comparing them: rounding leaves their std a little above 0, and the quotient would be noise of size 1.
        highest_B = zeros_G.scatter_reduce(0, index_B, scores_B, "amax", include_self=False)[index_B]
        lowest_B = zeros_G.scatter_reduce(0, index_B, scores_B, "amin", include_self=False)[index_B]
        result_B = torch.where(highest_B == lowest_B, 0.0, centred_B / (std_B + 1e-6))
    elif estimator == "maxrl":
        # A sum that is 0 but for rounding is no positive mean: the quotient would be noise of any size.
        noise_B = group_sum(scores_B.abs()) * precision
        result_B = torch.where(total_B > noise_B, centred_B * size_B / total_B, 0.0)
    elif estimator == "opo":
        tokens_B = group_sum(lengths_B.double())
        result_B = scores_B - group_sum(lengths_B * scores_B) / tokens_B.clamp(min=1)
    else:
        result_B = centred_B
    return torch.where(size_B > 1, result_B, 0.0)


def _is_last(mask_BT: Tensor) -> Tensor:
    """True on the last unmasked token of each row."""
    unmasked_from_here_BT = mask_BT.flip(1).cumsum(1).flip(1)
    return mask_BT & (unmasked_from_here_BT == 1)


def _next_unmasked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """For each slot the value of the next unmasked token to its right, 0 where there is none."""
    upcoming_B = values_BT.new_zeros(len(values_BT))
    result = []
    for value_B, mask_B in zip(reversed(values_BT.unbind(1)), reversed(mask_BT.unbind(1))):
        result.append(upcoming_B)
        upcoming_B = torch.where(mask_B, value_B, upcoming_B)
    return torch.stack(result[::-1], dim=1) if result else values_BT


def _discounted_sum(values_BT: Tensor, mask_BT: Tensor, discount: float) -> Tensor:
    """`S_t = x_t + discount S_next` over unmasked tokens from right to left, 0 where masked."""
    following_B = values_BT.new_zeros(len(values_BT))
    result = []
    for value_B, mask_B in zip(reversed(values_BT.unbind(1)), reversed(mask_BT.unbind(1))):
        following_B = torch.where(mask_B, value_B + discount * following_B, following_B)
        result.append(following_B)
    return zero_masked(torch.stack(result[::-1], dim=1), mask_BT) if result else values_BT
