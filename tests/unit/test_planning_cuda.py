"""Plans for CUDA without a GPU: contexts, communicators, an engine's passes, weight syncs and torch's allocator."""

from __future__ import annotations

import json

import pytest

from hybrid.config import RunConfig, machine
from hybrid.planning import calibration
from hybrid.planning.facts import MachineFacts, ProcessBytes, batched_tokens, stated_facts
from hybrid.planning.known_gpus import Gpu, find_gpu
from hybrid.planning.machine import predictor
from hybrid.planning.machine_use import communicators
from hybrid.planning.predict import predict
from hybrid.planning.prediction import LOADING, Prediction
from hybrid.planning.shapes import shapes
from tests.unit.planned_model import GIB, MIB, VOCABULARY, planned_model
from tests.unit.planned_model import config as planned_config

SEQUENCES = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return planned_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model):
    """The profile on CUDA, with changes of its sections."""

    def make(**changes) -> RunConfig:
        cuda = {"cluster": {"device": "cuda"}, "memory": {"tier": "file"}}
        return planned_config(model, **(cuda | {name: cuda.get(name, {}) | keys for name, keys in changes.items()}))

    return make


def parts(prediction: Prediction, phase: str) -> dict[str, int]:
    return next(use.parts for use in prediction.phases if use.phase == phase)


@pytest.mark.parametrize("bucket_mib", [1, 16, 2048])
def test_a_sync_holds_a_bucket_twice_at_most_the_model(config, model, bucket_mib):
    """The staging buffer of the actor and the copy that vLLM's worker makes of it, on the same GPU. On CPU there is one, shared."""
    for device in ("cuda", "cpu"):
        cfg = config(cluster={"device": device}, rollout={"weight_bucket": bucket_mib * MIB})
        found = parts(predict(cfg, MachineFacts()), "sync")
        whole, largest = 2 * shapes(model, "policy").elements, 2 * VOCABULARY * 512
        wanted = min(whole, max(bucket_mib * MIB, largest))
        assert found["weight bucket"] == wanted
        assert found.get("copy of the bucket") == (wanted if device == "cuda" else None)


def test_a_layer_in_two_buckets_is_there_twice(config, model):
    """vLLM keeps what earlier buckets brought of a layer, whole, and puts the layer together when the rest has come."""
    layer = 2 * sum(n for (name, _), n in _sized(model) if ".layers.3." in name)
    split = parts(predict(config(rollout={"weight_bucket": MIB}), MachineFacts()), "sync")
    assert split["layer across buckets"] == layer
    assert split["layer in transfer"] == 2 * VOCABULARY * 512, "the embedding is larger; a tensor is never cut"
    assert "layer across buckets" not in parts(predict(config(rollout={"weight_bucket": GIB}), MachineFacts()), "sync")
    on_cpu = predict(config(cluster={"device": "cpu"}, rollout={"weight_bucket": MIB}), MachineFacts())
    assert "layer across buckets" not in parts(on_cpu, "sync")


def _sized(path):
    found = shapes(path, "policy")
    return list(zip(found.parameters, found.sizes, strict=True))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 1),
        ({"cluster": {"gpus_per_node": 1}}, 0),
        ({"actor": {"zero_stage": 3}}, 1),
        ({"algorithm": {"kl_coef": 0.1}}, 1),
        ({"algorithm": {"kl_coef": 0.1}, "reference": {"zero_stage": 3}}, 2),
        ({"algorithm": {"advantage": "gae"}}, 2),
        ({"rollout": {"tensor_parallel_size": 2}}, 3),
    ],
)
def test_communicators_are_those_that_something_is_sent_over(config, changes, wanted):
    cfg = config(**changes)
    assert communicators(cfg) == wanted
    assert predict(cfg, MachineFacts(communicator=100)).overhead.get("NCCL communicators", 0) == 100 * wanted


@pytest.mark.parametrize(
    ("gpu", "tokens"),
    [("H100", 16384), ("H200", 16384), ("B200", 16384), ("A100 80GB", 8192), ("A100-40GB", 8192), ("A10", 8192), ("80GiB", 16384)],
)  # fmt: skip
def test_vllm_takes_fewer_tokens_on_small_gpus_and_every_a100(gpu, tokens):
    assert batched_tokens(find_gpu(gpu)) == tokens


def test_an_engines_pass_is_there_while_it_generates_and_loads(config):
    """Logits of all sequences, ten times in fp32: more than the activations of this narrow model. Asleep the engine keeps its graphs."""
    facts = MachineFacts(graphs=7 * MIB, batched_tokens=4096)
    found = predict(config(), facts)
    sampler = 10 * SEQUENCES * VOCABULARY * 4
    assert parts(found, "generate") == parts(found, "evaluate") == {"sampler": sampler}
    assert parts(found, "init")[f"{LOADING}rollout"] == sampler
    assert found.overhead["CUDA graphs"] == 7 * MIB
    assert all("sampler" not in use.parts for use in found.phases if use.phase not in ("generate", "evaluate"))
    eager = predict(config(rollout={"enforce_eager": True}), facts)
    assert "CUDA graphs" not in eager.overhead
    few = parts(predict(config(rollout={"max_num_seqs": 8}), facts), "generate")
    assert few == {"engine activations": 8 * 256 * (4 * 512 + 3 * 1024) * 2}, "no more tokens than its sequences have"


def test_fixed_segments_keep_more_than_expandable_ones(config):
    """The actor's allocator has a share of its tenants too; an engine's lie in pools of their own."""
    cfg = config(algorithm={"advantage": "gae"})
    plain, rounded = (
        predict(cfg, MachineFacts()),
        predict(cfg, MachineFacts(allocator_share=0.05, expandable_share=0.01)),
    )

    def share_of(phase, role, *tenants):
        extra = parts(rounded, phase)["allocator rounding"]
        there = sum(plain.tenant(role, part).device_bytes for part in tenants)
        return extra / (sum(parts(plain, phase).values()) + there)

    whole = ("weights", "gradients", "optimizer")
    assert share_of("train_actor", "actor", *whole) == pytest.approx(0.05, abs=1e-6)
    assert share_of("train_critic", "critic", *whole) == pytest.approx(0.01, abs=1e-6)
    assert share_of("generate", "rollout") == pytest.approx(0.05, abs=1e-6)
    assert share_of("sync", "actor", "weights") == pytest.approx(0.05, abs=1e-6)
    assert 0.01 < share_of("forward", "actor", "weights") < 0.05
    before, after = parts(plain, "init"), parts(rounded, "init")
    loads = {name.removeprefix(LOADING): after[name] / size for name, size in before.items()}
    assert loads == pytest.approx({"actor": 1.05, "critic": 1.01, "rollout": 1.05})


def test_a_host_optimizer_is_not_in_the_allocator_of_the_gpu(config):
    facts = MachineFacts(allocator_share=0.05)
    on_gpu, on_cpu = (predict(config(actor={"optimizer": place}), facts) for place in ("device", "cpu"))
    optimizer = on_gpu.tenant("actor", "optimizer").device_bytes
    saved = parts(on_gpu, "train_actor")["allocator rounding"] - parts(on_cpu, "train_actor")["allocator rounding"]
    assert saved == pytest.approx(0.05 * (optimizer - on_cpu.tenant("actor", "gradients").device_bytes), rel=0.3)


def test_contexts_are_small_on_small_gpus(config):
    cfg = config()
    per_process = {name: stated_facts(cfg, name).role.private // MIB for name in ("A10", "A100", "H100", "L4")}
    assert per_process == {"A10": 300, "A100": 700, "H100": 700, "L4": 700}
    assert predict(cfg, stated_facts(cfg, "A10")).overhead["CUDA contexts"] == 2 * 300 * MIB


@pytest.mark.parametrize(
    ("name", "rate", "tokens"), [("NVIDIA H100 80GB HBM3", 64e9, 16384), ("NVIDIA A100-SXM4-80GB", 32e9, 8192), ("Voodoo", 32e9, 16384)]
)  # fmt: skip
def test_the_gpu_that_is_here_is_known_by_its_name(config, monkeypatch, name, rate, tokens):
    """Its bytes decide vLLM's tokens, also where a run is given fewer."""
    cfg = config(memory={"tier": "pinned"})
    monkeypatch.setattr(machine, "gpu_name", lambda: name)
    monkeypatch.setattr(machine, "gpu_bytes", lambda: 79 * GIB)
    facts = stated_facts(cfg)
    assert (facts.name, facts.device_bytes, facts.batched_tokens) == (name, 79 * GIB, tokens)
    assert facts.come_bytes_per_s == pytest.approx(0.6 * rate)


def test_measured_communicators_and_graphs_replace_stated_ones(config, monkeypatch, tmp_path):
    from dataclasses import asdict

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cfg = config(rollout={"tensor_parallel_size": 2, "custom_all_reduce": False})
    process = ProcessBytes(3 * MIB)
    found = calibration.Calibration("cuda", "file", process, process, 8e9, 4e9, communicator=5 * MIB, graphs=11 * MIB)
    calibration._write({calibration.machine_key(): asdict(found)})
    overhead = predictor(cfg)[0](cfg).overhead
    assert overhead == {"CUDA contexts": 6 * MIB, "NCCL communicators": 15 * MIB, "CUDA graphs": 11 * MIB}


def test_a_calibration_of_before_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    process = {"private": 1, "shared": 2}
    row = {
        "device": "cpu",
        "tier": "file",
        "role": process,
        "engine": process,
        "leave_bytes_per_s": 1.0,
        "come_bytes_per_s": 1.0,
    }
    calibration.calibration_file().parent.mkdir()
    calibration.calibration_file().write_text(json.dumps({calibration.machine_key(): row}))
    assert (calibration.stored().communicator, calibration.stored().graphs) == (0, 0)


def test_a_gpu_of_a_size_is_on_no_list():
    assert find_gpu("80GiB") == Gpu("80GiB", 80 * GIB, 32e9, 0.0)
