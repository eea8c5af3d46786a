"""C08: what the sampler cannot draw before rollout.min_new_tokens is not part of the trainer's softmax either."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hybrid.algorithms.logprobs import EndMask, chunked_logprobs
from hybrid.data.end_tokens import end_token_ids
from hybrid.roles import attention
from hybrid.roles.models import PolicyModel
from hybrid.roles.packing import Row, pack
from launch.tiny_models import make_tokenizer

VOCABULARY, END = 512, 2
ENDS = EndMask(8, (END,))


def eos90() -> PolicyModel:
    """A model that gives its end token a probability of 0.9 in every state, and all others the same."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        attn_implementation=attention.NAMES["sdpa"],
    )
    hf = LlamaForCausalLM(config)
    hf.lm_head = nn.Linear(8, VOCABULARY)
    with torch.no_grad():
        hf.lm_head.weight.zero_()
        hf.lm_head.bias.zero_()
        hf.lm_head.bias[END] = math.log(9 * (VOCABULARY - 1))
    return PolicyModel(hf).eval()


def test_c08_the_trainer_leaves_the_end_token_out_where_the_sampler_does():
    rows = [Row(0, [5, 6], [*range(10, 19), END]), Row(0, [5, 6], list(range(30, 40)))]
    logprobs, entropies = eos90()(pack(rows, True), 1.0, with_entropy=True, ends=ENDS)
    first, second = logprobs.split(10)
    without, with_end = -math.log(511), math.log(0.1 / 511)
    assert round(without, 4) == -6.2364 and round(with_end, 4) == -8.5390
    assert first.tolist() == pytest.approx([without] * 8 + [with_end, math.log(0.9)], abs=1e-5)
    assert second.tolist() == pytest.approx([without] * 8 + [with_end] * 2, abs=1e-5)
    assert entropies[:8].tolist() == pytest.approx([math.log(511)] * 8, abs=1e-4)
    plain, _ = eos90()(pack(rows, True), 1.0)
    assert plain[:9].tolist() == pytest.approx([with_end] * 9, abs=1e-5)


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 1.0), (torch.float32, 0.01), (torch.bfloat16, 1.0)])
@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_values_and_gradients_are_those_of_the_smaller_softmax(chunk_tokens, temperature, dtype):
    torch.manual_seed(0)
    hidden = (0.05 * torch.randn(10, 6)).to(dtype).requires_grad_()
    head = nn.Linear(6, 37, bias=False, dtype=dtype)
    masked, ids = torch.tensor([True, False] * 5), (2, 5)
    targets = torch.randint(6, 37, (10,))
    weights = torch.randn(10)

    def gradients(logprobs, entropies):
        return torch.autograd.grad((weights * logprobs).sum() + 0.3 * entropies.sum(), [hidden, head.weight])

    logits = nn.functional.linear(hidden, head.weight).float() / temperature
    drawn = torch.ones(10, 37, dtype=torch.bool)
    drawn[masked.nonzero(), torch.tensor(ids)] = False
    logs = logits.masked_fill(~drawn, -math.inf).log_softmax(-1)
    finite = logs.masked_fill(~drawn, 0.0)
    expected = logs.gather(1, targets[:, None])[:, 0], -(finite.exp() * finite * drawn).sum(1)
    found = chunked_logprobs(hidden, head, targets, temperature, chunk_tokens, True, masked_N=masked, masked_ids=ids)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    for got, want in zip((*found, *gradients(*found)), (*expected, *gradients(*expected)), strict=True):
        torch.testing.assert_close(got, want, **tolerance)


def test_a_head_that_gives_back_its_input_keeps_it():
    hidden = torch.randn(4, 37, requires_grad=True)
    before = hidden.detach().clone()
    masked = torch.ones(4, dtype=torch.bool)
    chunked_logprobs(hidden, nn.Identity(), torch.full((4,), 7), 1.0, masked_N=masked, masked_ids=(2,))[
        0
    ].sum().backward()
    assert (hidden == before).all()
    assert (hidden.grad[:, 2] == 0).all() and (hidden.grad[:, 3] != 0).all()


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 3}, (2, 7, 9)),
        ({"eos_token_id": 2}, {}, (2,)),
        ({}, {"eos_token_id": 3}, (2,)),
        (None, {"eos_token_id": 3}, (2, 3)),
        (None, {"eos_token_id": [3, 4]}, (2, 3, 4)),
        (None, {}, (2,)),
    ],
)
def test_end_tokens_are_those_of_tokenizer_and_generation_config(tmp_path, generation, config, expected):
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": None} | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_token_ids(str(tmp_path), AutoTokenizer.from_pretrained(tmp_path)) == expected
