"""Log-probs and entropies of tokens without ever holding the logits of all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def chunked_logprobs(
    hidden_NH: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperature: float,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
    min_chunks: int = 1,
    entropy_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """float32 log-probs N of `targets_N` under `softmax(head(hidden) / temperature)`, and entropies N (nats) or None.

    Forward and backward hold the logits of one chunk of at most `chunk_tokens` tokens: with more than one chunk, each is recomputed in
    the backward pass. `head` is called as a module, so its hooks run. Under ZeRO-3 a call of `head` is a collective, in forward and
    backward: ranks must make equally many, so give all of them as `min_chunks` the largest `chunk_count` among them. N = 0 is one
    chunk of no tokens, with a graph. Entropies without `entropy_gradient` are constants, and cheaper.
    """
    chunks = max(chunk_count(len(hidden_NH), chunk_tokens), min_chunks)
    recompute = torch.is_grad_enabled() and chunks > 1
    results = []
    for hidden_CH, targets_C in zip(hidden_NH.tensor_split(chunks), targets_N.tensor_split(chunks)):
        args = (hidden_CH, head, targets_C, temperature, with_entropy, entropy_gradient)
        if recompute:
            results.append(checkpoint(_chunk_logprobs, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(_chunk_logprobs(*args))
    logprobs, entropies = zip(*results)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def chunk_count(tokens: int, chunk_tokens: int = 1024) -> int:
    """How many chunks, and so calls of the head, `tokens` tokens make; at least 1."""
    return max(1, -(-tokens // chunk_tokens))


def _chunk_logprobs(
    hidden_CH: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_C: Tensor,
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    return _TokenLogprobs.apply(head(hidden_CH), targets_C, temperature, with_entropy, entropy_gradient)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probs C of `targets_C` and entropies C from logits C x V, with as few passes over the logits as there can be.

    Autograd would keep a table of log-softmax, one of softmax and one of their products. Here forward keeps the logits as they came
    and a log-sum-exp per token; backward fills one table: the gradient is `(onehot - p) g / temperature` for a log-prob and
    `-p (log p + entropy) g / temperature` for an entropy.
    """

    @staticmethod
    def forward(ctx, logits_CV, targets_C, temperature, with_entropy, entropy_gradient):
        scaled_CV = _scaled(logits_CV, temperature)
        lse_C = scaled_CV.logsumexp(-1)
        logprobs_C = scaled_CV.gather(-1, targets_C[:, None]).squeeze(-1) - lse_C
        entropies_C = None
        if with_entropy:
            # E[z] under the softmax, from one more table; a product with a table of p would be a third.
            probs_CV = (scaled_CV - lse_C[:, None]).exp_()
            entropies_C = lse_C - torch.linalg.vecdot(probs_CV, scaled_CV)
            del probs_CV
            if not entropy_gradient:
                ctx.mark_non_differentiable(entropies_C)
        ctx.save_for_backward(logits_CV, targets_C, lse_C, entropies_C if entropy_gradient else None)
        ctx.temperature = temperature
        return logprobs_C, entropies_C

    @staticmethod
    def backward(ctx, grad_logprobs_C, grad_entropies_C):
        logits_CV, targets_C, lse_C, entropies_C = ctx.saved_tensors
        log_probs_CV = _scaled(logits_CV, ctx.temperature) - lse_C[:, None]
        if entropies_C is None or grad_entropies_C is None:
            grad_CV = log_probs_CV.exp_().mul_(-grad_logprobs_C[:, None])
        else:
            factor_CV = (
                (log_probs_CV + entropies_C[:, None]).mul_(grad_entropies_C[:, None]).add_(grad_logprobs_C[:, None])
            )
            grad_CV = log_probs_CV.exp_().mul_(factor_CV).neg_()
        grad_CV.scatter_add_(-1, targets_C[:, None], grad_logprobs_C[:, None])
        if ctx.temperature != 1.0:
            grad_CV /= ctx.temperature
        return grad_CV.to(logits_CV.dtype), None, None, None, None


def _scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    """`logits / temperature` in float32, the same tensor where that changes nothing."""
    logits_CV = logits_CV.float()
    return logits_CV / temperature if temperature != 1.0 else logits_CV
