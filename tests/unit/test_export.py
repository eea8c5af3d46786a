"""A trained model is written so that nothing after its weights can lose them, and so that what was exported can be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hybrid.config import check_start, load_run
from hybrid.config.checkpoint import weight_elements
from hybrid.config.generation import repaired_generation_config, writes
from hybrid.config.start_rules import RECORDS_BYTES
from hybrid.errors import ConfigError, ExportError
from hybrid.roles import export
from hybrid.roles.export import export_model, gather, write_model
from hybrid.roles.export_files import try_export
from hybrid.roles.weights import WeightBuckets
from hybrid.telemetry import jsonl
from hybrid.telemetry.jsonl import JsonLines
from hybrid.tokenizer import load_tokenizer
from launch.tiny_models import make_tiny_llama
from tests.tiny_architectures import make_tiny_architecture
from tests.unit.test_start_models import PROFILE, add_code, edit

ENDS = {"eos_token_id": 2, "pad_token_id": 2}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def model(source, tmp_path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "source"))


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write(model: Path, run: Path, spare=(), trust=False) -> export.Exported:
    return write_model(state_of(model), str(model), run / "model", spare, trust)


def same_weights(folder: str | Path, model: Path) -> bool:
    found, wanted = state_of(Path(folder)), state_of(model)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
        ({"top_k": 20}, {"top_k": 20, "do_sample": True}),
        ({"do_sample": None, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}),
        ({"do_sample": False, "temperature": 0.0}, {"do_sample": False}),
        ({"temperature": "0.6"}, {}),
        ({"output_scores": True}, {}),
        ({"num_beams": 1, "length_penalty": 2.0}, {"num_beams": 1}),
        ({"temperature": 0.6, "length_penalty": 2.0}, {"temperature": 0.6, "do_sample": True}),
    ],
)
def test_c01_a_generation_config_that_cannot_be_written_back_is_repaired_with_a_note(values, kept):
    assert not writes(values | ENDS)
    found, note = repaired_generation_config(json.dumps(values | ENDS).encode())
    assert found == kept | ENDS
    assert note
    assert writes(found)


@pytest.mark.parametrize("values", [{}, {"do_sample": True, "temperature": 0.6}, {"my_key": [1]}])
def test_c01_a_generation_config_that_can_be_written_is_left_alone(values):
    assert repaired_generation_config(json.dumps(values | ENDS).encode()) == (values | ENDS, None)


@pytest.mark.parametrize("text", [b"{", b"[1]"])
def test_c01_what_is_no_mapping_is_left_out(text, model, run):
    (model / "generation_config.json").write_bytes(text)
    assert "not exported" in repaired_generation_config(text)[1]
    assert write(model, run).problem is None
    assert not (run / "model" / "generation_config.json").exists()


def test_c01_the_repaired_file_is_in_the_export(model, run):
    (model / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6} | ENDS))
    notes = try_export(str(model), load_tokenizer(str(model), False), "float32", False)
    assert len(notes) == 1
    assert "do_sample: true" in notes[0]
    assert write(model, run).problem is None
    assert GenerationConfig.from_pretrained(run / "model").temperature == 0.6


def test_c02_a_tokenizer_with_code_is_exported_with_its_code(model, run, monkeypatch):
    add_code(model)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    assert try_export(str(model), load_tokenizer(str(model), True), "float32", True) == []
    assert write(model, run, trust=True).problem is None
    assert type(AutoTokenizer.from_pretrained(run / "model", trust_remote_code=True)).__name__ == "MyTok"
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_tokenizer(str(model), False)


def test_an_export_is_a_whole_folder_with_the_trained_weights_and_their_number_type(model, run):
    edit(model / "config.json", dtype="float32", attention_dropout=0.1)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    hf.config.attention_dropout = 0.0  # what a run changes is not the model's
    with torch.no_grad():
        for p in hf.parameters():
            p.add_(1)
    state = {name: p.detach() for name, p in hf.named_parameters()}
    written = export_model(hf, state, str(model), run / "model", None, False)
    assert written == export.Exported(str(run / "model"))
    again = AutoModelForCausalLM.from_pretrained(run / "model")
    assert again.dtype == torch.bfloat16
    assert again.config.attention_dropout == 0.1
    assert all(torch.equal(p, state[name]) for name, p in again.named_parameters())
    assert [entry.name for entry in run.iterdir()] == ["model"]
    assert {oct(file.stat().st_mode & 0o777) for file in (run / "model").iterdir()} == {"0o644"}


def test_large_models_are_written_in_shards(model, run, monkeypatch):
    monkeypatch.setattr(export, "SHARD_BYTES", 300_000)
    assert write(model, run).problem is None
    assert len(list((run / "model").glob("*.safetensors"))) > 2
    assert weight_elements(run / "model") == weight_elements(model)
    assert AutoModelForCausalLM.from_pretrained(run / "model", output_loading_info=True)[1]["missing_keys"] == set()


@pytest.mark.parametrize("broken", ["write_small_files", "load_tokenizer", "_finish"])
def test_what_fails_after_the_weights_loses_none_of_them(model, run, monkeypatch, broken):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, broken, fail)
    written = write(model, run)
    assert same_weights(written.folder, model)
    assert written.folder == str(run / "model-weights")
    assert all(
        part in written.problem
        for part in (written.folder, "No space left", f"copy config.json and the tokenizer's files from {model}")
    )
    assert not (run / "model").exists()


def test_names_that_cannot_be_reverted_lose_no_weights(model, run, monkeypatch):
    hf = AutoModelForCausalLM.from_pretrained(model)
    monkeypatch.setattr(export, "take_checkpoint_names", lambda *_: 1 / 0)
    state = {name: p.detach() for name, p in hf.named_parameters()}
    written = export_model(hf, state, str(model), run / "model", None, False)
    assert "the trainer's names" in written.problem
    assert same_weights(written.folder, model)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_neox"])
def test_c05_joined_and_renamed_weights_are_exported_as_their_checkpoint_has_them(name, tmp_path):
    """Experts that are cut from one tensor share its memory, and safetensors would write one of them."""
    source = make_tiny_architecture(name, tmp_path / "source")
    hf = AutoModelForCausalLM.from_pretrained(source)
    state = gather(WeightBuckets(hf, 0, 2**17, as_loaded=True), is_writer=True)
    written = export_model(hf, state, str(source), tmp_path / "runs" / "model", None, False)
    assert written.problem is None and same_weights(written.folder, source)


def test_c05_joined_weights_are_dropped_as_their_pieces_are_made(tmp_path, monkeypatch):
    """Beside the weights, the pieces of one joined tensor are in memory: those that were cut from it share what they had at first."""
    hf = AutoModelForCausalLM.from_pretrained(make_tiny_architecture("qwen3_moe", tmp_path))
    state = gather(WeightBuckets(hf, 0, 2**17, as_loaded=True), is_writer=True)
    whole, largest = export.state_bytes(state), max(tensor.nbytes for tensor in state.values())
    held, real = [], export._owned

    def owned(tensor):
        held.append(
            sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state.values()}.values())
        )
        return real(tensor)

    monkeypatch.setattr(export, "_owned", owned)
    export.take_checkpoint_names(hf, state)
    assert whole <= max(held) <= whole + largest


def full_disks(monkeypatch, *full: Path) -> None:
    """Let writing weights fail on the disks of some folders, as it does without room."""
    real = export.save_weights

    def save(state, folder):
        if any(folder.is_relative_to(place) for place in full):
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(state, folder)

    monkeypatch.setattr(export, "save_weights", save)


def test_c03_without_room_the_model_goes_to_the_next_place_and_the_error_names_it(model, run, tmp_path, monkeypatch):
    full_disks(monkeypatch, run)
    written = write(model, run, spare=[tmp_path / "swap"])
    assert written.folder == str(tmp_path / "swap" / "run-model")
    assert written.folder in written.problem
    assert same_weights(written.folder, model)
    assert AutoTokenizer.from_pretrained(written.folder).vocab_size == 512
    assert list(run.iterdir()) == []
    assert [entry.name for entry in (tmp_path / "swap").iterdir()] == ["run-model"]


def test_c03_without_room_anywhere_the_error_has_the_numbers_and_no_half_folder_stays(
    model, run, tmp_path, monkeypatch
):
    full_disks(monkeypatch, run, tmp_path)
    with pytest.raises(ExportError, match=r"it needs 2\.\d MiB; .*No space left.*memory\.swap_dir"):
        write(model, run, spare=[tmp_path / "swap"])
    assert list(run.iterdir()) == []
    assert list((tmp_path / "swap").iterdir()) == []


def disk_with(monkeypatch, free: int) -> None:
    usage = shutil.disk_usage(".")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


@pytest.mark.parametrize(
    ("free", "starts"), [(2**21, False), (RECORDS_BYTES + 2**20, False), (RECORDS_BYTES + 2**23, True)]
)
def test_c03_a_disk_that_is_too_small_is_refused_at_the_start_with_the_numbers(model, run, monkeypatch, free, starts):
    profile = run / "p.yaml"
    profile.write_text(PROFILE % model)
    disk_with(monkeypatch, free)
    cfg = load_run(profile, [f"logging.runs_dir={run}"])
    if starts:
        check_start(cfg)
        return
    size = 4 * weight_elements(model) / 2**20
    with pytest.raises(
        ConfigError, match=rf"logging.runs_dir.*{free / 2**20:.1f} MiB free.* {size:.1f} MiB for the exported model"
    ):
        check_start(cfg)


def test_c03_records_wait_while_the_disk_is_full(tmp_path, monkeypatch):
    lines, real, room = JsonLines(tmp_path / "m.jsonl"), jsonl.os.write, 5

    def write(file, data):
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        written = real(file, bytes(data[:room]))
        room -= written
        return written

    monkeypatch.setattr(jsonl.os, "write", write)
    lines.append('{"step": 1}')
    assert lines.waiting == b'p": 1}\n'
    room = 1000
    lines.append('{"step": 2}')
    lines.close()
    assert [row["step"] for _, row in jsonl.read_lines(tmp_path / "m.jsonl")] == [1, 2]
