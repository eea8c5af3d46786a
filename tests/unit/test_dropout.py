"""C07: training leaves out dropout, layer drop and router noise unless the profile wants them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid.roles import attention
from hybrid.roles.models import PolicyModel, ValueModel
from hybrid.roles.objective import PolicyRow
from hybrid.roles.packing import Row, pack
from hybrid.roles.policy_step import policy_objective, step_metrics
from hybrid.roles.reduction import Totals
from tests.unit.test_policy_step import OBJECTIVE

TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
KINDS = {
    "phi3": dict(resid_pdrop=0.3, embd_pdrop=0.3, attention_dropout=0.3),  # modules, and a rate that attention is given
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3),
    "falcon": dict(hidden_dropout=0.3, attention_dropout=0.3),  # layers that apply rates of their config
    "opt": dict(dropout=0.3, attention_dropout=0.3, layerdrop=0.5, ffn_dim=48, word_embed_proj_dim=32),  # whole layers
    "mixtral": dict(router_jitter_noise=0.3, attention_dropout=0.3, **EXPERTS),  # noise on what experts read
    "phimoe": dict(input_jitter_noise=0.3, router_jitter_noise=0.3, hidden_dropout=0.3, **EXPERTS),  # experts are drawn
}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


def make(kind: str, implementation: str = "sdpa", recompute: bool = False):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**TINY, **KINDS[kind]})
    hf = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for p in hf.parameters():  # large enough for experts to differ and for noise to show
            p.mul_(3)
    if recompute:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return hf


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_c07_training_computes_what_evaluation_does(kind, recompute):
    policy = PolicyModel(make(kind, recompute=recompute))
    before = dict(vars(policy.hf.config))
    evaluated = policy.eval().hf(input_ids=IDS, use_cache=False).logits
    trained = policy.train().hf(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(trained, evaluated, rtol=0, atol=1e-6)
    assert vars(policy.hf.config) == before  # what is exported


@pytest.mark.parametrize("kind", KINDS)
def test_model_dropout_config_trains_with_it(kind):
    policy = PolicyModel(make(kind), dropout=True)
    evaluated = policy.eval().hf(input_ids=IDS, use_cache=False).logits
    trained = policy.train().hf(input_ids=IDS, use_cache=False).logits
    assert (trained - evaluated).abs().max() > 1e-2


def test_layers_that_recompute_do_so_in_training():
    policy = PolicyModel(make("phi3", recompute=True)).train()
    layers = policy.hf.model.layers
    assert all(layer.training and not layer.mlp.training for layer in layers)
    calls = []
    layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    policy.hf(input_ids=IDS, use_cache=False).logits.sum().backward()
    assert len(calls) == 2


def test_a_critic_has_no_dropout_either():
    trunk = make("phi3").model
    ValueModel(trunk, torch.nn.Linear(32, 1)).train()
    assert not any(module.training for module in trunk.modules())


ROWS = [Row(0, [5, 6, 7], [8, 9, 10, 11]), Row(0, [5, 6, 7], [12, 13]), Row(1, [20, 21], [22, 23, 24])]


def test_c07_the_first_update_has_ratios_of_one():
    """Two updates on a rollout at learning rate 0: old log-probs from the pass before, new ones from training."""
    policy, batch = PolicyModel(make("phi3", attention.NAMES["sdpa"])), pack(ROWS, True)
    with torch.no_grad():
        old = policy.eval()(batch, 1.0)[0].split(batch.row_lengths)
    rows = [PolicyRow(row, torch.ones(len(o)), o, o) for row, o in zip(ROWS, old, strict=True)]
    totals = Totals()
    policy_objective(rows, batch, *policy.train()(batch, 1.0), OBJECTIVE, totals)
    metrics = step_metrics(totals)
    assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["policy/approx_kl"] < 1e-6
    assert metrics["policy/clip_fraction"] == 0


@pytest.mark.parametrize("one_call_tokens", [512, 0], ids=["masked", "per_response"])
def test_packed_attention_drops_its_weights_where_the_config_is_wanted(one_call_tokens, monkeypatch):
    """Values of 1 show each query's sum of weights: 1 without dropout, 1 on average with it."""
    monkeypatch.setattr(attention, "ONE_CALL_TOKENS", one_call_tokens)
    torch.manual_seed(0)
    batch = pack(ROWS[:2], True)
    q, ones = torch.randn(1, 64, len(batch.input_ids_N), 8), torch.ones(1, 64, len(batch.input_ids_N), 8)
    out, _ = attention.packed_attention(None, q, q, ones, None, dropout=0.25, packed_segments=batch.segments)
    assert out.unique().numel() > 2
    assert float(out.mean()) == pytest.approx(1.0, abs=0.05)
