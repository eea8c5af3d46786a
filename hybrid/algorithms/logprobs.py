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
) -> tuple[Tensor, Tensor | None]:
    """float32 log-probs N of `targets_N` under `softmax(head(hidden) / temperature)`, and entropies N (nats) or None.

    Forward and backward hold the logits of one chunk of at most `chunk_tokens` tokens: with more than one chunk, each is recomputed in
    the backward pass. `head` is called as a module, so its hooks run. Under ZeRO-3 a call of `head` is a collective, in forward and
    backward: ranks must make equally many, so give all of them as `min_chunks` the largest `chunk_count` among them. N = 0 is one
    chunk of no tokens, with a graph.
    """
    chunks = max(chunk_count(len(hidden_NH), chunk_tokens), min_chunks)
    recompute = torch.is_grad_enabled() and chunks > 1
    results = []
    for hidden_CH, targets_C in zip(hidden_NH.tensor_split(chunks), targets_N.tensor_split(chunks)):
        args = (hidden_CH, head, targets_C, temperature, with_entropy)
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
    hidden_CH: Tensor, head: Callable[[Tensor], Tensor], targets_C: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits_CV = head(hidden_CH).float()
    if temperature != 1.0:
        logits_CV = logits_CV / temperature
    log_softmax_CV = logits_CV.log_softmax(-1)
    logprobs_C = log_softmax_CV.gather(-1, targets_C[:, None]).squeeze(-1)
    return logprobs_C, -(log_softmax_CV.exp() * log_softmax_CV).sum(-1) if with_entropy else None
