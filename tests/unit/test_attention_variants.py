"""Windows, chunks, soft caps, sinks and scaled logits: packed log-probs and gradients are those of eager transformers, row by row."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid.algorithms import logprobs
from hybrid.data.batches import Lengths
from hybrid.errors import ConfigError, NotExact
from hybrid.planning.passes import packed_pass
from hybrid.roles import attention, scores, varlen
from hybrid.roles.models import PolicyModel
from hybrid.roles.packing import Row, pack
from hybrid.roles.reach import Reach
from tests.architecture_checks import plain_logprobs, tokens
from tests.varlen_reference import varlen_reference

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
VARIANTS = {
    "window": ("mistral", {"sliding_window": 8}, {"sliding_window": None}),
    "window of one layer": ("qwen3", LAYERS | {"use_sliding_window": True}, {"layer_types": ["full_attention"] * 2}),
    "chunks": (
        "llama4_text",
        EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"]},
        {"layer_types": ["full_attention"] * 2},
    ),
    "caps": (
        "gemma2",
        LAYERS | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0, "query_pre_attn_scalar": 8},
        {"attn_logit_softcapping": 50.0},
    ),
    "cap of logits": ("gemma3_text", LAYERS | {"final_logit_softcapping": 1.0}, {"final_logit_softcapping": None}),
    "sinks": ("gpt_oss", LAYERS | EXPERTS, {"layer_types": ["full_attention"] * 2}),
    "logits multiplied": ("cohere2", LAYERS | {"logit_scale": 0.25}, {"logit_scale": 1.0}),
    "logits divided": ("granite", {"logits_scaling": 4.0}, {"logits_scaling": 1.0}),
    "logits multiplied by logits_scaling": ("hyperclovax", {"logits_scaling": 0.25}, {"logits_scaling": 1.0}),
    "hidden states divided": (
        "minicpm3",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
         "dim_model_base": 8},
        {"dim_model_base": 32},
    ),
    "a head that calls inside the trunk": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, {"ffn_dim": 32}),
    "logits capped after a norm": ("nanochat", {"final_logit_softcapping": 1.0}, {"final_logit_softcapping": 15.0}),
}  # fmt: skip
"""Name -> (model_type, its fields, fields of a model without the variant, which computes otherwise)."""
ROWS = [
    Row(0, tokens(5, 11), tokens(9, 20)),
    Row(0, tokens(5, 11), tokens(40, 3)),
    Row(1, tokens(70, 3), tokens(50, 14)),
    Row(1, tokens(70, 3), [7]),
    Row(2, tokens(30, 4), tokens(60, 2)),
]
ROWS = [Row(r.group, [t % 96 for t in r.prompt], [t % 96 for t in r.response]) for r in ROWS]


def make(kind, fields, implementation="eager"):
    """A random model, its weights so large that all parts matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**BASE, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model.eval()


def run(model, of_rows):
    """Log-probs, and the gradient of a weighted sum of them by parameter."""
    (of_rows * torch.linspace(-1, 1, len(of_rows))).sum().backward()
    return of_rows.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", ["one_call", "per_response", "varlen"])
@pytest.mark.parametrize("name", VARIANTS)
def test_c13_packed_rows_are_those_of_eager_transformers(name, way, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    monkeypatch.setattr(varlen, "DTYPES", (torch.float32,))
    if way == "per_response":
        monkeypatch.setattr(attention, "ONE_CALL_TOKENS", 0)
        monkeypatch.setattr(scores, "BLOCK_QUERIES", 4)
        monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * 96 * 5)  # five tokens
    kind, fields, without = VARIANTS[name]
    plain = make(kind, fields)
    packed = copy.deepcopy(plain)
    packed.set_attn_implementation(attention.NAMES["varlen" if way == "varlen" else "sdpa"])
    theirs, their_gradient = run(plain, plain_logprobs(plain, ROWS))
    ours, our_gradient = run(packed, PolicyModel(packed).train()(pack(ROWS, True), 1.0)[0])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert our_gradient.keys() == their_gradient.keys()
    norm = torch.stack([g.norm() for g in their_gradient.values()]).norm()
    for parameter, gradient in their_gradient.items():
        assert (our_gradient[parameter] - gradient).norm() <= 1e-5 * norm, parameter
    with torch.no_grad():
        other = plain_logprobs(make(kind, {**fields, **without}), ROWS)
    assert (theirs - other).abs().max() > 1e-3, "the variant does nothing here"


@pytest.mark.parametrize("name", ["caps", "logits divided"])
def test_temperature_and_entropy_are_of_the_models_logits(name):
    kind, fields, _ = VARIANTS[name]
    plain = make(kind, fields)
    packed = copy.deepcopy(plain)
    packed.set_attn_implementation(attention.NAMES["sdpa"])
    ours, entropies = PolicyModel(packed)(pack(ROWS[:1], True), 0.7, with_entropy=True)
    row = ROWS[0]
    ids = torch.tensor([row.prompt + row.response])
    logits = plain(ids).logits[0, len(row.prompt) - 1 : -1] / 0.7
    table = logits.log_softmax(-1)
    torch.testing.assert_close(ours, table.gather(-1, torch.tensor(row.response)[:, None])[:, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, -(table.exp() * table).sum(-1), rtol=0, atol=1e-5)
    for of in (entropies, -(table.exp() * table).sum(-1)):
        of.sum().backward()
    for (parameter, own), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=parameter)


def test_the_gradient_of_caps_and_sinks_is_right():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 6, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, generator=generator)
    inputs = [t.requires_grad_() for t in (query, key, value, sinks)]

    def attend(query, key, value, sinks):
        return scores.attend_by_scores(query, key, value, is_causal=True, softcap=0.5, sinks=sinks)

    # The softmax is in float32, so differences are wide and their quotients coarse.
    assert torch.autograd.gradcheck(attend, inputs, eps=1e-2, atol=5e-3, rtol=1e-2)


def test_a_window_is_compared_with_one_sequence():
    """c13: 4 responses of 20 tokens to 20 are 100 tokens, and none of the sequences is longer than the window."""
    segments = pack([Row(0, tokens(5, 20), tokens(9 + i, 20)) for i in range(4)], True).segments
    assert segments[0].length > 64 > segments[0].longest
    assert not Reach(64).cuts(segments[0].longest)
    assert Reach(64).cuts(65)


class Odd(torch.nn.Module):
    """Attention that asks for more than the packed path reads."""


@pytest.mark.parametrize(
    ("mask", "arguments", "says"),
    [
        (torch.zeros(1, 1, 6, 6), {}, "Odd makes an attention mask of its own"),
        (None, {"position_bias": torch.zeros(1)}, "Odd passes position_bias"),
        (None, {"sliding_window": 2}, "Odd slides over 2 tokens, but its mask does not"),
        (Reach(3), {"sliding_window": 2}, "Odd slides over 2 tokens, but its mask does not"),
    ],
)
def test_other_attention_is_refused_not_approximated(mask, arguments, says):
    segments = pack([Row(0, [1, 2], [3, 4, 5])], True).segments
    q = torch.zeros(1, 2, 4, 8)
    with pytest.raises(NotExact, match=says):
        attention.packed_attention(Odd(), q, q, q, mask, packed_segments=segments, **arguments)
    attention.packed_attention(Odd(), q, q, q, Reach(4), packed_segments=segments, sliding_window=4)
    with pytest.raises(NotExact, match="Odd is not told which rows are packed"):
        attention.packed_attention(Odd(), q, q, q, None)


@pytest.mark.parametrize("argument", [{"softcap": 30.0}, {"s_aux": torch.zeros(2)}])
def test_caps_and_sinks_are_refused_for_cuda(argument):
    segments = pack([Row(0, [1, 2], [3, 4, 5])], True).segments
    q = torch.zeros(1, 2, 4, 8)
    with attention.planned_for("cuda"), pytest.raises(NotExact, match="no CUDA kernel computes packed attention"):
        attention.packed_attention(Odd(), q, q, q, None, packed_segments=segments, **argument)
    attention.packed_attention(Odd(), q, q, q, None, packed_segments=segments, **argument)


PASS = {"dtype": torch.float32, "implementation": "sdpa", "checkpointing": False, "trust_remote_code": False}


def traced(path, device="cpu", rows=((400, 600),)):
    """The plan of a pass with one group."""
    lengths = tuple(Lengths(0, *row) for row in rows)
    return packed_pass(str(path), "policy", lengths, backward=True, device=device, **PASS)


@pytest.mark.parametrize("rows", [((20, 20),) * 4, ((100, 600),) * 2], ids=["within", "beyond"])
def test_c13_windows_are_planned(tmp_path, rows):
    AutoConfig.for_model("mistral", **BASE | {"sliding_window": 64}).save_pretrained(tmp_path / "window")
    AutoConfig.for_model("mistral", **BASE | {"sliding_window": None}).save_pretrained(tmp_path / "whole")
    window, whole = (traced(tmp_path / name, rows=rows).peak for name in ("window", "whole"))
    assert window >= whole if rows[0] == (100, 600) else window == whole


def test_tables_of_scores_are_planned(tmp_path):
    """The trainer's tensors, counted as in a plan, hold the scores of a block of queries with all their keys."""
    held = {}
    for cap in (None, 30.0):
        fields = BASE | LAYERS | {"attn_logit_softcapping": cap, "max_position_embeddings": 1024}
        AutoConfig.for_model("gemma2", **fields).save_pretrained(tmp_path / str(cap))
        held[cap] = traced(tmp_path / str(cap)).peak
    table = 4 * scores.BLOCK_QUERIES * 1000 * 4  # heads, queries, keys, bytes
    assert held[30.0] > held[None] + table
    with pytest.raises(ConfigError, match=r"no CUDA kernel computes packed attention with soft caps"):
        traced(tmp_path / "30.0", device="cuda")


def test_c04_models_that_carry_a_state_are_refused_by_their_layers(tmp_path):
    """Also where no rule of the config says so."""
    for kind, says in (
        ("qwen3_next", "layer 0 .Qwen3NextGatedDeltaNet"),
        ("bloom", "layer 0 .* past transformers' interface"),
    ):
        AutoConfig.for_model(kind, **BASE | {"n_head": 4}).save_pretrained(tmp_path / kind)
        with pytest.raises(ConfigError, match=says):
            traced(tmp_path / kind)
