"""Engines on a real pool: equal prompts to equal engines with equal seeds, synced by handle, tested against the trainer's model."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import ray
import torch
from safetensors.torch import load_file

from hybrid.data.samples import Prompt
from hybrid.errors import RolloutError, WorkerDied
from hybrid.pool import open_pool
from hybrid.rollout.group import EngineGroup
from hybrid.rollout.requests import EngineOptions, SamplingOptions
from hybrid.rollout.sender import make_sender
from launch.tiny_models import make_tiny_llama

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

KV_BYTES = 64 * 2**20
SAMPLED = SamplingOptions(max_new_tokens=10, n=3)
TEST_PROMPTS = [[5, 6, 7, 8], [40, 41, 42]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [make_tiny_llama(tmp_path_factory.mktemp("model"), seed=seed) for seed in (0, 1)]


@pytest.fixture
def pool(tmp_path):
    pool = open_pool(
        num_nodes=1, gpus_per_node=2, processes_per_bundle=2, device="cpu", log_dir=tmp_path / "logs", dashboard=False
    )
    yield pool
    pool.stop()


def start(pool, folder, tensor_parallel_size=1) -> EngineGroup:
    options = EngineOptions(str(folder), "float32", "cpu", KV_BYTES, 128, tensor_parallel_size, max_num_seqs=16)
    group = EngineGroup(pool, options, repeatable=True, seed=0, call_timeout_s=120)
    group.start(timeout_s=200)
    return group


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index=i, text=f"{i}", token_ids=list(range(10 + i, 14 + 2 * i))) for i in range(count)]


def scorer(folder):
    """Stands for the trainer: log-probs from transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def score(prompt_rows, response_rows):
        rows = []
        for prompt, response in zip(prompt_rows, response_rows, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            rows.append(logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].tolist())
        return rows

    return score


def test_two_engines_generate_sleep_and_sync_as_one(pool, models):
    old, new = models
    group = start(pool, old)
    assert [(t.part, t.movable) for t in group.tenants()] == [("weights", False), ("kv_cache", True)]

    asked = prompts(5)
    samples = group.generate(asked, SAMPLED, step=0, version=0)
    assert [s.group for s in samples] == [i for i in range(5) for _ in range(3)]
    assert all(s.prompt.index == s.group and len(s.logprobs) == len(s.token_ids) for s in samples)
    mixed = group.generate(asked, SAMPLED, step=0, version=0, with_greedy=True)
    assert [s.greedy for s in mixed] == [False, False, False, True] * 5
    alone = group.generate(asked, replace(SAMPLED, n=1, temperature=0.0), step=0, version=0)
    assert [s.token_ids for s in mixed if s.greedy] == [s.token_ids for s in alone]
    assert [s.token_ids for s in mixed if not s.greedy] == [s.token_ids for s in samples], "the draws are the same"
    again = group.generate(asked, SAMPLED, step=0, version=0)
    assert [(s.token_ids, s.logprobs) for s in again] == [(s.token_ids, s.logprobs) for s in samples]
    later = group.generate(asked, SAMPLED, step=1, version=0)
    assert [s.token_ids for s in later] != [s.token_ids for s in samples]

    left = group.leave(["kv_cache"], deadline_s=30)
    assert [(m.rank, m.part) for m in left] == [(0, "kv_cache"), (1, "kv_cache")]
    assert all(m.before_bytes - m.after_bytes == pytest.approx(m.counted_bytes, rel=0.1) for m in left)
    with pytest.raises(RolloutError, match="kv_cache"):
        group.generate(asked, SAMPLED, step=1, version=0)

    weights = load_file(new / "model.safetensors")
    make_sender("shm", 0, group.handles, bucket_bytes=2**18, timeout_s=60).send([list(weights.items())], 1)
    group.come(["kv_cache"], deadline_s=30)
    assert group.self_test(scorer(new), TEST_PROMPTS, bound=1e-3, version=1) < 1e-3
    with pytest.raises(RolloutError, match=r"Self-test .* rollout rank 0 .* differ by"):
        group.self_test(scorer(old), TEST_PROMPTS, bound=1e-3, version=1)
    with pytest.raises(RolloutError, match="version 0 was asked for"):
        group.generate(asked, SAMPLED, step=1, version=0)
    assert all(s.weight_version == 1 for s in group.generate(asked[:1], SAMPLED, step=2, version=1))
    assert [(p.role, p.rank) for p in group.peaks(timeout_s=30)] == [("rollout", 0), ("rollout", 1)]

    victim = ray.get(group.handles[1].where.remote(), timeout=30)["pid"]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="rollout rank 1"):
        group.generate(asked, SAMPLED, step=3, version=1)


def test_an_engine_over_two_gpus_holds_both_and_takes_new_weights(pool, models):
    old, new = models
    group = start(pool, old, tensor_parallel_size=2)
    assert [(w.role, w.rank) for w in pool.workers] == [("rollout", 0), ("rollout-holder", 1)]
    assert group.self_test(scorer(old), TEST_PROMPTS, bound=1e-3, version=0) < 1e-3
    group.leave(["kv_cache"], deadline_s=30)
    weights = load_file(new / "model.safetensors")
    make_sender("shm", 0, group.handles, bucket_bytes=2**18, timeout_s=60).send([list(weights.items())], 1)
    group.come(["kv_cache"], deadline_s=30)
    assert group.self_test(scorer(new), TEST_PROMPTS, bound=1e-3, version=1) < 1e-3
    group.stop()
