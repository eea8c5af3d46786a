"""Plans against what others measured on GPUs and published (tests/golden/published_memory.json)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hybrid.config import RunConfig, resolve
from hybrid.planning.facts import MachineFacts, stated_facts
from hybrid.planning.known_gpus import find_gpu
from hybrid.planning.predict import predict
from hybrid.planning.prediction import Prediction

GIB = 2**30
PUBLISHED = json.loads((Path(__file__).parents[1] / "golden" / "published_memory.json").read_text(encoding="utf-8"))


class Planned:
    """The plan of a GRPO run of one engine on two GPUs, or one, of which a figure is asked."""

    def __init__(self, folder: Path, gpu: str, model: str, tp: int, kv_cache_gib: float = 1.0, max_num_seqs: int = 256):
        self.gpu, self.tp, self.seqs, self.vocabulary = gpu, tp, max_num_seqs, PUBLISHED["models"][model]["vocab_size"]
        rollout = {"samples_per_prompt": 2, "max_new_tokens": 32, "kv_cache": int(kv_cache_gib * GIB)}
        rollout |= {"max_num_seqs": max_num_seqs, "tensor_parallel_size": tp}
        sections = {
            "cluster": {"device": "cuda", "gpus_per_node": 2},
            "model": {"path": str(folder / model), "dtype": "bfloat16", "attention": "sdpa"},
            "actor": {"zero_stage": 2},
            "rollout": rollout,
            "train": {"steps": 1, "prompts_per_step": 4, "micro_batch_tokens": 128},
            "data": {"train": "reasoning_gym:chain_sum", "max_prompt_tokens": 32},
            "reward": {"function": "reasoning_gym"},
            "memory": {"device_bytes": find_gpu(gpu).nbytes, "tier": "file"},
        }
        self.cfg: RunConfig = resolve(RunConfig.model_validate(sections))

    @property
    def facts(self) -> MachineFacts:
        return stated_facts(self.cfg, self.gpu)

    @property
    def prediction(self) -> Prediction:
        return predict(self.cfg, self.facts)

    def parts(self, phase: str) -> dict[str, int]:
        return next(use.parts for use in self.prediction.phases if use.phase == phase)

    def asleep(self) -> float:
        """All that is there in a phase of nobody's, without the context and the communicator of the actor."""
        overhead = self.prediction.overhead
        idle = sum(overhead.values()) + sum(self.parts("score").values())
        return (idle - overhead["CUDA contexts"] // 2 - overhead["NCCL communicators"]) / GIB

    def of_nccl(self) -> int:
        return self.prediction.overhead["NCCL communicators"]

    def fragments(self) -> float:
        held = dict(self.parts("train_actor"))
        extra = held.pop("allocator rounding")
        tenants = [self.prediction.tenant("actor", part) for part in ("weights", "gradients", "optimizer")]
        return extra / (sum(held.values()) + sum(tenant.device_bytes for tenant in tenants))


FIGURES: dict[str, Callable[[Planned], float]] = {
    "engine weights": lambda plan: plan.prediction.tenant("rollout", "weights").device_bytes / GIB,
    "KV cache tokens": lambda plan: plan.prediction.kv_cache.tokens,
    "engine asleep, beyond weights and KV": Planned.asleep,
    "NCCL of an engine": lambda plan: (plan.of_nccl() - plan.facts.communicator) / GIB,
    "communicator": lambda plan: plan.of_nccl() / GIB,
    "CUDA graphs": lambda plan: plan.prediction.overhead["CUDA graphs"] / GIB,
    "sampler, in fp32 tensors of sequences x vocabulary": lambda plan: (
        plan.parts("generate")["sampler"] / (plan.seqs * plan.vocabulary * 4)
    ),
    "context of a process": lambda plan: plan.prediction.overhead["CUDA contexts"] / 2 / GIB,
    "batched tokens": lambda plan: plan.facts.batched_tokens,
    "fragmentation with fixed segments, of all that torch allocated": Planned.fragments,
    "fragmentation with expandable segments, of a full GPU": lambda plan: (
        plan.facts.expandable_share * find_gpu(plan.gpu).nbytes / GIB
    ),
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Callable[[str], Planned]:
    folder = tmp_path_factory.mktemp("published")
    for name, config in PUBLISHED["models"].items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return cache(lambda configuration: Planned(folder, **json.loads(configuration)))


def name_of(row: dict[str, Any]) -> str:
    return " ".join([row["figure"], *map(str, row["configuration"].values())])


@pytest.mark.parametrize("row", PUBLISHED["figures"], ids=name_of)
def test_a_plan_is_what_others_measured(row, planned):
    configuration, published = row["configuration"], row["published"]
    least, most = published if isinstance(published, list) else (published, published)
    if row["figure"] == "memory of a GPU":
        found = find_gpu(configuration["gpu"]).nbytes / GIB
    else:
        found = FIGURES[row["figure"]](planned(json.dumps(configuration)))
    said = f"{name_of(row)}: planned {found:.3f} {row['unit']}, published {published} ({row['source']})"
    assert least * (1 - row["bound"]) <= found <= most * (1 + row["bound"]), said


def test_every_figure_names_its_source():
    assert all(row["source"] and row["unit"] and 0 <= row["bound"] <= 0.06 for row in PUBLISHED["figures"])
