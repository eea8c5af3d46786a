"""The arguments of torch's variable-length kernel, with a reference in its place: packed attention and its gradient stay the same."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoConfig

from hybrid.data.batches import Lengths
from hybrid.errors import ConfigError
from hybrid.planning.flash import backward_bytes
from hybrid.planning.passes import packed_pass
from hybrid.roles import attention, varlen
from hybrid.roles.models import ModelOptions, load_policy
from hybrid.roles.packing import Row, pack
from hybrid.roles.reach import Reach
from hybrid.roles.varlen_check import CASES, difference
from launch.tiny_models import make_tiny_llama
from tests.varlen_reference import varlen_reference

ANY = (torch.float64, torch.float32, *varlen.DTYPES)


@pytest.fixture
def calls(monkeypatch):
    """Arguments of each call of the kernel, for which the reference stands; it takes any type."""
    made = []

    def kernel(*args, **kwargs):
        inspect.signature(varlen_attn).bind(*args, **kwargs)
        made.append((args, kwargs))
        return varlen_reference(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "DTYPES", ANY)
    return made


class Module(torch.nn.Module):
    """Stands for a layer."""


def both(rows, reach, heads=4, kv_heads=2, size=16, value_size=16, **arguments):
    """(result, gradients of queries, keys and values) with scaled_dot_product_attention, and with the kernel."""
    segments = pack(rows, True).segments
    tokens = sum(segment.length for segment in segments)
    generator = torch.Generator().manual_seed(0)
    found = []
    shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size))
    given = [torch.randn(1, n, tokens, d, dtype=torch.float64, generator=generator) for n, d in shapes]
    for name in attention.NAMES.values():
        inputs = [t.clone().requires_grad_() for t in given]
        layout = attention.layout(name, segments, torch.device("cpu"))
        out, _ = attention.packed_attention(Module(), *inputs, reach, **layout, **arguments)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
        assert out.is_contiguous()
        found.append([out.detach(), *(t.grad for t in inputs)])
    return found


def row(group, prompt, response):
    return Row(group, [1] * prompt, [2] * response)


SHARED = [
    row(0, 5, 9),
    row(0, 5, 1),
    row(0, 5, 3),
    row(1, 2, 7),
    row(2, 12, 1),
    row(3, 1, 2),
    row(3, 1, 4),
    row(4, 20, 600),
    row(4, 20, 8),
]


@pytest.mark.parametrize("rows", [SHARED, SHARED[3:5], SHARED[:1]], ids=["shared", "one response each", "one"])
@pytest.mark.parametrize("reach", [None, Reach(1), Reach(4), Reach(17), Reach(10_000)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_c13_one_call_equals_a_call_per_response(calls, rows, reach, heads, scaling):
    ours, theirs = both(rows, reach, *heads, scaling=scaling)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)
    assert len(calls) == 1


def test_values_may_be_smaller_than_keys(calls):
    for mine, wanted in zip(*both(SHARED, Reach(6), size=24, value_size=16), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)
    assert len(calls) == 1


def test_the_sequences_are_prompts_and_responses_in_the_order_of_the_row():
    segments = pack([row(0, 3, 3), row(0, 3, 1), row(0, 3, 2), row(1, 4, 2)], True).segments
    pieces = varlen.pieces_of(segments, "cpu")
    assert (
        pieces.ends_q.tolist() == [0, 3, 5, 6, 11] and pieces.ends_q.dtype == torch.int32
    )  # the second response has no token fed
    assert pieces.ends_k.tolist() == [0, 3, 8, 12, 17] and pieces.ends_k.dtype == torch.int32
    assert (pieces.longest_q, pieces.longest_k) == (5, 5)
    assert pieces.keys_K.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9, 10]


def test_keys_are_not_copied_where_no_prompt_is_shared():
    pieces = varlen.pieces_of(pack(SHARED, False).segments, "cpu")
    assert pieces.keys_K is None and torch.equal(pieces.ends_q, pieces.ends_k)


def shaped(size=64, value_size=None, dtype=torch.bfloat16):
    return [torch.zeros(1, 2, 3, d, dtype=dtype) for d in (size, size, value_size or size)]


@pytest.mark.parametrize(
    ("inputs", "dropout", "reach", "taken"),
    [
        (shaped(), 0.0, None, True),
        (shaped(dtype=torch.float16), 0.0, Reach(2), True),
        (shaped(dtype=torch.float32), 0.0, None, False),
        ([*shaped()[:2], shaped(dtype=torch.float32)[2]], 0.0, None, False),
        (shaped(8), 0.0, None, True),
        (shaped(20), 0.0, None, False),
        (shaped(192, 128), 0.0, None, True),
        (shaped(64, 128), 0.0, None, False),
        (shaped(208), 0.0, None, False),
        (shaped(256), 0.0, None, True),
        (shaped(264), 0.0, None, False),
        (shaped(), 0.1, None, False),
        (shaped(), 0.0, Reach(2, chunked=True), False),
    ],
)
def test_a_layer_is_left_to_sdpa_where_the_kernel_does_not_take_it(inputs, dropout, reach, taken):
    assert varlen.takes(*inputs, dropout, reach) == taken


@pytest.mark.parametrize("reach", [Reach(8, chunked=True), Reach(700, chunked=True)], ids=["cut", "whole"])
def test_chunks_that_cut_no_sequence_take_the_kernel(calls, reach):
    for mine, wanted in zip(*both(SHARED, reach), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-10)
    assert len(calls) == (reach.size == 700)


@pytest.mark.parametrize("name", CASES)
def test_the_check_of_a_gpu_passes_with_the_reference(calls, name):
    found = difference(CASES[name], "cpu", torch.float64)
    assert found.forward < 1e-6 and found.backward < 1e-6


def test_another_alignment_is_found(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    varlen.check_alignment("cpu")
    upper_left = lambda *args, **kwargs: varlen_reference(*args, **kwargs, lower_right=False)  # noqa: E731
    monkeypatch.setattr(varlen, "varlen_attn", upper_left)
    with pytest.raises(ConfigError, match=r"model.attention: varlen is invalid: .* Set model.attention=sdpa"):
        varlen.check_alignment("cpu")
    assert difference(CASES["causal"], "cpu").forward > 0.1


def test_a_loaded_policy_runs_it(calls, tmp_path):
    folder = str(make_tiny_llama(tmp_path / "llama"))
    batch = pack([Row(0, [5, 6, 7], [8, 9]), Row(0, [5, 6, 7], [3, 4, 5]), Row(1, [4], [3, 3])], True)
    found = []
    for name in ("sdpa", "varlen"):
        options = ModelOptions(folder, torch.float32, name)
        assert options.share_prompts
        policy = load_policy(options)
        logprobs, _ = policy(batch, 1.0)
        logprobs.sum().backward()
        found.append((logprobs.detach(), torch.cat([p.grad.flatten() for p in policy.parameters()])))
    assert len(calls) == policy.hf.config.num_hidden_layers
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


SIZES = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "pad_token_id": 0}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    AutoConfig.for_model("llama", **SIZES).save_pretrained(folder)
    return str(folder)


def planned(path, implementation, rows, backward=True):
    lengths = tuple(Lengths(group, prompt, response) for group, prompt, response in rows)
    return packed_pass(
        path, "policy", lengths, dtype=torch.bfloat16, implementation=implementation, checkpointing=False, backward=backward,
        device="cuda", trust_remote_code=False,
    )  # fmt: skip


def test_the_plan_counts_the_copies_of_shared_prompts(path):
    """Two bf16 tensors of 2 heads x 64 per copied token and layer are kept until the gradient, in place of the ones they were copied of."""
    shared = planned(path, "varlen", [(0, 400, 201)] * 3).held
    apart = planned(
        path, "varlen", [(0, 400, 201), (1, 200, 1), (2, 200, 1)]
    ).held  # as many tokens fed, none of them shared
    copied = 3 * 400 * 2 * 2 * 64 * 2 * SIZES["num_hidden_layers"]
    assert 0 <= shared - apart - copied <= 0.01 * copied


def test_the_plan_of_separate_sequences_is_that_of_flash_attention(path):
    rows = [(0, 400, 201), (1, 300, 100)]
    ours, theirs = (planned(path, name, rows) for name in ("varlen", "flash_attention_2"))
    assert ours.peak == pytest.approx(theirs.peak, rel=1e-3) and ours.held == pytest.approx(theirs.held, rel=1e-3)


def test_the_workspace_of_a_gradient_is_that_of_the_kernel():
    """flash_api.cpp: dq_accum and softmax_d in fp32 with 128 rows after each sequence, dk and dv per query head where heads share them."""
    query, key = torch.empty(100, 8, 72, dtype=torch.bfloat16), torch.empty(300, 2, 72, dtype=torch.bfloat16)
    sums = (100 + 128 * 3) * 8 * (96 + 1) * 4
    assert backward_bytes(query, key, key, 3) == sums + 2 * 300 * 8 * 72 * 2
    assert backward_bytes(query, query, query, 3) == sums
