"""The names of everything a step is measured by, and `metrics.jsonl`: one line per step with all of them.

A key that does not apply to a run or a step is null, never absent.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.memory.tenants import NEEDS, PHASES
from hybrid.telemetry.jsonl import JsonLines, read_lines

TENANTS = tuple(dict.fromkeys(tenant for needs in NEEDS.values() for tenant in needs))
"""(role, part) of everything that any run can hold."""

METRICS = {
    "step": "1 is the first",
    "reward/mean": "mean score of the step's samples",
    "reward/std": "their standard deviation",
    "reward/shaped_mean": "mean score after clipping, normalising and penalties: what advantages see",
    "rollout/equal_share": "share of the prompts generated whose samples all score alike, 0 to 1",
    "rollout/rounds": "how often dynamic sampling generated",
    "rollout/waited_prompts": "prompts that an earlier step generated and this one used, or more",
    "rollout/filling_prompts": "prompts without a difference in score that fill the step, the rounds being used up",
    "response/length_mean": "tokens",
    "response/truncated_share": "share of samples that max_new_tokens cut, 0 to 1",
    "kl/reference": "mean over tokens of the KL estimate, policy to reference, nats",
    "kl/response": "mean over responses of the KL to the reference, summed over the response (k1), nats",
    "kl/coef": "weight of the KL in this step",
    "kl/sampler": "mean over tokens of the sampler's log-prob minus the trainer's, nats",
    "sampler/logprob_diff_mean": "mean absolute difference of the two",
    "sampler/logprob_diff_max": "largest absolute difference of the two",
    "loss/policy": "policy loss, KL and entropy terms included, mean over the step's updates",
    "loss/value": "critic loss, mean over the step's updates",
    "value/explained_variance": "1 - var(return - value) / var(return), before the updates",
    "policy/clip_fraction": "share of tokens whose ratio was clipped, 0 to 1",
    "policy/ratio_mean": "mean ratio of new to old policy",
    "policy/ratio_max": "largest ratio of new to old policy",
    "policy/approx_kl": "mean over tokens of the KL estimate k3, new policy to old, nats",
    "policy/entropy": "nats per token at the sampling temperature; null unless computed",
    "correction/weight_mean": "mean weight of the correction for the sampler",
    "correction/clipped_share": "share of tokens whose weight the bounds changed, 0 to 1",
    "correction/ess": "effective sample size of the weights, share of the tokens",
    "grad_norm/actor": "before clipping",
    "grad_norm/critic": "before clipping",
    "lr/actor": "learning rate of the last update",
    "lr/critic": "learning rate of the last update",
    "tokens/per_second": "generated tokens over the time of the whole step",
    "tokens/generated": "response tokens of the step",
    "time/step": "seconds of the whole step",
    "time/first_token": "seconds from the start of the command to the first generated token; in the first line only",
    "time/transitions": "seconds in which memory moved between phases",
    "time/score_overlapped": "seconds of scoring during generation, beside time/score; null where no reward can start that early",
    "train/skipped_steps": "optimizer steps skipped so far because a gradient was not finite",
    "eval/accuracy": "share of held-out problems answered right, greedy; at step 1 it was measured before training",
    "eval/reward": "mean score on the held-out problems",
    "data/dropped_prompts": "prompts left out so far because they were too long",
    "gpu/utilization": "share of the step in which the GPUs of the driver's node were busy, 0 to 1",
    "batch/padding_share": "share of the tokens fed to the actor in training that were padding, 0 to 1",
    "batch/rank_imbalance": "tokens fed to the actor's busiest rank over the mean of its ranks; 1 is even",
}
"""Names of fixed metrics, with unit or meaning. Beside them: `time/<phase>` in seconds, `memory/counted/<role>.<part>` (bytes of
the largest rank) and `memory/peak/<role>` (bytes of the process that held most)."""


def metric_keys(tenants: Iterable[tuple[str, str]] = TENANTS, phases: Sequence[str] = PHASES) -> list[str]:
    """Every key of a step's line, in the order in which they are written. `tenants` are (role, part)."""
    tenants = list(tenants)
    roles = dict.fromkeys(role for role, _ in tenants)
    return [
        *METRICS,
        *(f"time/{phase}" for phase in phases),
        *(f"memory/counted/{role}.{part}" for role, part in tenants),
        *(f"memory/peak/{role}" for role in roles),
    ]


class MetricsWriter:
    """Appends steps to `path`, each with all `keys`."""

    def __init__(self, path: str | Path, keys: Sequence[str]):
        self.keys = list(keys)
        self._lines = JsonLines(path)

    def write(self, values: Mapping[str, Any]) -> dict[str, int | float | None]:
        """Append one step and return the line as written: every key, null where `values` lacks it or is not finite.

        Numbers may be Python's, numpy's or tensors of one element. Raises `ValueError` for a key that no line has.
        """
        unknown = [key for key in values if key not in self.keys]
        if unknown:
            nearest = difflib.get_close_matches(unknown[0], self.keys, n=1, cutoff=0.0)[0]
            raise ValueError(
                f"metrics have no key {unknown[0]!r}; the nearest is {nearest!r}. New ones are named in metrics.py."
            )
        if values.get("step") is None:
            raise ValueError("a step's metrics need the key 'step'.")
        row = {key: _number(values.get(key)) for key in self.keys}
        self._lines.append(json.dumps(row, allow_nan=False))
        return row

    @property
    def waits(self) -> bool:
        """Whether the disk is too full for what was written last."""
        return bool(self._lines.waiting)

    def close(self) -> None:
        self._lines.close()


def read_metrics(path: str | Path) -> list[dict[str, int | float | None]]:
    """Steps of a finished, running or crashed run, oldest first. Raises `DataError` for a malformed line, save a torn last one."""
    return [row for _, row in read_lines(path)]


def _number(value: Any) -> int | float | None:
    if value is None or isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else None
