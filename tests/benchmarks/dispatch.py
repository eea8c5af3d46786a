"""Seconds in which a step's batch goes to the ranks and its numbers come back, over those of `ray.put` and `ray.get` of the same bytes.

    python tests/benchmarks/dispatch.py [--samples 1024] [--tokens 4096] [--ranks 8] [--rounds 7]

The calls of a step go through `hybrid.phases`, as in a run: log-probs of actor and reference, values, training of critic and actor. The
ranks are stand-ins: processes of a pool that read their rows and answer with as many numbers, without a model. "put and get" moves the same
bytes, as flat arrays, to the same processes and back; beside it, for comparison, one process that puts and gets them alone. In each round
they take turns; two rounds warm up. The last line is the ratio of the first two medians, which must not exceed 1.5.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
import torch
from dispatch_rank import StandIn

from hybrid import phases
from hybrid.config import RunConfig, resolve
from hybrid.data.samples import Prompt, Sample
from hybrid.experience import Experience, Forward, policy_rows, sample_rows, value_rows
from hybrid.pool import open_pool
from hybrid.roles.group import RoleGroup
from hybrid.roles.packing import Row
from hybrid.roles.shards import shard
from hybrid.trainer import Progress

MOST = 1.5
PROMPT_TOKENS, GROUP = 256, 8
VOCABULARY = 150_000
WARM_UP = 2
DEADLINE_S = 600.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("samples", 1024), ("tokens", 4096), ("ranks", 8), ("rounds", 7)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    options = arguments.parse_args()
    cfg = config(options)
    samples = draw(options)
    with tempfile.TemporaryDirectory() as folder:
        pool = open_pool(
            num_nodes=1, gpus_per_node=options.ranks, processes_per_bundle=1, device="cpu", log_dir=Path(folder), dashboard=False
        )  # fmt: skip
        try:
            group = RoleGroup(pool, "stand-in", StandIn, (), DEADLINE_S, {"OMP_NUM_THREADS": "1"})
            group.call("ready")
            measure(options, session(cfg, group), samples)
        finally:
            pool.stop()


def measure(options: argparse.Namespace, s: SimpleNamespace, samples: list[Sample]) -> None:
    started = time.perf_counter()
    rows = sample_rows(samples)
    print(f"token lists to arrays, once a step: {time.perf_counter() - started:.2f} s")
    raw = raw_calls(s, rows)
    size = sum(sum(call.shards) + sum(call.answers) * call.times for call in raw)
    print(f"{len(samples)} samples x {options.tokens} tokens on {options.ranks} ranks: {size / 2**20:.0f} MiB a step")
    ways = {
        "dispatch": lambda: step(s, rows),
        "put and get": lambda: put_and_get(s.actor, raw),
        "put and get in one process": lambda: put_and_get_here(raw),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + WARM_UP):
        for name, work in ways.items():
            started = time.perf_counter()
            work()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(f"{name}: {medians[name]:.3f} s ({min(values):.3f} to {max(values):.3f})")
    ratio = medians["dispatch"] / medians["put and get"]
    print(f"ratio {ratio:.2f}")
    assert ratio <= MOST, f"dispatch takes {ratio:.2f} times what Ray needs for the same bytes, not at most {MOST}"


def step(s: SimpleNamespace, rows: list[Row]) -> None:
    """Every call of a step, as `trainer.train_step` makes them."""
    forward = phases.forward(s, rows)
    experience = example(rows, forward)
    plan = phases.plan_rows(s, rows, range(len(rows)))
    phases.train_critic(s, Progress(), experience, rows, plan)
    phases.train_actor(s, Progress(), experience, rows, plan)


def example(rows: list[Row], forward: Forward | None = None) -> Experience:
    """What the forward passes gave, for advantages, returns and the sampler's log-probs too: their making is no dispatch."""
    columns = forward.values if forward else [torch.zeros(len(row.response)) for row in rows]
    forward = forward or Forward(columns, columns, columns)
    return Experience([], [True] * len(rows), columns, columns, columns, forward, {})


@dataclass(frozen=True)
class RawCall:
    """Bytes of each rank's shard and answer. `times`: calls that take the same shards, which are put once."""

    shards: list[int]
    answers: list[int]
    times: int = 1


def raw_calls(s: SimpleNamespace, rows: list[Row]) -> list[RawCall]:
    """The bytes of what `step` sends and gets."""
    plan, experience = phases.plan_rows(s, rows, range(len(rows))), example(rows)
    kinds = (rows, value_rows(experience, rows), policy_rows(experience, rows, with_reference=True))
    forward, critic, actor = ([piece.words.nbytes for piece in shard(plan, kind)] for kind in kinds)
    answers = [4 * sum(len(rows[i].response) for micro in rank for i in micro) for rank in plan]
    nothing = [0] * len(plan)
    return [RawCall(forward, answers, times=3), RawCall(critic, nothing), RawCall(actor, nothing)]


def put_and_get(group: RoleGroup, calls: list[RawCall]) -> None:
    """The bytes to the ranks and back, as flat arrays."""
    for call in calls:
        sent = [ray.put(numbers(size)) for size in call.shards]
        for _ in range(call.times):
            args = zip(group.workers, sent, call.answers, strict=True)
            ray.get([worker.handle.echo.remote(shard, size) for worker, shard, size in args])


def put_and_get_here(calls: list[RawCall]) -> None:
    """The same without ranks: one process puts and gets all."""
    for call in calls:
        for sizes in (call.shards, *[call.answers] * call.times):
            ray.get([ray.put(numbers(size)) for size in sizes])


@cache
def numbers(size: int) -> np.ndarray:
    """Bytes that lie in memory, as a step's do: pages of zeros that nobody wrote to would cost nothing to read."""
    return np.ones(size, np.uint8)


def session(cfg: RunConfig, group: RoleGroup) -> SimpleNamespace:
    """As much of `Session` as the phases use."""
    return SimpleNamespace(
        cfg=cfg, ends=None, actor=group, reference=group, critic=group,
        phase=lambda name: nullcontext(), note_counted=lambda role, results: None,
    )  # fmt: skip


def config(options: argparse.Namespace) -> RunConfig:
    sections = {
        "cluster": {"device": "cpu", "gpus_per_node": options.ranks},
        "model": {"path": "org/model", "dtype": "float32"},
        "algorithm": {"advantage": "gae", "kl_coef": 0.01, "kl_in": "loss"},
        "reward": {"function": "math_verify"},
        "rollout": {"samples_per_prompt": GROUP, "kv_cache": "1MiB", "max_new_tokens": options.tokens},
        "train": {"steps": 1, "epochs": 2, "prompts_per_step": options.samples // GROUP, "micro_batch_tokens": 8192},
        "data": {"train": "org/data", "max_prompt_tokens": PROMPT_TOKENS},
    }
    return resolve(RunConfig.model_validate(sections))


def draw(options: argparse.Namespace) -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for number in range(options.samples):
        if number % GROUP == 0:
            prompt = Prompt(number // GROUP, "", rng.integers(VOCABULARY, size=PROMPT_TOKENS).tolist())
        ids = rng.integers(VOCABULARY, size=options.tokens).tolist()
        samples.append(Sample(prompt, number // GROUP, ids, [], "", False, 0))
    return samples


if __name__ == "__main__":
    main()
