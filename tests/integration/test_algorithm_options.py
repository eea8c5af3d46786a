"""Options of the algorithm in whole runs: what the profile asks for happens, and is in the metrics."""

from __future__ import annotations

import json

import pytest

from hybrid.data.rollouts import load_rollouts
from launch.tiny_models import make_tiny_llama, make_tiny_reward
from tests.integration.runs import REWARD, profile, run

COARSE = '''

def coarse(prompts, responses, labels, **columns):
    """0 or 1, so that the samples of a prompt often score alike."""
    return [float(r.count("a") + r.count("e") > 1) for r in responses]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def model(folder):
    return make_tiny_llama(folder / "model")


def test_remax_with_dynamic_sampling_and_everything_around_it(folder, model):
    path = profile(
        folder,
        model,
        cluster={"gpus_per_node": 1},
        algorithm={
            "advantage": "remax",
            "dynamic_sampling": True,
            "correction": "tis",
            "entropy_coef": 0.01,
            "kl_coef": 0.1,
            "kl_kind": "k1",
            "kl_in": "reward",
            "kl_target": 1e-6,
            "kl_horizon": 16,
        },
        reward={
            "function": "reward.py:coarse",
            "extra": {"reward.py:even": 0.0},
            "normalise": True,
            "unfinished_penalty": 0.5,
        },
        rollout={"min_new_tokens": 8},
        train={"prompts_per_step": 4, "prompts_per_update": 2, "steps": 3, "micro_batch_tokens": 512},
    )
    (folder / "reward.py").write_text(REWARD + COARSE)
    lines = run(path, folder / "remax", f"rollout.record={folder / 'remax.jsonl'}")
    for line in lines:
        assert 1 <= line["rollout/rounds"] <= 5 or line["rollout/waited_prompts"] >= 4
        assert line["policy/entropy"] > 0
        assert 0 < line["correction/ess"] < 1.00001
        # C08: with one of 512 tokens too many in the softmax, log-probs of the first 8 tokens are log(511 / 512) off, 2e-3.
        assert line["sampler/logprob_diff_mean"] is None or line["sampler/logprob_diff_mean"] < 1e-4
    assert lines[0]["kl/coef"] == 0.1
    assert lines[1]["kl/coef"] != 0.1, "the coefficient follows the KL"
    recorded = load_rollouts(folder / "remax.jsonl")
    for samples in recorded.values():
        assert [s.group for s in samples if s.greedy] == [0, 1, 2, 3]
        assert len([s for s in samples if not s.greedy]) == 16
    same = run(path, folder / "replayed", f"rollout.replay={folder / 'remax.jsonl'}")
    assert [line["reward/mean"] for line in same] == [line["reward/mean"] for line in lines]


def test_ppo_whose_critic_starts_from_a_reward_model_and_trains_first(folder, model):
    path = profile(
        folder,
        model,
        cluster={"gpus_per_node": 1},
        critic={"path": str(make_tiny_reward(folder / "critic")), "learning_rate": 1e-3, "zero_stage": 3},
        algorithm={
            "advantage": "gae",
            "critic_only_steps": 1,
            "kl_coef": 0.01,
            "kl_bound": 1e-9,
            "kl_bound_action": "warn",
        },
        rollout={"samples_per_prompt": 2, "max_new_tokens": 12, "kv_cache": "32MiB", "max_num_seqs": 16},
    )
    lines = run(path, folder / "ppo")
    assert [line["loss/policy"] is None for line in lines] == [True, False, False]
    assert all(line["loss/value"] > 0 and line["value/explained_variance"] is not None for line in lines)
    versions = [json.loads(row) for row in (folder / "ppo" / "samples.jsonl").open()]
    assert {(row["step"], row["weight_version"]) for row in versions} == {(1, 0), (2, 0), (3, 1)}
    assert lines[-1]["kl/response"] > 0
