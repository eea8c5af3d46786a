"""PPO with all four roles, as in profiles/cpu_ppo.yaml: live with tensor parallel 2, then the same rollouts on ZeRO-3."""

from __future__ import annotations

import pytest

from launch.tiny_models import make_tiny_llama, make_tiny_reward
from tests.integration.runs import PROFILES, run

LOSSES = ("loss/policy", "loss/value", "kl/reference", "grad_norm/critic")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    actor, reward = make_tiny_llama(folder / "actor"), make_tiny_reward(folder / "reward")
    overrides = [f"model.path={actor}", f"reward.model={reward}", "cluster.dashboard=false"]
    lines = run(PROFILES / "cpu_ppo.yaml", folder / "live", *overrides, f"rollout.record={folder / 'rollouts.jsonl'}")
    return folder, overrides, lines


def test_a_live_run_learns_values_and_holds_to_the_reference(recorded):
    folder, _, lines = recorded
    assert len(lines) == 3
    assert all(line["loss/value"] > 0 and line["kl/reference"] is not None for line in lines)
    assert lines[0]["kl/reference"] == pytest.approx(0, abs=1e-5), "actor and reference start equal"
    assert lines[-1]["lr/critic"] == 5e-4
    assert (folder / "live" / "model" / "model.safetensors").exists()


def test_stage_3_takes_the_same_steps_on_the_same_rollouts(recorded):
    """The other stages: tests/e2e/test_ppo_matrix.py."""
    folder, overrides, lines = recorded
    stages = [f"{role}.zero_stage=3" for role in ("actor", "critic", "reference")]
    replayed = run(
        PROFILES / "cpu_ppo.yaml",
        folder / "stage3",
        *overrides,
        *stages,
        f"rollout.replay={folder / 'rollouts.jsonl'}",
    )
    for key in LOSSES:
        assert [line[key] for line in replayed] == pytest.approx([line[key] for line in lines], abs=1e-4), key
