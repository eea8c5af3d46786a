"""The micro-batches that a plan counts with: full-length samples, as many as the token budget holds, the last cut to fill it."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.config import RunConfig
from hybrid.data.batches import Lengths, plan_micro_batches

_GROUPS_LOOKED_AT = 64
"""Micro-batches repeat: more groups than this per rank make none that is fuller."""


@dataclass(frozen=True)
class Workload:
    """What one rank works on in a phase: its fullest micro-batch, and how many there are."""

    rows: tuple[Lengths, ...]
    micro_batches: int


def workload(cfg: RunConfig, prompts: int) -> Workload:
    """The work of the busiest rank on `prompts` prompts with all their samples, when every sequence is as long as the config allows.

    Shorter sequences are cut into micro-batches as full as the budget; so the fullest one is filled up to it with a last, shorter one.
    """
    budget, share = cfg.train.micro_batch_tokens, cfg.model.shares_prompts
    looked_at = min(prompts, _GROUPS_LOOKED_AT * cfg.world_size)
    prompt, response = cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens
    rows = [
        Lengths(group, prompt, response) for group in range(looked_at) for _ in range(cfg.rollout.samples_per_prompt)
    ]
    plan = plan_micro_batches(rows, cfg.world_size, budget, share)
    fullest = max((micro for rank in plan for micro in rank), key=lambda m: packed_tokens([rows[i] for i in m], share))
    micro_batches = -(-len(plan[0]) * prompts // looked_at)
    chosen = [rows[i] for i in fullest]
    if micro_batches > 1:
        chosen = _filled(chosen, budget, share)
    return Workload(tuple(chosen), micro_batches)


def packed_tokens(rows: list[Lengths], share_prompts: bool) -> int:
    """Tokens fed: the last token of a response predicts nothing; a group's prompt is fed once where prompts are shared."""
    prompts = {row.group if share_prompts else index: row.prompt for index, row in enumerate(rows)}
    return sum(prompts.values()) + sum(max(0, row.response - 1) for row in rows)


def _filled(rows: list[Lengths], budget: int, share: bool) -> list[Lengths]:
    """`rows` and more of another prompt, until `budget` is used up; unchanged where there is no room for one."""
    room = budget - packed_tokens(rows, share)
    group, prompt, response = rows[-1].group + 1, min(rows[0].prompt, room // 2), rows[0].response
    more: list[Lengths] = []
    while (left := room - (packed_tokens(more, share) or prompt)) > 0 and prompt > 0:
        fed = left if share or not more else left - prompt
        if fed < 1 or response < 2:
            break
        more.append(Lengths(group, prompt, min(response, fed + 1)))
    return [*rows, *more]
