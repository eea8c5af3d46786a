"""From a resolved profile to bytes: what moves what, on tiny models; no weights are there."""

from __future__ import annotations

import json

import pytest
import torch

from hybrid.errors import ConfigError
from hybrid.planning import working_set
from hybrid.planning.calibration import calibration_file
from hybrid.planning.engine import engine_weights, kv_cache, vocab_shard
from hybrid.planning.facts import ProcessBytes, stated_facts
from hybrid.planning.heap import KEPT_SHARE
from hybrid.planning.known_gpus import find_gpu, known_gpus
from hybrid.planning.micro_batch import packed_tokens, workload
from hybrid.planning.passes import packed_pass
from hybrid.planning.predict import MachineFacts, predict
from hybrid.planning.shapes import read_config, shapes
from hybrid.planning.working_set import MOMENTS
from hybrid.roles import reach
from tests.tiny_architectures import tiny_architecture_config
from tests.unit.planned_model import MIB, config, planned_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return planned_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def plan(model):
    def of(**changes):
        return predict(config(model, **changes), MachineFacts())

    return of


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_export_holds_the_model_and_the_pieces_of_one_layers_experts(tmp_path, device):
    tiny_architecture_config("qwen3_moe").save_pretrained(tmp_path)
    prediction = predict(config(str(tmp_path), cluster={"device": device, "gpus_per_node": 2}), MachineFacts())
    held = prediction.host if device == "cuda" else {}
    held |= next(use.parts for use in prediction.phases if use.phase == "checkpoint")
    assert held["exported weights"] == 2 * shapes(str(tmp_path), "policy").elements
    assert held["experts taken apart"] == 2 * 4 * (2 * 64) * 128  # gate and up of 4 experts, 64 x 128 each


def working(prediction, phase: str) -> int:
    """Bytes of tensors."""
    parts = next(use.parts for use in prediction.phases if use.phase == phase)
    return sum(size for name, size in parts.items() if name != "free in the heap")


def test_tenants_are_those_that_the_run_will_have(plan):
    keys = [t.key for t in plan(algorithm={"advantage": "gae", "kl_coef": 0.1}).tenants]
    parts = ("weights", "gradients", "optimizer")
    trained = [(role, part) for role in ("actor", "critic") for part in parts]
    assert keys == [*trained, ("reference", "weights"), ("rollout", "weights"), ("rollout", "kv_cache")]


def test_a_frozen_model_is_copied_out_once_and_engine_weights_stay_on_cpu(plan):
    found = plan(algorithm={"kl_coef": 0.1})
    reference, rollout = found.tenant("reference", "weights"), found.tenant("rollout", "weights")
    assert reference.leave_bytes == 0 and reference.come_bytes == reference.device_bytes > 0
    assert reference.host_bytes == -(-reference.device_bytes // 2), "one copy for the two GPUs of the node"
    assert not rollout.movable


def test_checkpointing_and_a_smaller_budget_take_less(plan):
    whole = working(plan(), "train_actor")
    assert working(plan(model={"gradient_checkpointing": True}), "train_actor") < 0.7 * whole
    assert working(plan(train={"micro_batch_tokens": 512}), "train_actor") < 0.7 * whole


def test_zero_3_gathers_what_zero_2_holds(plan):
    by_stage = {stage: plan(actor={"zero_stage": stage}) for stage in (2, 3)}
    weights = {stage: p.tenant("actor", "weights").device_bytes for stage, p in by_stage.items()}
    gathered = next(use.parts for use in by_stage[3].phases if use.phase == "forward")["gathered parameters"]
    assert weights[3] < 0.6 * weights[2] and gathered >= 0.9 * weights[2]


def test_a_kept_heap_is_there_in_every_phase_but_where_it_is_worked_in(model):
    cfg = config(model, algorithm={"advantage": "gae", "kl_coef": 0.1})
    keeping = cfg.model_copy(update={"memory": cfg.memory.model_copy(update={"keep_heap": True})})
    plain, kept = ({use.phase: use for use in predict(each, MachineFacts()).phases} for each in (cfg, keeping))
    held = {phase: use.parts.get("kept in the heap", 0) for phase, use in kept.items()}
    actor, critic, forward = (plain[phase].working_bytes for phase in ("train_actor", "train_critic", "forward"))
    everything = int(KEPT_SHARE * actor) + int(KEPT_SHARE * critic) + int(KEPT_SHARE * forward)
    assert held["init"] == 0 and held["generate"] == held["sync"] == everything
    assert held["train_actor"] == everything - int(KEPT_SHARE * actor)
    assert held["train_critic"] == everything - int(KEPT_SHARE * critic)
    assert held["forward"] == everything - int(KEPT_SHARE * forward), "the reference has no larger heap to work in"
    for phase, use in plain.items():
        assert {n: s for n, s in kept[phase].parts.items() if n != "kept in the heap"} == use.parts


def test_an_unknown_gpu_leaves_the_kv_cache_unknown(model):
    cfg = config(model)
    cfg = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"kv_cache": "auto"})})
    with pytest.raises(ConfigError, match="kv_cache"):
        predict(cfg, MachineFacts())


def test_micro_batches_are_as_full_as_the_budget(model):
    work = workload(config(model), 32)
    assert work.micro_batches == 16  # a group feeds 128 + 4 x 127 = 636 tokens: two do not fit, and a rank has 16
    assert packed_tokens(list(work.rows), True) == 1024


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_a_trace_of_few_layers_stands_for_many(model, monkeypatch, checkpointing, backward):
    """Three layers that stand for six, against all six traced."""
    options = dict(
        dtype=torch.bfloat16,
        implementation="sdpa",
        checkpointing=checkpointing,
        backward=backward,
        device="cpu",
        trust_remote_code=False,
    )
    rows = workload(config(model), 32).rows
    few = packed_pass.__wrapped__(model, "policy", rows, **options)
    monkeypatch.setattr(working_set, "TRACED_LAYERS", 6)
    whole = packed_pass.__wrapped__(model, "policy", rows, **options)
    assert few.highest == pytest.approx(whole.highest, rel=0.001)
    assert few.growing == pytest.approx(whole.growing, rel=0.001)
    assert few.held == whole.held and set(few.highest) == {"trunk", "head"} | (set(MOMENTS) if backward else set())


def test_a_plan_leaves_no_fake_mask_in_the_cache_of_the_attention(plan):
    plan()
    assert reach.segment_mask.cache_info().currsize == 0


def test_engine_weights_are_cut_and_kv_heads_repeated(model):
    found, cfg = shapes(model, "policy"), read_config(model)
    whole, half = (engine_weights(found, cfg, tp, 2, "cuda") for tp in (1, 2))
    assert 0.5 * whole < half < 0.52 * whole  # norms and the rotary table are on both
    assert engine_weights(found, cfg, 1, 2, "cpu") - whole == 2 * 8192 * 512 * 2  # packed embedding and head
    assert vocab_shard(50257, 1) == 50304
    one, four = (kv_cache(cfg, tp, 2, "cuda", 8 * MIB, 256, 8192) for tp in (1, 4))
    assert one.bytes_per_token == 2 * 6 * 2 * 32 * 2 and four.bytes_per_token == one.bytes_per_token / 2
    assert one.sequences == (8 * MIB // (one.bytes_per_token * 16) - 1) // 16
    for tokens in (1, 16, 17, 256):
        least = kv_cache(cfg, 1, 2, "cuda", 8 * MIB, tokens, 8192).least_bytes
        assert kv_cache(cfg, 1, 2, "cuda", least, tokens, 8192).sequences == 1
        assert kv_cache(cfg, 1, 2, "cuda", least - 1, tokens, 8192).sequences == 0


@pytest.mark.parametrize(
    ("config_json", "said"),
    [
        ({"model_type": "nonesuch"}, "nonesuch"),
        ({"model_type": "llama", "hidden_size": "big"}, "hidden_size"),
        (
            {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 0},
            "ZeroDivision",
        ),
        ({"model_type": "t5"}, "T5Config"),
    ],
)
def test_a_config_json_of_no_plannable_model_is_a_mistake_in_the_profile(tmp_path, config_json, said):
    (tmp_path / "config.json").write_text(json.dumps(config_json))
    with pytest.raises(ConfigError, match=said) as error:
        predict(config(str(tmp_path)), MachineFacts())
    assert str(tmp_path) in str(error.value) and len(str(error.value)) < 800


def test_gpus_by_name_or_size():
    assert find_gpu("NVIDIA A100 80GB") == known_gpus()["A100-80GB"]
    assert find_gpu("h100").name == "H100-SXM" and find_gpu("a10").name == "A10"
    assert find_gpu("80GiB").nbytes == 80 * 2**30
    with pytest.raises(ConfigError, match="H200"):
        find_gpu("voodoo2")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("a100 80 GB", "A100-80GB"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("A6000", "RTX A6000"),
        ("H200-141GB", "H200"),
    ],
)
def test_gpus_as_drivers_shops_and_people_write_them(text, name):
    assert find_gpu(text).name == name


@pytest.mark.parametrize("name", known_gpus())
def test_every_known_gpu_is_found_by_its_name(name):
    assert find_gpu(name).name == find_gpu(f"nvidia {name.lower()}").name == name


@pytest.mark.parametrize("text", ["H20", "A100-60GB", "GB200", "A", "RTX", "", "-5", "80", "1KiB", "NaN"])
def test_what_is_not_quite_a_gpu_is_taken_for_none(text):
    with pytest.raises(ConfigError, match=r"--gpu .*H200"):
        find_gpu(text)


def test_a_gpu_that_is_not_here_is_planned_for(model):
    cfg = config(model, cluster={"device": "cuda", "gpus_per_node": 8}, memory={"device_bytes": 80 * 2**30})
    facts = stated_facts(cfg, "H100 SXM")
    found = predict(cfg, facts)
    assert facts.leave_bytes_per_s == pytest.approx(0.6 * 64e9)
    assert found.overhead["CUDA contexts"] == 2 * facts.role.private
    assert found.tenant("rollout", "weights").movable
    assert found.tenant("actor", "weights").host_bytes == 256 * MIB // 8  # a pinned slab for the node


def test_a_calibration_is_found_again(model, monkeypatch, tmp_path):
    from dataclasses import asdict

    from hybrid.planning import calibration
    from hybrid.planning.machine import predictor

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cfg = config(model)
    before = sum(predictor(cfg)[0](cfg).overhead.values())
    found = calibration.Calibration("cpu", "file", ProcessBytes(1, 2), ProcessBytes(3, 4), 8e9, 4e9)
    calibration._write({calibration.machine_key(): asdict(found)})
    assert calibration_file() == tmp_path / "hybrid" / "calibration.json"
    predict, speeds = predictor(cfg)
    assert sum(predict(cfg).overhead.values()) < 100 < before
    assert (speeds.leave_bytes_per_s, speeds.come_bytes_per_s) == (4e9, 2e9), "two GPUs share the disk"


def test_gpus_without_bf16_are_known():
    assert [name for name, gpu in known_gpus().items() if not gpu.has_bf16] == ["T4", "V100-16GB", "V100-32GB"]
