"""The plan against what was counted and measured, on CPU: two ranks of a role without Ray, model sizes and settings of which no formula
was made. `python tests/benchmarks/plan_vs_measured.py` from the repository's root, with it on PYTHONPATH; about ten minutes on two cores;
numbers choose some of the settings.

Static: parts against the bytes of their storages. Dynamic: a step's and a forward pass's allocations above what was there, counted by
torch's allocator (its profiler's memory events). Process: the kernel's high-water mark against predicted bytes on top of a process with
a model that is not among the settings. Bounds: 1 %, 10 %, 10 %.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.tiny_models import make_tiny_llama
from tests.integration.ranks import run_ranks

MODELS = {
    "small": dict(
        hidden_size=448, intermediate_size=1216, num_hidden_layers=10, num_attention_heads=7, num_key_value_heads=1,
        head_dim=64, vocab_size=8320,
    ),
    "large": dict(
        hidden_size=640, intermediate_size=2048, num_hidden_layers=11, num_attention_heads=10, num_key_value_heads=2,
        head_dim=64, vocab_size=14080, tie_word_embeddings=True,
    ),
}  # fmt: skip
HEAP = "free in the heap"
"""Of a predicted phase: what torch's allocator does not see."""
BOUNDS = {"static": 0.01, "dynamic": 0.10, "process": 0.10}


@dataclass(frozen=True)
class Setting:
    model: str
    stage: int
    checkpointing: bool
    budget: int
    dtype: str = "bfloat16"
    role: str = "actor"


SETTINGS = [
    Setting("small", 0, False, 800),
    Setting("small", 1, False, 800),
    Setting("small", 2, True, 1600),
    Setting("small", 3, False, 1600),
    Setting("small", 2, False, 800, "float32"),
    Setting("small", 2, False, 1600, role="critic"),
    Setting("large", 0, True, 1600),
    Setting("large", 1, False, 800),
    Setting("large", 2, False, 1600),
    Setting("large", 3, False, 800),
    Setting("large", 2, True, 800),
    Setting("large", 3, True, 1600, "float32"),
]


def config(folder: str, s: Setting):
    """The resolved profile of a setting."""
    from hybrid.config import RunConfig, resolve

    trained = {"zero_stage": s.stage}
    return resolve(
        RunConfig.model_validate(
            {
                "cluster": {"device": "cpu", "gpus_per_node": 2},
                "model": {
                    "path": f"{folder}/{s.model}",
                    "dtype": s.dtype,
                    "gradient_checkpointing": s.checkpointing,
                    "attention": "sdpa",
                },
                "actor": trained,
                "critic": trained if s.role == "critic" else None,
                "algorithm": {"advantage": "gae" if s.role == "critic" else "group_norm"},
                "rollout": {"samples_per_prompt": 4, "max_new_tokens": 64},
                "train": {"steps": 1, "prompts_per_step": 32, "micro_batch_tokens": s.budget},
                "data": {"train": "reasoning_gym:chain_sum", "max_prompt_tokens": 96},
                "reward": {"function": "reasoning_gym"},
            }
        )
    )


def processes_rank(rank: int, world: int, port: int, folder: str, settings: list[Setting]) -> dict[str, int]:
    """The highest memory of this rank's process in a training step of the last setting, and what it held after the first, the base."""
    from hybrid.memory.probe import process_bytes, release_free_memory

    base, *_, last = settings
    for s in (base, last):
        worker = _worker(s.role, rank, world, folder, port)
        train, _ = _load(worker, config(folder, s), s, rank)
        train()  # the first step makes the moments
        worker.tidy()
        worker.take_peak()
        train()
        peak = worker.take_peak().peak_bytes
        if s is base:
            del worker, train
            gc.unfreeze()
            gc.collect()
            release_free_memory("cpu")
            at_rest = process_bytes().rss
    return {"base": at_rest, "process": peak}


def allocations_rank(rank: int, world: int, port: int, folder: str, s: Setting) -> dict[str, Any]:
    """Bytes of each part, and the highest that a training step and a forward pass had allocated beyond what was there before.

    Torch's profiler watches from before the model is loaded: of what it did not see come it does not see the end either."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        worker = _worker(s.role, rank, world, folder, port)
        train, forward = _load(worker, config(folder, s), s, rank)
        train()
        gc.collect()
        with record_function("measured train"):
            train()
        static = worker.count()
        gc.collect()
        with record_function("measured forward"):
            forward()
    events = profiler.profiler.kineto_results.events()
    return {"static": static} | {name: _highest(events, f"measured {name}") for name in ("train", "forward")}


def _highest(events: list, span: str) -> int:
    """Highest bytes allocated within `span`, beyond those at its start."""
    start, end = next((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == span)
    live = at_start = peak = 0
    for when, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        live += size
        if when < start:
            at_start = peak = live
        elif when <= end:
            peak = max(peak, live)
    return peak - at_start


def _worker(role: str, rank: int, world: int, folder: str, port: int):
    import torch.distributed as dist

    from hybrid.roles.actor import ActorWorker
    from hybrid.roles.critic import CriticWorker

    cls = CriticWorker if role == "critic" else ActorWorker
    ranks = list(range(world))
    worker = cls(role, rank, world, "here", "cpu", 1, 240.0, tier="file", swap_dir=f"{folder}/swap", node_ranks=ranks)
    if not dist.is_initialized():
        if rank == 0:
            worker.store = dist.TCPStore("127.0.0.1", port, world, is_master=True, wait_for_workers=False)
        worker.join("127.0.0.1", port)
    return worker


def _load(worker, cfg, s: Setting, rank: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Load the model; what trains on two full micro-batches, and what runs one forward."""
    import torch

    from hybrid.planning.micro_batch import workload
    from hybrid.roles.models import ModelOptions
    from hybrid.roles.packing import Row
    from hybrid.roles.zero import ZeroOptions

    dtype = getattr(torch, s.dtype)
    worker.load(
        ModelOptions(cfg.model.path, dtype, "sdpa", s.checkpointing),
        ZeroOptions(s.stage, dtype, (0.9, 0.95), 1e-8, 0.0, 1.0),
    )
    generator = torch.Generator().manual_seed(rank)
    draw = lambda n: torch.randint(3, 500, (n,), generator=generator).tolist()  # noqa: E731
    micro = [Row(r.group, draw(r.prompt), draw(r.response)) for r in workload(cfg, 32).rows]
    forward = lambda: worker.values([micro]) if s.role == "critic" else worker.logprobs([micro], 1.0)  # noqa: E731
    return lambda: _train(worker, s.role, [micro, micro]), forward


def _train(worker, role: str, micros: list) -> None:
    import torch

    from hybrid.roles.objective import PolicyObjective, PolicyRow, ValueRow

    if role == "critic":
        rows = [[ValueRow(r, *(torch.zeros(len(r.response)) for _ in range(2))) for r in m] for m in micros]
        worker.train(rows, 0.2, 1000.0, 1e-6)
        return
    objective = PolicyObjective(
        kind="ppo", reduction="token_mean", clip_low=0.2, clip_high=0.2, dual_clip=None, correction="none",
        correction_low=0.0, correction_high=2.0, entropy_coef=0.0, entropy_metric=True, kl_coef=0.0, kl_kind="k3",
        temperature=1.0, max_tokens=64, normalizer=1000.0, sampler_bound=None,
    )  # fmt: skip
    rows = [
        [PolicyRow(r, torch.ones(len(r.response)), torch.full((len(r.response),), -6.0), None, None) for r in m]
        for m in micros
    ]
    worker.train(rows, objective, 1e-6)


def compare(folder: str, s: Setting, row: dict) -> dict[str, float]:
    """Predicted over measured, by kind."""
    from hybrid.planning.predict import MachineFacts, predict

    prediction = predict(config(folder, s), MachineFacts())
    phases = {use.phase: use for use in prediction.phases}
    parts = {part: prediction.tenant(s.role, part).device_bytes for part in ("weights", "gradients", "optimizer")}
    ratios = {part: size / row["static"][part] if size else 1.0 for part, size in parts.items()}
    train = phases[f"train_{s.role}"]
    counted = sum(size for name, size in train.parts.items() if name != HEAP)
    ratios |= {"train": counted / row["train"], "forward": phases["forward"].working_bytes / row["forward"]}
    if s.role == "critic":
        del ratios["forward"]  # the phase's peak is the actor's
    return ratios | {"process": (row["base"] + sum(parts.values()) + train.working_bytes) / row["process"]}


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for name, fields in MODELS.items():
            make_tiny_llama(Path(folder) / name, **fields)
        make_tiny_llama(Path(folder) / "base")
        base = Setting("base", 2, False, 800)
        worst = dict.fromkeys(BOUNDS, 0.0)
        print("predicted / measured", flush=True)
        for s in [SETTINGS[int(number)] for number in sys.argv[1:]] or SETTINGS:
            # Pairs of fresh processes: what one setting leaves in the allocator would count for the next.
            row = run_ranks(allocations_rank, folder, s, timeout_s=300)[0]
            row |= run_ranks(processes_rank, folder, [base, s], timeout_s=300)[0]
            ratios = compare(folder, s, row)
            for name, ratio in ratios.items():
                kind = name if name == "process" else "dynamic" if name in ("train", "forward") else "static"
                worst[kind] = max(worst[kind], abs(ratio - 1))
            label = f"{s.role} {s.model} ZeRO-{s.stage} {s.dtype} {'ckpt' if s.checkpointing else '    '} {s.budget:>4}"
            sizes = ", ".join(f"{name} {row[name] / 2**20:.0f}" for name in ("train", "forward", "process"))
            print(f"{label:42}", " ".join(f"{n} {r:.3f}" for n, r in ratios.items()), f"| MiB: {sizes}", flush=True)
    for kind, bound in BOUNDS.items():
        print(
            f"{kind}: off by at most {worst[kind]:.1%} (bound {bound:.0%}): {'ok' if worst[kind] <= bound else 'MISSED'}"
        )
    return int(any(worst[kind] > bound for kind, bound in BOUNDS.items()))


if __name__ == "__main__":
    sys.exit(main())
