"""Chunked log-probs: equal to the plain computation, and never more than a chunk of logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybrid.algorithms.logprobs import chunk_count, chunked_logprobs

HIDDEN, VOCABULARY = 6, 37


class CountingHead(nn.Linear):
    """A head that remembers how many tokens each call had."""

    def __init__(self, dtype=torch.float32):
        super().__init__(HIDDEN, VOCABULARY, bias=False, dtype=dtype)
        self.calls: list[int] = []

    def forward(self, hidden):
        self.calls.append(len(hidden))
        return super().forward(hidden)


def make(tokens, dtype=torch.float32):
    torch.manual_seed(0)
    head = CountingHead(dtype)
    return torch.randn(tokens, HIDDEN, dtype=dtype, requires_grad=True), head, torch.randint(VOCABULARY, (tokens,))


def plain(hidden, head, targets, temperature):
    logits = nn.functional.linear(hidden, head.weight) / temperature
    distribution = torch.distributions.Categorical(logits=logits, validate_args=False)
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tokens", [1, 8, 21])
@pytest.mark.parametrize("chunk_tokens", [1, 8, 100])
def test_equal_to_the_plain_computation(tokens, temperature, chunk_tokens):
    hidden, head, targets = make(tokens)
    weights = torch.randn(tokens)

    def gradients(logprobs, entropies):
        loss = (weights * logprobs).sum() + 0.3 * entropies.sum()
        return torch.autograd.grad(loss, [hidden, head.weight])

    expected = plain(hidden, head, targets, temperature)
    result = chunked_logprobs(hidden, head, targets, temperature, chunk_tokens, with_entropy=True)
    for got, want in zip((*result, *gradients(*result)), (*expected, *gradients(*expected))):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_no_call_sees_more_than_a_chunk_and_one_chunk_is_not_recomputed():
    hidden, head, targets = make(20)
    logprobs, entropies = chunked_logprobs(hidden, head, targets, 1.0, chunk_tokens=8)
    assert entropies is None
    assert len(head.calls) == 3 and max(head.calls) <= 8
    logprobs.sum().backward()
    assert len(head.calls) == 6 and max(head.calls) <= 8
    head.calls.clear()
    chunked_logprobs(hidden, head, targets, 1.0, chunk_tokens=20)[0].sum().backward()
    assert head.calls == [20]


def test_logits_are_not_kept_between_forward_and_backward():
    hidden, head, targets = make(64)
    kept = []

    def pack(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunked_logprobs(hidden, head, targets, 1.0, chunk_tokens=16, with_entropy=True)
    assert max(kept, default=0) < 16 * VOCABULARY


def test_without_grad_nothing_is_recorded():
    hidden, head, targets = make(20)
    with torch.no_grad():
        logprobs, _ = chunked_logprobs(hidden, head, targets, 1.0, chunk_tokens=8)
    assert not logprobs.requires_grad
    torch.testing.assert_close(logprobs, plain(hidden, head, targets, 1.0)[0].detach())


@pytest.mark.parametrize("min_chunks", [1, 3])
def test_no_tokens_keep_the_graph(min_chunks):
    hidden, head, targets = make(0)
    logprobs, entropies = chunked_logprobs(hidden, head, targets, 1.0, with_entropy=True, min_chunks=min_chunks)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert (head.weight.grad == 0).all()
    assert hidden.grad.shape == (0, HIDDEN)


@pytest.mark.parametrize("tokens", [0, 2, 20])
def test_ranks_with_fewer_tokens_call_the_head_as_often(tokens):
    hidden, head, targets = make(tokens)
    logprobs, _ = chunked_logprobs(hidden, head, targets, 1.0, chunk_tokens=8, min_chunks=5)
    logprobs.sum().backward()
    assert len(head.calls) == 10
    torch.testing.assert_close(logprobs, plain(hidden, head, targets, 1.0)[0])


def test_bfloat16_heads_are_normalised_in_float32():
    hidden, head, targets = make(16, torch.bfloat16)
    logprobs, _ = chunked_logprobs(hidden, head, targets, 0.9, chunk_tokens=4)
    expected = (head(hidden).float() / 0.9).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected)
    logprobs.sum().backward()
    assert hidden.grad.isfinite().all()


def test_a_chunk_that_was_overwritten_refuses_a_second_gradient():
    hidden, head, targets = make(20)
    loss = chunked_logprobs(hidden, head, targets, 1.0)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_a_head_that_passes_on_what_it_gets_leaves_it_as_it_was():
    logits = torch.randn(20, VOCABULARY, requires_grad=True)
    before = logits.detach().clone()
    chunked_logprobs(logits, nn.Identity(), torch.zeros(20, dtype=torch.long), 1.0)[0].sum().backward()
    assert torch.equal(logits.detach(), before)


def test_chunk_count():
    assert [chunk_count(n, 8) for n in (0, 1, 8, 9, 17)] == [1, 1, 1, 2, 3]


def test_entropies_of_large_logits_are_as_exact_as_float32_allows():
    torch.manual_seed(0)
    logits = torch.randn(64, VOCABULARY) * 20 + 200
    _, entropies = chunked_logprobs(logits, nn.Identity(), torch.zeros(64, dtype=torch.long), 1.0, with_entropy=True)
    exact = torch.distributions.Categorical(logits=logits.double()).entropy()
    torch.testing.assert_close(entropies.double(), exact, rtol=0, atol=1e-4)
