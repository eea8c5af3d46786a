"""Log-probs and entropies of tokens without ever holding the logits of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 256 * 2**20
"""Of logits in the model's dtype, to hold at a time; on CUDA the backward pass of a bf16 chunk takes two float32 tables besides. Fewer cost
time: of more than one chunk each is computed twice."""
CACHED_ELEMENTS = 2**20
"""float32 numbers that a core's cache holds with room to spare."""
MASKED = -1e30
"""Logit of a token that cannot be drawn: no probability in any dtype, and finite after division by any temperature, so 0 times it is 0."""


@dataclass(frozen=True)
class EndMask:
    """The sampler draws none of `token_ids` among the first `min_new_tokens` of a response: there they are not part of the softmax."""

    min_new_tokens: int
    token_ids: tuple[int, ...]


def chunked_logprobs(
    hidden_NH: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_N: Tensor,
    temperature: float,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
    min_chunks: int = 1,
    entropy_gradient: bool = True,
    masked_N: Tensor | None = None,
    masked_ids: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor | None]:
    """float32 log-probs N of `targets_N` under `softmax(head(hidden) / temperature)`, and entropies N (nats) or None.

    Forward and backward hold the logits of one chunk of at most `chunk_tokens` tokens: with more than one chunk, each is recomputed in
    the backward pass. `head` is called as a module, so its hooks run. Under ZeRO-3 a call of `head` is a collective, in forward and
    backward: ranks must make equally many, so give all of them as `min_chunks` the largest `chunk_count` among them. N = 0 is one
    chunk of no tokens, with a graph. Entropies without `entropy_gradient` are constants, and cheaper. Where `masked_N` is True the softmax
    leaves `masked_ids` out; a target must not be one of them there.
    """
    chunks = max(chunk_count(len(hidden_NH), chunk_tokens), min_chunks)
    recompute = torch.is_grad_enabled() and chunks > 1
    results = []
    masked = [None] * chunks if masked_N is None else masked_N.tensor_split(chunks)
    ids_K = torch.tensor(masked_ids, dtype=torch.long, device=hidden_NH.device)
    for hidden_CH, targets_C, masked_C in zip(hidden_NH.tensor_split(chunks), targets_N.tensor_split(chunks), masked):
        left_out = None if masked_C is None else (masked_C, ids_K)
        args = (hidden_CH, head, targets_C, temperature, with_entropy, entropy_gradient, left_out, [])
        if recompute:
            results.append(checkpoint(_chunk_logprobs, *args, use_reentrant=False, preserve_rng_state=False))
        else:
            results.append(_chunk_logprobs(*args))
    logprobs, entropies = zip(*results)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def chunk_count(tokens: int, chunk_tokens: int = 1024) -> int:
    """How many chunks, and so calls of the head, `tokens` tokens make; at least 1."""
    return max(1, -(-tokens // chunk_tokens))


def tokens_per_chunk(vocabulary: int, element_bytes: int) -> int:
    """Tokens whose logits, of so many bytes each, make a chunk of CHUNK_BYTES; at least 1."""
    return max(1, CHUNK_BYTES // (vocabulary * element_bytes))


def _chunk_logprobs(
    hidden_CH: Tensor,
    head: Callable[[Tensor], Tensor],
    targets_C: Tensor,
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool,
    left_out: tuple[Tensor, Tensor] | None,
    sums: list[tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    logits_CV = head(hidden_CH)
    may_overwrite = logits_CV.untyped_storage()._cdata != hidden_CH.untyped_storage()._cdata
    options = (temperature, with_entropy, entropy_gradient, may_overwrite, left_out, sums)
    return _TokenLogprobs.apply(logits_CV, targets_C, *options)


class _TokenLogprobs(torch.autograd.Function):
    """Log-probs C of `targets_C` and entropies C from logits C x V, in one table, of logits and then of their gradient.

    Autograd would keep a table of log-softmax, one of softmax and one of their products. Here forward keeps the logits as they came
    and a log-sum-exp per token; backward fills the gradient, `(onehot - p) g / temperature` for a log-prob and
    `-p (log p + entropy) g / temperature` for an entropy. `may_overwrite`: into the memory of the logits, which are then good for one
    backward pass only; autograd refuses a second. `sums` keeps what is summed over the vocabulary, so that a recomputation in the
    backward pass needs the logits only.
    """

    @staticmethod
    def forward(ctx, logits_CV, targets_C, temperature, with_entropy, entropy_gradient, may_overwrite, left_out, sums):
        if left_out is not None:
            logits_CV = _without(logits_CV if may_overwrite else logits_CV.clone(), *left_out)
        if not sums:
            sums.append(_sums(logits_CV, temperature, with_entropy))
        lse_C, entropies_C = sums[0]
        entropies_C = (
            None if entropies_C is None else entropies_C.clone()
        )  # an output gets a graph, which `sums` would keep
        picked_C = logits_CV.gather(-1, targets_C[:, None]).squeeze(-1)
        if with_entropy and not entropy_gradient:
            ctx.mark_non_differentiable(entropies_C)
        ctx.save_for_backward(logits_CV, targets_C, lse_C, entropies_C if entropy_gradient else None)
        ctx.temperature, ctx.may_overwrite = temperature, may_overwrite
        return _scaled(picked_C, temperature) - lse_C, entropies_C

    @staticmethod
    def backward(ctx, grad_logprobs_C, grad_entropies_C):
        logits_CV, targets_C, lse_C, entropies_C = ctx.saved_tensors
        grad_CV = logits_CV if ctx.may_overwrite else torch.empty_like(logits_CV)
        of_logprobs_C1 = grad_logprobs_C[:, None] / ctx.temperature
        for block in row_blocks(logits_CV, logits_CV.device.type):
            log_probs_BV = _scaled(logits_CV[block], ctx.temperature) - lse_C[block][:, None]
            factor_B = -of_logprobs_C1[block]
            if entropies_C is not None:
                of_entropies_B1 = grad_entropies_C[block][:, None] / ctx.temperature
                factor_B = factor_B - (log_probs_BV + entropies_C[block][:, None]).mul_(of_entropies_B1)
            grad_CV[block] = log_probs_BV.exp_().mul_(factor_B)
        rows_C = torch.arange(len(grad_CV), device=grad_CV.device)
        grad_CV[rows_C, targets_C] += of_logprobs_C1.squeeze(-1).to(grad_CV.dtype)  # scatter_add_ is slow on CPU
        return grad_CV, None, None, None, None, None, None, None


def _without(logits_CV: Tensor, masked_C: Tensor, ids_K: Tensor) -> Tensor:
    """`logits_CV`, changed in place: on masked rows the tokens `ids_K` have no probability, so their gradient is 0."""
    logits_CV[:, ids_K] = logits_CV[:, ids_K].masked_fill(masked_C[:, None], MASKED)
    return logits_CV


def _sums(logits_CV: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """Log-sum-exp C and entropies C, or None, of `softmax(logits / temperature)`."""
    lse_C = logits_CV.new_empty(len(logits_CV), dtype=torch.float32)
    entropies_C = torch.empty_like(lse_C) if with_entropy else None
    for block in row_blocks(logits_CV, logits_CV.device.type):
        scaled_BV = _scaled(logits_CV[block], temperature)
        lse_C[block] = lse_B = scaled_BV.logsumexp(-1)
        if with_entropy:
            probs_BV = (scaled_BV - lse_B[:, None]).exp_()
            total_B = probs_BV.sum(-1)  # 1 but for rounding, which counts times the size of the logits
            entropies_C[block] = total_B * lse_B - probs_BV.mul_(scaled_BV).sum(-1)
    return lse_C, entropies_C


def row_blocks(logits_CV: Tensor, device: str) -> list[slice]:
    """Slices of rows, all computed alike. On CPU so few rows that what is computed from them stays in the cache: new memory costs more
    there than the arithmetic on it. On CUDA all rows."""
    rows, vocabulary = logits_CV.shape
    size = max(1, CACHED_ELEMENTS // vocabulary) if device == "cpu" else max(1, rows)
    return [slice(start, start + size) for start in range(0, rows, size)]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """`logits / temperature` in float32, the same tensor where that changes nothing."""
    logits = logits.float()
    return logits / temperature if temperature != 1.0 else logits
