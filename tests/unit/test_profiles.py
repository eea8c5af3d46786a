"""The profiles that come with hybrid: each passes a dry run on a machine without GPUs, and the quickstart's reward rewards."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hybrid.config import load_run, resolve
from hybrid.config.machine import visible_gpus

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))


@pytest.fixture
def made_models(tmp_path, monkeypatch) -> None:
    """Folders such as launch/make_models.py makes, found from the working directory."""
    for name, heads in {"SmolLM2-135M-Instruct": 9, "tiny-llama": 4, "tiny-reward": 4}.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        config = f'{{"model_type": "llama", "num_attention_heads": {heads}, "hidden_size": {heads * 32}, "num_hidden_layers": 2}}'
        (folder / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)


def test_the_profiles_are_those_that_the_readme_promises():
    assert set(NAMES) >= {"quickstart", "cpu_ppo", "1x1_0.5b_grpo", "1x8_7b_grpo", "1x8_8b_ppo", "2x8_32b_grpo"}


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_is_sound_and_says_its_hardware(name, made_models):
    cfg = resolve(load_run(PROFILES / f"{name}.yaml"))
    assert (PROFILES / f"{name}.yaml").read_text().startswith("# Hardware:")
    assert cfg.rollout.engines * cfg.rollout.tensor_parallel_size == cfg.world_size
    nodes, gpus, size, _ = (
        (*name.split("x", 1)[:1], *name.split("x", 1)[-1].split("_")) if name[0].isdigit() else (0, 0, 0, 0)
    )
    if nodes:
        assert (cfg.cluster.num_nodes, cfg.cluster.gpus_per_node) == (int(nodes), int(gpus))
        assert f"-{size}-".lower() in cfg.model.path.lower()
        assert cfg.cluster.device == "cuda"


def test_cpu_ppo_shows_every_role_on_two_gpus_under_one_engine(made_models):
    cfg = resolve(load_run(PROFILES / "cpu_ppo.yaml"))
    assert cfg.roles == ("actor", "critic", "reference", "reward")
    assert (cfg.cluster.device, cfg.world_size, cfg.rollout.engines, cfg.model.dtype) == ("cpu", 2, 1, "float32")
    two_engines = resolve(load_run(PROFILES / "cpu_ppo.yaml", ["rollout.tensor_parallel_size=1", "actor.zero_stage=3"]))
    assert two_engines.rollout.engines == 2


@pytest.mark.skipif(visible_gpus() > 0, reason="without GPUs two logical ones are trained on")
def test_quickstart_trains_on_two_logical_gpus_with_an_engine_each(made_models):
    cfg = resolve(load_run(PROFILES / "quickstart.yaml"))
    assert (cfg.cluster.device, cfg.world_size, cfg.rollout.engines, cfg.actor.zero_stage) == ("cpu", 2, 2, 2)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("4", 1.0),
        (" -4\n", 0.2),
        ("4 is the answer", 0.4 + 0.6 / 15),
        ("The answer is 4.", 0.4 + 0.6 / 16),
        ("5", 0.2),
        ("5 or 4", 0.2 / 6),
        ("", 0.0),
        ("four", 0.0),
    ],
)
def test_quickstart_reward_pays_for_right_and_for_saying_little_else(response, reward):
    spec = importlib.util.spec_from_file_location("quickstart_reward", PROFILES / "quickstart_reward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.score(["1 + 3 ="], [response], ["4"], difficulty=[1]) == pytest.approx([reward])
