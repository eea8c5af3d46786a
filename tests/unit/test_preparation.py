"""What a run reads is read and checked before Ray starts: a refused run costs seconds and leaves no folder; a dry run says the same."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import datasets
import pytest

from hybrid import preparation
from hybrid.config import load_run, resolve
from hybrid.data import prompts
from hybrid.errors import UnusableModel
from hybrid.preparation import prepared
from launch.tiny_models import CHAT_TEMPLATE, make_tiny_llama, make_tokenizer
from tests.unit.data_files import write_jsonl

PROFILE = """
cluster: {{device: cpu, gpus_per_node: 2}}
model: {{path: {model}, dtype: float32}}
reward: {{function: math_verify}}
rollout: {{max_new_tokens: 8}}
train: {{steps: 1, prompts_per_step: 2}}
data: {{train: {data}, max_prompt_tokens: 64}}
"""
COMMANDS = pytest.mark.parametrize("command", [("train",), ("train", "--dry-run")], ids=" ".join)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def start(model, tmp_path, monkeypatch, hybrid_command):
    """Call the command with a profile on these records, in a process where Ray would not start; (status, output)."""
    launcher = types.ModuleType("hybrid.launcher")
    launcher.launch = lambda ready, run_dir: print("Ray starts")
    monkeypatch.setitem(sys.modules, "hybrid.launcher", launcher)
    monkeypatch.chdir(tmp_path)

    def call(command: tuple[str, ...], rows: list | str, *overrides: str) -> tuple[int, str]:
        data = rows if isinstance(rows, str) else write_jsonl(tmp_path / "train.jsonl", rows)
        (tmp_path / "p.yaml").write_text(PROFILE.format(model=model, data=data))
        result = hybrid_command(*command, tmp_path / "p.yaml", *overrides)
        return result.exit_code, result.output

    return call


def records(*labels: object) -> list[dict]:
    return [{"prompt": f"question {i}", "label": label} for i, label in enumerate(labels)]


@COMMANDS
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (records("1", {"ground_truth": "18"}), "train.jsonl:2: {'ground_truth': '18'} is invalid"),
        ([*records("1"), {"prompt": "no label"}], "train.jsonl:2: None is invalid"),
        ([{"question": "a", "label": "1"}], "train.jsonl:1 has no field prompt"),
        ([{"prompt": [], "label": "1"}], "train.jsonl:1"),
        ([{"prompt": "word " * 200, "label": "1"}], "all 1 prompts are longer than data.max_prompt_tokens=64"),
    ],
    ids=["c11", "c12", "column", "messages", "n4"],
)
def test_c11_c12_n4_bad_data_is_refused_before_ray_starts(start, command, rows, said, tmp_path):
    status, output = start(command, rows)
    assert status == 2 and said in output, output
    assert output.count("error: ") == 1 and "Ray starts" not in output
    assert not (tmp_path / "runs").exists()


@COMMANDS
def test_n4_c11_prompts_left_out_and_labels_that_cannot_be_read_are_counted(start, command):
    rows = [*records("1", r"\frac{1}{2", r"\sqrt{3"), {"prompt": "word " * 200, "label": "1"}]
    status, output = start(command, rows)
    assert status == 0, output
    assert (
        "note: data.train " in output and "1 of 4 prompts are left out, longer than data.max_prompt_tokens=64" in output
    )
    assert "note: math_verify cannot read 2 of 3 labels" in output
    assert ("Ray starts" in output) == (command == ("train",))


@COMMANDS
def test_a_run_that_does_not_fit_leaves_no_folder(start, command, tmp_path):
    status, output = start(command, records("1", "2"), "memory.device_bytes=1MiB")
    assert status == (2 if command == ("train",) else 0), output
    assert "Ray starts" not in output
    assert not (tmp_path / "runs").exists()


@COMMANDS
def test_data_of_the_hub_is_checked_like_files(start, command, monkeypatch):
    rows = datasets.Dataset.from_list([{"question": "a", "label": "1"}])
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: rows)
    status, output = start(command, "some-org/some-data")
    assert status == 2 and "some-org/some-data[0] has no field prompt" in output, output


@COMMANDS
def test_a_dry_run_goes_on_where_the_hub_does_not_answer(start, command, monkeypatch):
    def load(name, split):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load)
    status, output = start(command, "some-org/some-data")
    assert "The dataset some-org/some-data" in output and "no network" in output
    assert status == (0 if "--dry-run" in command else 2)


def test_a_dry_run_checks_the_data_of_a_model_that_is_not_here(start):
    away = "model.path=some-org/some-model"
    status, output = start(("train", "--dry-run"), records("1"), away)
    assert status == 0 and "some-org/some-model is not on this machine" in output
    status, output = start(("train", "--dry-run"), records("1", True), away)
    assert status == 2 and "train.jsonl:2: True is invalid" in output


def test_n3_a_model_whose_tokenizer_cannot_be_had_is_refused_before_ray_starts(start, tmp_path, monkeypatch):
    def load(path, *args, **kwargs):
        raise UnusableModel("model.path", path, "its tokenizer cannot be loaded", "Complete the folder.")

    monkeypatch.setattr(preparation, "load_tokenizer", load)
    status, output = start(("train",), records("1"), "model.path=some-org/some-model")
    assert status == 2 and "Ray starts" not in output
    assert f"error: {tmp_path}/p.yaml: one problem" in output and "its tokenizer cannot be loaded" in output


def test_data_is_read_once(start, tmp_path, model, monkeypatch):
    start(("train", "--dry-run"), records("1", "2"))  # writes the profile
    read = []
    whole = prompts.read_records
    monkeypatch.setattr(prompts, "read_records", lambda *args: read.append(args) or whole(*args))
    with prepared(resolve(load_run(tmp_path / "p.yaml"))) as ready:
        assert sorted(prompt.label for prompt in ready.inputs.prompts.take(2)) == ["1", "2"]
    assert len(read) == 1


@pytest.mark.parametrize("command", [("train",), ("train", "--dry-run"), ("plan",)], ids=" ".join)
def test_c15_c17_models_are_refused_by_every_command_under_the_profiles_name(start, command, tmp_path):
    large = make_tiny_llama(tmp_path / "small_vocab")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(large)
    bare = make_tiny_llama(tmp_path / "bin_only")
    (bare / "model.safetensors").rename(bare / "pytorch_model.bin")
    for folder, said in {large: "tokens beyond the 512 rows", bare: "only pytorch_model.bin"}.items():
        status, output = start(command, records("1"), f"model.path={folder}")
        assert status == 2 and said in output, output
        assert f"error: {tmp_path}/p.yaml: one problem" in output and "(command line)" in output


def test_c40_a_plan_needs_the_shape_alone(start, tmp_path, model):
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text())))
    status, output = start(("plan",), records("1"), f"model.path={shape}")
    assert status == 0 and "fits" in output, output
