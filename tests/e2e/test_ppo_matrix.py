"""profiles/cpu_ppo.yaml on every ZeRO stage: live with one engine over two GPUs and with two engines, and on equal rollouts."""

from __future__ import annotations

import pytest

from launch.tiny_models import make_tiny_llama, make_tiny_reward
from tests.integration.runs import PROFILES, run

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [f"model.path={make_tiny_llama(folder / 'actor')}", f"reward.model={make_tiny_reward(folder / 'reward')}"]


def stages(stage: int) -> list[str]:
    frozen = 3 if stage == 3 else 0
    return [f"actor.zero_stage={stage}", f"critic.zero_stage={stage}", f"reference.zero_stage={frozen}"]


@pytest.mark.parametrize("tensor_parallel", [2, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_live_run_ends_cleanly(overrides, tmp_path, stage, tensor_parallel):
    lines = run(
        PROFILES / "cpu_ppo.yaml",
        tmp_path / "run",
        *overrides,
        *stages(stage),
        f"rollout.tensor_parallel_size={tensor_parallel}",
    )
    assert len(lines) == 3
    assert all(line["train/skipped_steps"] == 0 for line in lines)


def test_all_stages_lose_the_same_on_equal_rollouts(overrides, tmp_path):
    rollouts = tmp_path / "rollouts.jsonl"
    live = run(PROFILES / "cpu_ppo.yaml", tmp_path / "live", *overrides, f"rollout.record={rollouts}")
    for stage in STAGES:
        replayed = run(
            PROFILES / "cpu_ppo.yaml",
            tmp_path / f"stage{stage}",
            *overrides,
            *stages(stage),
            f"rollout.replay={rollouts}",
        )
        for key in ("loss/policy", "loss/value"):
            assert [line[key] for line in replayed] == pytest.approx([line[key] for line in live], abs=1e-4)
