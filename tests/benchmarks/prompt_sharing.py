"""Seconds of the actor's forward and backward pass with every sample's prompt encoded anew, over those with it encoded once a group.

    python tests/benchmarks/prompt_sharing.py [--workload default|long-prompt] [--rounds 4]

SmolLM2-135M in bf16, packed micro-batches of at most 4096 tokens, log-probs of all response tokens and their gradient, no optimizer. The
two take turns; the first round warms up. The last line is the ratio of the medians; 3 is expected of long prompts with short answers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from grpo_step import MODEL, WORKLOADS, Workload

from hybrid.data.batches import Lengths, plan_micro_batches
from hybrid.roles.models import ModelOptions, PolicyModel, load_policy
from hybrid.roles.packing import Row, pack

TOKEN_BUDGET = 4096


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--workload", choices=WORKLOADS, default="long-prompt")
    arguments.add_argument("--rounds", type=int, default=4, help="measured, beside one that warms up")
    options = arguments.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    policy = load_policy(ModelOptions(str(MODEL), torch.bfloat16, "sdpa"))
    rows = sample_rows(WORKLOADS[options.workload], policy.hf.config.vocab_size)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.rounds + 1):
        for share in seconds:
            micros = plan(rows, share)
            spent = measure(policy, micros, share)
            if number:
                seconds[share].append(spent)
    medians = {share: statistics.median(values) for share, values in seconds.items()}
    for share, name in ((True, "encoded once"), (False, "encoded anew")):
        micros = plan(rows, share)
        tokens = sum(len(pack(micro, share).input_ids_N) for micro in micros)
        print(f"prompts {name}: {tokens} tokens in {len(micros)} micro-batches, {medians[share]:.2f} s")
    print(f"ratio {medians[False] / medians[True]:.2f}")


def sample_rows(workload: Workload, vocabulary: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    prompts = [tokens(workload.prompt_tokens) for _ in range(workload.prompts)]
    return [
        Row(i, prompt, tokens(workload.new_tokens)) for i, prompt in enumerate(prompts) for _ in range(workload.samples)
    ]


def plan(rows: list[Row], share: bool) -> list[list[Row]]:
    lengths = [Lengths(row.group, len(row.prompt), len(row.response)) for row in rows]
    (micros,) = plan_micro_batches(lengths, 1, TOKEN_BUDGET, share)
    return [[rows[i] for i in micro] for micro in micros]


def measure(policy: PolicyModel, micros: list[list[Row]], share: bool) -> float:
    policy.zero_grad()
    started = time.perf_counter()
    for micro in micros:
        logprobs_R, _ = policy(pack(micro, share), 1.0)
        logprobs_R.sum().backward()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
