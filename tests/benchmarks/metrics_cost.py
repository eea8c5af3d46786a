"""What the actor's metrics cost: a training step with all of them beside one with none, on a frozen batch, in one process.

    python tests/benchmarks/metrics_cost.py [--model models/SmolLM2-135M-Instruct] [--steps 10]

Steps with and without take turns; the figure is the median over the pairs of their ratio. All: the entropy, ratios, clipping, KL to
the reference and between sampler and trainer, explained variance and the rest of a step's line, and writing it. None: the loss alone.
The bound is 5 %. Exits with status 1 beyond it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from hybrid.algorithms.kl import kl_estimate
from hybrid.algorithms.losses import policy_loss, reduce_tokens
from hybrid.experience import explained_variance
from hybrid.roles.models import ModelOptions, PolicyModel, load_policy
from hybrid.roles.objective import PolicyObjective, PolicyRow
from hybrid.roles.packing import PackedBatch, Row, column, lengths_mask, pack, to_rows
from hybrid.roles.policy_step import policy_objective, step_metrics
from hybrid.roles.reduction import Totals
from hybrid.telemetry.metrics import MetricsWriter, metric_keys

MOST = 1.05
PROMPT, RESPONSE, ROWS = 32, 96, 8
OBJECTIVE = PolicyObjective(
    kind="ppo",
    reduction="token_mean",
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    correction="tis",
    correction_low=0.5,
    correction_high=2.0,
    entropy_coef=0.0,
    entropy_metric=True,
    kl_coef=0.05,
    kl_kind="k3",
    temperature=1.0,
    max_tokens=RESPONSE,
    normalizer=float(ROWS * RESPONSE),
    sampler_bound=None,
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    arguments.add_argument("--steps", type=int, default=10)
    options = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    policy = load_policy(ModelOptions(options.model, dtype, "sdpa")).to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-7, fused=True)
    rows = _rows()
    batch = pack([row.row for row in rows], True).to(device)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        writer = MetricsWriter(Path(folder) / "metrics.jsonl", metric_keys())

        def with_all() -> None:
            totals = Totals()
            outputs = policy(batch, 1.0, True, entropy_gradient=False)
            policy_objective(rows, batch, *outputs, OBJECTIVE, totals).backward()
            flat = torch.cat([row.advantages for row in rows])
            variance = explained_variance(flat * 0.5, flat)
            writer.write(step_metrics(totals) | {"step": 1, "value/explained_variance": variance})

        _step(optimizer, with_all)
        for number in range(options.steps):
            pair = [with_all, lambda: _plain(policy, rows, batch)]
            seconds = {run: _step(optimizer, run) for run in (pair if number % 2 else reversed(pair))}
            ratios.append(seconds[pair[0]] / seconds[pair[1]])
            print(f"with all {seconds[pair[0]]:.2f} s, with none {seconds[pair[1]]:.2f} s", flush=True)
    median = statistics.median(ratios)
    print(f"all metrics cost {100 * (median - 1):.1f} % of a step (median of {len(ratios)} pairs)")
    sys.exit(median > MOST)


def _rows() -> list[PolicyRow]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(100, 1000, (PROMPT,), generator=generator).tolist() for _ in range(ROWS // 4)]
    rows = []
    for i in range(ROWS):
        response = torch.randint(100, 1000, (RESPONSE,), generator=generator).tolist()
        columns = torch.randn(4, RESPONSE, generator=generator) * 0.1
        rows.append(PolicyRow(Row(i // 4, prompts[i // 4], response), *columns))
    return rows


def _plain(policy: PolicyModel, rows: list[PolicyRow], batch: PackedBatch) -> None:
    """Forward, the same loss and backward, with no figure kept."""
    width = max(batch.row_lengths)
    mask_BT = lengths_mask(batch.row_lengths, width, batch.targets_R.device)
    logprobs_BT = to_rows(policy(batch, 1.0)[0], batch.row_lengths, width)
    o = OBJECTIVE
    loss, _ = policy_loss(
        logprobs_BT,
        column(rows, "old_logprobs", batch),
        column(rows, "advantages", batch),
        mask_BT,
        kind=o.kind,
        clip_low=o.clip_low,
        clip_high=o.clip_high,
        dual_clip=o.dual_clip,
        reduction=o.reduction,
        max_tokens=o.max_tokens,
        rollout_logprobs=column(rows, "rollout_logprobs", batch),
        correction=o.correction,
        normalizer=o.normalizer,
    )
    kl_BT = kl_estimate(logprobs_BT, column(rows, "ref_logprobs", batch), o.kl_kind)
    (loss + o.kl_coef * reduce_tokens(kl_BT, mask_BT, o.reduction, o.max_tokens, o.normalizer)).backward()


def _step(optimizer: torch.optim.Optimizer, run) -> float:
    started = time.perf_counter()
    optimizer.zero_grad()
    run()
    optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
