"""Numbers of one architecture: the trainer's packed forward and backward, and its export, against transformers' own."""

from __future__ import annotations

from pathlib import Path

import torch

from hybrid.roles.models import ModelOptions, PolicyModel, load_policy
from hybrid.roles.packing import Row, pack


def tokens(start: int, count: int) -> list[int]:
    """`count` ordinary tokens."""
    return [3 + (start + 7 * i) % 500 for i in range(count)]


ROWS = [
    Row(0, tokens(5, 30), tokens(9, 70)),
    Row(0, tokens(5, 30), tokens(40, 50)),
    Row(0, tokens(5, 30), tokens(90, 3)),
    Row(1, tokens(200, 4), tokens(50, 9)),
]
"""Groups that share their prompt; the longest sequences are longer than the window of 64 that some rows have."""


def load(folder: Path, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """The model at `folder` as the trainer loads it."""
    return load_policy(ModelOptions(str(folder), dtype, "sdpa"))


def eager(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """The model at `folder` as transformers computes it by itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def packed_logprobs(policy: PolicyModel, rows: list[Row] = ROWS) -> torch.Tensor:
    """float32 log-probs of all response tokens, in order."""
    return policy(pack(rows, True), 1.0)[0]


def plain_logprobs(model: torch.nn.Module, rows: list[Row] = ROWS) -> torch.Tensor:
    """As `packed_logprobs`, one sequence a pass, without the trainer."""
    found = []
    for row in rows:
        table = model(torch.tensor([row.prompt + row.response])).logits[0].float().log_softmax(-1)
        at = torch.arange(len(row.prompt) - 1, len(row.prompt) + len(row.response) - 1)
        found.append(table[at, torch.tensor(row.response)])
    return torch.cat(found)


def packed_difference(folder: Path) -> float:
    """Largest difference of a log-prob in nats, fp32."""
    with torch.no_grad():
        return float((packed_logprobs(load(folder).eval()) - plain_logprobs(eager(folder))).abs().max())


def gradient_norms(folder: Path) -> tuple[float, float, float]:
    """Norms of the gradient of a weighted sum of log-probs: the trainer's, eager transformers', and that of their difference."""
    policy, plain = load(folder).train(), eager(folder)
    gradients = []
    for model, logprobs in ((policy.hf, packed_logprobs(policy)), (plain, plain_logprobs(plain))):
        weights = torch.linspace(-1, 1, len(logprobs))
        (logprobs * weights).sum().backward()
        gradients.append(
            torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])
        )
    ours, theirs = gradients
    return float(ours.norm()), float(theirs.norm()), float((ours - theirs).norm())
