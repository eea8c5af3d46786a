"""Two trivial tasks for a tiny model, learnt in one process from our own log-probs, advantages and losses. No Ray, vLLM or DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid.algorithms.advantages import compute_advantages
from hybrid.algorithms.losses import value_loss
from hybrid.roles import attention
from hybrid.roles.models import PolicyModel, ValueModel
from hybrid.roles.objective import PolicyObjective, PolicyRow
from hybrid.roles.packing import Row, lengths_mask, pack, to_rows
from hybrid.roles.policy_step import policy_objective
from hybrid.roles.reduction import Totals

VOCABULARY, END, TOKEN = 12, 1, 7
MAX_TOKENS, GROUPS, SAMPLES = 8, 4, 8
PROMPT = [2, 3]


@dataclass(frozen=True)
class Task:
    """`score` of a response; `reached` is the mean score that counts as learnt, of at most 1."""

    name: str
    reached: float

    def score(self, response: list[int]) -> float:
        if self.name == "token":  # say TOKEN, all the time
            return sum(t == TOKEN for t in response) / len(response)
        return len(response) / MAX_TOKENS  # go on until the limit


TASKS = (Task("token", 0.8), Task("length", 0.95))


def _model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attn_implementation=attention.NAMES["sdpa"],
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def _generate(policy: PolicyModel, rows: int, generator: torch.Generator, greedy: bool = False) -> list[list[int]]:
    """Responses to PROMPT, drawn token by token at temperature 1; the end token belongs to them."""
    ids = torch.tensor([PROMPT] * rows)
    done = torch.zeros(rows, dtype=torch.bool)
    out: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(MAX_TOKENS):
        width = ids.shape[1]
        packed = pack([Row(i, row[:-1], [row[-1], 0]) for i, row in enumerate(ids.tolist())], False)
        hidden = policy.hf.base_model(
            input_ids=packed.input_ids_N[None],
            position_ids=packed.position_ids_N[None],
            use_cache=False,
            packed_segments=packed.segments,
        ).last_hidden_state[0]
        logits = policy.hf.lm_head(hidden.view(rows, width, -1)[:, -1])
        drawn = logits.argmax(-1) if greedy else logits.softmax(-1).multinomial(1, generator=generator)[:, 0]
        for i, token in enumerate(drawn.tolist()):
            if not done[i]:
                out[i].append(token)
        done |= drawn == END
        ids = torch.cat([ids, drawn[:, None]], dim=1)
        if done.all():
            break
    return out


def learn(
    task: Task,
    estimator: str = "group_norm",
    kind: str = "ppo",
    seed: int = 0,
    steps: int = 60,
    sign: float = 1.0,
    epochs: int = 2,
) -> float:
    """Mean score of the last rollouts after at most `steps` steps of `epochs` updates; ends when `task.reached` is reached twice."""
    reduction = "sequence_mean" if kind == "gspo" else "token_mean"
    hf = _model(seed)
    policy = PolicyModel(hf)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    critic = ValueModel(_model(seed + 100).model, nn.Linear(32, 1)) if estimator == "gae" else None
    critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-2, weight_decay=0.0) if critic else None
    generator = torch.Generator().manual_seed(seed)
    means: list[float] = []
    for _ in range(steps):
        responses = _generate(policy, GROUPS * SAMPLES, generator)
        rows = [Row(i // SAMPLES, PROMPT, r) for i, r in enumerate(responses)]
        lengths = [len(r) for r in responses]
        scores = torch.tensor([task.score(r) for r in responses])
        means.append(float(scores.mean()))
        if min(means[-2:]) >= task.reached and len(means) > 1:
            break
        batch, mask = pack(rows, True), lengths_mask(lengths, max(lengths))
        with torch.no_grad():
            old = policy(batch, 1.0)[0].split(lengths)
            values = to_rows(critic(batch), lengths, max(lengths)) if critic else None
        greedy = None
        if estimator == "remax":
            greedy = torch.full((GROUPS,), task.score(_generate(policy, 1, generator, greedy=True)[0]))
        advantages, returns = compute_advantages(
            estimator,
            scores,
            torch.zeros(mask.shape),
            values,
            mask,
            torch.arange(len(rows)) // SAMPLES,
            1.0,
            0.95,
            greedy,
        )
        train = [
            PolicyRow(row, sign * advantage[:n], logprobs, logprobs)
            for row, advantage, logprobs, n in zip(rows, advantages, old, lengths)
        ]
        objective = PolicyObjective(
            kind=kind,
            reduction=reduction,
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=None,
            correction="none",
            correction_low=0.5,
            correction_high=2.0,
            entropy_coef=0.0,
            entropy_metric=False,
            kl_coef=0.0,
            kl_kind="k3",
            temperature=1.0,
            max_tokens=MAX_TOKENS,
            normalizer=float(len(rows) if reduction == "sequence_mean" else sum(lengths)),
            sampler_bound=None,
        )
        for _ in range(epochs):
            loss = policy_objective(train, batch, *policy(batch, 1.0), objective, Totals())
            _update(policy, optimizer, loss)
            if critic:
                new = to_rows(critic(batch), lengths, max(lengths))
                _update(critic, critic_optimizer, value_loss(new, values, returns, mask, 0.2))
    return sum(means[-2:]) / 2


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
