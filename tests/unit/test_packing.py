"""Packed rows give the log-probs and gradients of separate rows, whatever is packed with what."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid.roles import attention
from hybrid.roles.packing import Row, lengths_mask, pack, to_rows

PROMPTS = {0: [5, 6, 7, 8], 1: [9], 2: list(range(10, 40))}
ROWS = [
    Row(0, PROMPTS[0], [1, 2, 3]),
    Row(1, PROMPTS[1], [4]),
    Row(0, PROMPTS[0], [2]),
    Row(2, PROMPTS[2], [1, 1, 2, 2, 3]),
    Row(0, PROMPTS[0], [3, 1]),
    Row(1, PROMPTS[1], [7, 7, 7]),
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).double().eval()


def packed_logprobs(model, rows, share):
    batch = pack(rows, share)
    model.set_attn_implementation(attention.NAMES["sdpa"])
    hidden = model.model(
        input_ids=batch.input_ids_N[None],
        position_ids=batch.position_ids_N[None],
        use_cache=False,
        packed_segments=batch.segments,
    ).last_hidden_state[0]
    logprobs = model.lm_head(hidden[batch.predict_R]).log_softmax(-1)
    return logprobs.gather(-1, batch.targets_R[:, None])[:, 0], batch


def plain_logprobs(model, rows):
    model.set_attn_implementation("sdpa")
    out = []
    for row in rows:
        ids = torch.tensor([row.prompt + row.response])
        logprobs = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1].log_softmax(-1)
        out.append(logprobs.gather(-1, torch.tensor(row.response)[:, None])[:, 0])
    return torch.cat(out)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-6), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("one_call_tokens", [512, 0], ids=["masked", "per_response"])
def test_packed_equals_separate_rows(model, share, one_call_tokens, dtype, atol, monkeypatch):
    monkeypatch.setattr(attention, "ONE_CALL_TOKENS", one_call_tokens)
    model.to(dtype)
    weights = torch.linspace(-1, 1, sum(len(r.response) for r in ROWS), dtype=dtype)
    plain = plain_logprobs(model, ROWS)
    plain_gradient = gradients(model, (plain * weights).sum())
    packed, _ = packed_logprobs(model, ROWS, share)
    packed_gradient = gradients(model, (packed * weights).sum())
    torch.testing.assert_close(packed, plain, rtol=0, atol=atol)
    # RMSNorm computes in float32 whatever the model's dtype.
    torch.testing.assert_close(packed_gradient, plain_gradient, rtol=0, atol=atol)


def test_sharing_feeds_each_prompt_once():
    shared, separate = pack(ROWS, True), pack(ROWS, False)
    fed = sum(len(r.response) - 1 for r in ROWS)
    assert len(shared.input_ids_N) == sum(map(len, PROMPTS.values())) + fed
    assert len(separate.input_ids_N) == sum(len(r.prompt) for r in ROWS) + fed


def test_rows_come_back_in_order_with_graph():
    values = torch.arange(1.0, 7.0, requires_grad=True)
    rows = to_rows(values, [3, 1, 2], 4)
    assert rows.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 6, 0, 0]]
    rows.sum().backward()
    assert values.grad.tolist() == [1] * 6
    assert lengths_mask([3, 1, 2], 4).sum().item() == 6
