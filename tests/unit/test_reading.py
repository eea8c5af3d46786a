"""Models of roles that do not train are read straight to their device."""

from types import SimpleNamespace

import pytest
import torch

from hybrid.roles import actor, models
from hybrid.roles.models import ModelOptions, load_policy, load_reward_model, reading
from launch.tiny_models import make_tiny_llama, make_tiny_reward

GPU = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch):
    """Arguments of `from_pretrained`; what it is told to read to a GPU it reads to the CPU, in transformers' own way."""
    seen = []

    def recorded(auto):
        read = auto.from_pretrained

        def from_pretrained(*args, **kwargs):
            seen.append(kwargs.get("device_map"))
            if "device_map" in kwargs:
                kwargs["device_map"] = {"": torch.device("cpu")}
            return read(*args, **kwargs)

        return from_pretrained

    for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        auto = getattr(models, name)
        monkeypatch.setattr(models, name, SimpleNamespace(from_pretrained=recorded(auto)))
    return seen


def weights(model):
    return {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize(("device", "given"), [(None, {}), (torch.device("cpu"), {}), (GPU, {"device_map": {"": GPU}})])
def test_only_a_gpu_is_named_to_transformers(device, given):
    assert reading(device) == given


def test_a_model_read_to_a_device_is_the_same_one(tmp_path, asked):
    options = ModelOptions(str(make_tiny_llama(tmp_path / "llama")), torch.bfloat16, "sdpa")
    whole, read = weights(load_policy(options)), weights(load_policy(options, GPU))
    scorer = str(make_tiny_reward(tmp_path / "reward"))
    whole |= weights(load_reward_model(scorer, torch.bfloat16, False))
    read |= weights(load_reward_model(scorer, torch.bfloat16, False, GPU))
    assert asked == [None, {"": GPU}] * 2
    assert whole.keys() == read.keys() and all(torch.equal(whole[name], read[name]) for name in whole)
    assert all(tensor.untyped_storage().resizable() for tensor in read.values())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_reference_is_read_to_its_gpu_unless_it_is_partitioned(monkeypatch, stage):
    def load(options, device):
        return SimpleNamespace(read_to=device, to=lambda device: SimpleNamespace(read_to=device))

    monkeypatch.setattr(actor, "load_partitioned", lambda stage, dtype, load: load())
    monkeypatch.setattr(actor, "load_policy", load)
    monkeypatch.setattr(actor, "FrozenModel", lambda model, stage, dtype, overlap_comm: model)
    worker = SimpleNamespace(device=GPU, settle=dict)
    actor.ReferenceWorker.load(worker, ModelOptions("m", torch.bfloat16, "sdpa"), stage)
    assert worker.model.read_to == (GPU if stage < 3 else None)
