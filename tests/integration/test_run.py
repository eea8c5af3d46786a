"""Whole runs on a tiny model: what moves does not change what is learnt, and what is left is a model others can load."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid.doctor.full.engine_process import EngineProcess
from hybrid.rollout.requests import EngineOptions, GenerateRequest, SamplingOptions
from hybrid.telemetry.metrics import metric_keys
from launch.tiny_models import make_tiny_llama
from tests.integration.references import reference_logprobs
from tests.integration.runs import profile, run

EXACT = ("reward/mean", "loss/policy", "grad_norm/actor", "kl/sampler", "response/length_mean")


ALL_SAMPLES = "logging.samples_per_step=16"


def as_published(model: Path) -> Path:
    """`model` with what publishers leave beside it: weights of other kinds (C17) and sampling without do_sample (C01)."""
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    (model / "adapter_model.safetensors").write_bytes(b"not the model's")
    (model / "adapter_config.json").write_text("{}")
    (model / "params.json").write_text("{}")
    (model / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "eos_token_id": 2}')
    return model


@pytest.fixture(scope="module")
def swapped(tmp_path_factory):
    """A recorded run in which everything moves, its second step on a timeline. Engines answer one prompt after another."""
    folder = tmp_path_factory.mktemp("runs")
    path = profile(folder, as_published(make_tiny_llama(folder / "model")), rollout={"max_num_seqs": 4})
    moves = "memory.policy=swap_all", "logging.profile=2", ALL_SAMPLES, f"rollout.record={folder / 'rollouts.jsonl'}"
    return folder, path, run(path, folder / "swapped", *moves)


@pytest.fixture(scope="module")
def resident(swapped):
    """The same with nothing moving, and scored by a slow reward while the engines go on."""
    folder, path, _ = swapped
    early = "reward.function=reward.py:slow", "reward.batch=group"
    return run(path, folder / "resident", "memory.policy=resident", "logging.profile=2", ALL_SAMPLES, *early)


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@dataclass(frozen=True)
class Timeline:
    titles: dict[int, str]
    events: list[dict]

    def spans(self, lane: str, name: str) -> list[tuple[float, float]]:
        """Start and end in milliseconds, of what is called `name` or begins with it in lanes that begin with `lane`."""
        found = [e for e in self.events if self.titles[e["pid"]].startswith(lane) and e["name"].startswith(name)]
        return [(e["ts"] / 1000, (e["ts"] + e["dur"]) / 1000) for e in found]


def timeline(run_dir) -> Timeline:
    trace = json.loads(gzip.decompress((run_dir / "trace.json.gz").read_bytes()))["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    return Timeline(titles, [e for e in trace if e["ph"] == "X"])


def within(inner: tuple[float, float], outer: tuple[float, float], slack_ms: float = 5) -> bool:
    return outer[0] - slack_ms <= inner[0] < inner[1] <= outer[1] + slack_ms


def test_neither_moving_memory_nor_scoring_early_changes_a_bit(swapped, resident):
    folder, _, lines = swapped
    assert [{k: line[k] for k in EXACT} for line in resident] == [{k: line[k] for k in EXACT} for line in lines]
    ours, theirs = weights(folder / "swapped"), weights(folder / "resident")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    late, early = ((folder / name / "samples.jsonl").read_text().splitlines() for name in ("swapped", "resident"))
    assert len(late) == 3 * 16 and early == late


def test_scoring_starts_while_engines_still_generate(swapped, resident):
    folder, _, lines = swapped
    assert all(line["time/score_overlapped"] is None for line in lines)
    assert all(0 < line["time/score_overlapped"] < line["time/generate"] for line in resident)
    times = timeline(folder / "resident")
    scored, generated = times.spans("driver", "score "), times.spans("engine", "stream")
    assert min(scored)[0] < max(end for _, end in generated)
    assert len(scored) > 1 and sum(end - start for start, end in scored) >= 50 * len(scored)


def test_replaying_the_recording_takes_the_same_steps(swapped):
    folder, path, lines = swapped
    replayed = run(path, folder / "replayed", f"rollout.replay={folder / 'rollouts.jsonl'}", "actor.zero_stage=3")
    assert [line["loss/policy"] for line in replayed] == pytest.approx(
        [line["loss/policy"] for line in lines], abs=1e-4
    )
    ours, theirs = weights(folder / "swapped"), weights(folder / "replayed")
    assert max(float((ours[n] - theirs[n]).abs().max()) for n in ours) < 1e-4


def test_every_line_has_every_metric(swapped):
    _, _, lines = swapped
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(list(line) == metric_keys() for line in lines)
    assert lines[0]["time/first_token"] > lines[0]["time/init"] > 0
    assert lines[1]["time/first_token"] is None
    last = lines[-1]
    assert last["lr/actor"] == 1e-3
    assert last["loss/value"] is None
    assert last["sampler/logprob_diff_max"] < 1e-2
    assert last["memory/counted/actor.optimizer"] > last["memory/counted/actor.weights"] > 0
    assert last["time/transitions"] > 0


def test_the_timeline_has_all_processes_on_one_clock(swapped):
    folder, _, lines = swapped
    times = timeline(folder / "swapped")
    lanes = sorted(title.split(" (pid")[0] for title in times.titles.values())
    assert lanes == ["actor 0", "actor 1", "driver", "engine 0", "engine 1"]
    (step,) = times.spans("driver", "step 2")
    assert step[1] - step[0] == pytest.approx(1000 * lines[1]["time/step"], rel=0.05)
    pairs = [("train_actor", "actor", "train"), ("sync", "actor", "send_weights"), ("sync", "engine", "update_weights")]
    for phase, role, call in [*pairs, ("generate", "engine", "generate")]:
        (outer,) = times.spans("driver", phase)
        assert within(outer, step), phase
        for rank in (0, 1):
            calls = times.spans(f"{role} {rank}", call)
            assert calls and all(within(each, outer) for each in calls), (phase, role, call)
    assert times.spans("driver", "come actor/weights+gradients+optimizer") and times.spans("actor 1", "come")
    for lane, call, operation in (("actor", "train", "aten::mm"), ("engine", "generate", "execute_context")):
        (outer,) = times.spans(f"{lane} 1", call)
        assert any(within(each, outer) for each in times.spans(f"{lane} 1", operation)), "torch's own clock"


def test_training_changed_the_weights_that_generate(swapped):
    """The sampler's log-probs follow the trainer's at every step, so each sync arrived."""
    folder, _, lines = swapped
    assert all(line["sampler/logprob_diff_mean"] < 1e-3 for line in lines)
    versions = {json.loads(line)["weight_version"] for line in (folder / "swapped" / "samples.jsonl").open()}
    assert versions == {0, 1, 2}


def test_transformers_and_vllm_load_the_exported_folder_and_agree(swapped):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    folder, _, _ = swapped
    exported = folder / "swapped" / "model"
    stored = weights(folder / "swapped")
    loaded = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    assert all(torch.equal(stored[name], value) for name, value in loaded.items() if name in stored)
    sampling = GenerationConfig.from_pretrained(exported)
    assert (sampling.do_sample, sampling.temperature, sampling.eos_token_id) == (True, 0.6, 2)
    assert [file.name for file in exported.glob("*.safetensors")] == ["model.safetensors"]

    prompts = [AutoTokenizer.from_pretrained(exported)(text)["input_ids"] for text in ("Say a", "Tell me more")]
    with EngineProcess(EngineOptions(str(exported), "float32", "cpu", 2**25, 128, max_num_seqs=4, threads=1)) as engine:
        groups = engine.generate([GenerateRequest(p) for p in prompts], SamplingOptions(12, temperature=0.0), None)
    completions = [group[0] for group in groups]
    scored = reference_logprobs(exported, prompts, [c.token_ids for c in completions])
    assert [c.logprobs for c in completions] == [pytest.approx(row, abs=1e-3) for row in scored]
