"""How far the policy is from its reference, and the coefficient that follows it."""

from __future__ import annotations

import torch
from torch import Tensor

EXPONENT_LIMIT = 20.0
"""Exponents are clipped to +-20 everywhere: e^20 = 4.9e8 says "far off" as well as infinity does and stays finite in float32."""


def clipped_exp(exponent: Tensor) -> Tensor:
    """`exp(clip(x, -20, 20))`; no gradient where clipped."""
    return exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the log-probs of sampled tokens, any shape.

    With `d = logprob - ref_logprob`: k1 `d`, k2 `d^2 / 2`, k3 `exp(-d) - 1 + d` (Schulman 2020, "Approximating KL divergence").
    NaN, without a gradient, where `d` is not finite; there is no mask here, so that a mask applied afterwards is in time.
    Raises ValueError for an unknown kind.
    """
    difference = logprobs - ref_logprobs
    finite = difference.isfinite()
    difference = torch.where(finite, difference, 0.0)
    if kind == "k1":
        estimate = difference
    elif kind == "k2":
        estimate = difference.square() / 2
    elif kind == "k3":
        estimate = clipped_exp(-difference) - 1 + difference
    else:
        raise ValueError(f"Unknown KL estimate {kind!r}; known: k1, k2, k3.")
    return torch.where(finite, estimate, torch.nan)


def adaptive_kl(coef: float, target: float, horizon: float, current: float, samples: int) -> float:
    """The next KL coefficient: `coef * (1 + clip(current / target - 1, -0.2, 0.2) * samples / horizon)`.

    target and current: KL in nats, measured alike; horizon: samples over which the coefficient may move by 20 %; samples: those seen
    since the last call. Ziegler et al. 2019, arXiv:1909.08593.
    """
    error = min(max(current / target - 1, -0.2), 0.2)
    return coef * (1 + error * samples / horizon)
