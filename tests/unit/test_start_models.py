"""Model folders that cannot be trained are refused before anything starts: one sentence that names the folder, and the fix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid.config import check_start, load_run, resolve
from hybrid.config.checkpoint import weight_files
from hybrid.errors import ConfigError
from hybrid.rollout.checkpoint_names import checkpoint_shapes
from hybrid.rollout.vllm_setup import without_strays
from hybrid.start_check import check_models
from hybrid.tokenizer import load_tokenizer
from launch.tiny_models import CHAT_TEMPLATE, make_tiny_llama, make_tiny_reward, make_tokenizer

PROFILE = """
cluster: {device: cpu, gpus_per_node: 2}
model: {path: %s, dtype: float32}
reward: {function: reasoning_gym}
rollout: {max_new_tokens: 8}
train: {steps: 1}
data: {train: "reasoning_gym:chain_sum", max_prompt_tokens: 64}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {"policy": make_tiny_llama(folder / "llama"), "reward": make_tiny_reward(folder / "reward")}


@pytest.fixture
def model(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole["policy"], tmp_path / "model"))


def refusal(folder: Path, *overrides: str, plan_only: bool = False) -> str:
    """What `hybrid train` says of a policy in `folder`, or `hybrid plan`; empty where it starts."""
    profile = folder.parent / "p.yaml"
    profile.write_text(PROFILE % folder)
    try:
        cfg = load_run(profile, list(overrides))
        if not plan_only:
            check_start(cfg)
            refusal.notes = check_models(resolve(cfg)).notes
    except ConfigError as error:
        assert str(error).count(str(folder)) >= 1 or overrides
        return str(error)
    return ""


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_whole_model_starts(model):
    assert refusal(model) == ""
    assert refusal.notes == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *[
            ({"quantization_config": {"quant_method": method}}, f"quantised ({method})")
            for method in ("awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors", "mxfp4")
        ],
        ({"compression_config": {"format": "int-quantized"}}, "quantised (int-quantized)"),
        ({"text_config": {"quantization_config": {"bits": 4}}}, "quantised"),
        ({"vision_config": {"depth": 2}}, "vision_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"architectures": ["BertForMaskedLM"]}, "an encoder"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "of one stack"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "without the head"),
        ({"architectures": ["LlamaModel"]}, "without the head"),
    ],
)
def test_c16_what_config_json_tells_is_refused_by_plan_too(model, changes, said):
    edit(model / "config.json", **changes)
    assert said in refusal(model, plan_only=True)


def test_c16_quantised_tensors_are_found_without_a_word_in_config_json(model):
    weights = load_file(model / "model.safetensors")
    save_file(
        weights | {"model.layers.0.mlp.up_proj.qweight": torch.zeros(4, 4, dtype=torch.int32)},
        model / "model.safetensors",
    )
    assert "quantised (model.layers.0.mlp.up_proj.qweight is I32)" in refusal(model)
    save_file({name: w.to(torch.float8_e4m3fn) for name, w in weights.items()}, model / "model.safetensors")
    assert "is F8_E4M3" in refusal(model)


def only(*names: str):
    def leave(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"{}")

    return leave


def cut(size: int):
    def leave(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return leave


def pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def index_of(*shards: str):
    def leave(folder: Path) -> None:
        names = list(load_file(folder / "model.safetensors"))
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        weight_map = {name: shards[i % len(shards)] for i, name in enumerate(names) if shards}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return leave


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        (only("pytorch_model.bin"), "only pytorch_model.bin"),
        (only("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"), "Convert it once"),
        (only("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"), "no weights"),
        (only("adapter_config.json", "adapter_model.safetensors"), "a LoRA adapter"),
        (only("adapter_config.json"), "a LoRA adapter"),
        (only("consolidated.safetensors", "params.json"), "the publisher's own format"),
        (only("original/consolidated.00.pth"), "the publisher's own format"),
        (only("consolidated.00.pth"), "the publisher's own format"),
        (only("model-q4.gguf"), "llama.cpp"),
        (only("weights.safetensors"), "names that transformers reads"),
        (only(), "has no weights"),
        (cut(0), "cut short"),
        (cut(1000), "cut short"),
        (cut(50_000), "its header says"),
        (pointer, "git lfs pull"),
        (index_of("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), "lacks"),
        (index_of("../model.safetensors"), "another folder"),
        (index_of(), "no weight_map"),
    ],
)
def test_c17_folders_without_whole_safetensors_are_refused_with_what_they_hold(model, leave, said):
    leave(model)
    assert said in refusal(model)


def test_c17_stray_files_are_ignored_by_trainer_plan_and_engine(model):
    (model / "adapter_model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:400])
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "other/model"}')
    shutil.copy(model / "model.safetensors", model / "consolidated.safetensors")
    (model / "params.json").write_text("{}")
    (model / "optimizer.pt").write_bytes(b"")
    assert refusal(model) == ""
    assert [file.name for file in weight_files(model)] == ["model.safetensors"]
    assert "lm_head.weight" in checkpoint_shapes(model)
    with without_strays(str(model)) as folder:
        names = {entry.name for entry in Path(folder).iterdir()}
        assert {name for name in names if name.endswith(".safetensors")} == {"model.safetensors"}
        assert {"config.json", "tokenizer.json"} <= names
        assert not {"adapter_config.json", "params.json"} & names
    assert not Path(folder).exists()
    assert model.is_dir()


def test_an_engine_without_strays_gets_the_folder_itself(model):
    with without_strays(str(model)) as folder:
        assert folder == str(model)


def test_c15_tokens_beyond_the_embedding_are_refused_and_spare_rows_are_not(model, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    tokenizer.chat_template = CHAT_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>' }}")
    tokenizer.save_pretrained(model)
    assert "tokens beyond the 512 rows of the embedding: <think> (512)" in refusal(model)
    padded = make_tiny_llama(tmp_path / "padded", vocab_size=576)
    tokenizer.save_pretrained(padded)
    assert refusal(padded) == ""


@pytest.mark.parametrize("end", [512, -1, "</s>", [2, 600]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_c15_end_tokens_outside_the_vocabulary_are_refused(model, file, end):
    edit(model / file, eos_token_id=end)
    assert "eos_token_id" in refusal(model)


def test_n3_a_folder_without_tokenizer_files_is_refused(model):
    for file in model.glob("*token*"):
        file.unlink()
    (model / "chat_template.jinja").unlink()
    assert "it has no tokenizer files" in refusal(model)
    edit(model / "config.json", model_type="qwen2")  # of which transformers makes a tokenizer with one token
    with pytest.raises(ConfigError, match="it has no tokenizer files"):
        load_tokenizer(str(model), False)


def test_a_broken_tokenizer_is_refused_and_one_without_a_chat_template_is_not(model):
    (model / "chat_template.jinja").unlink()
    assert refusal(model) == ""
    (model / "tokenizer.json").write_text("{")
    assert "its tokenizer cannot be loaded" in refusal(model)


def test_weights_that_lack_tensors_or_have_other_shapes_are_refused(model):
    weights = load_file(model / "model.safetensors")
    head = weights.pop("lm_head.weight")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert "lack lm_head.weight, which would be random numbers" in refusal(model)
    save_file(
        weights | {"lm_head.weight": head[:, :64].clone()}, model / "model.safetensors", metadata={"format": "pt"}
    )
    assert "its tensor lm_head.weight is 512 x 64 in the weights and 512 x 128 by its config.json" in refusal(model)


def test_a_config_of_another_model_is_named_with_the_shapes(model):
    edit(model / "config.json", vocab_size=500)
    assert "and 500 x 128 by its config.json, one of 2 such tensors" in refusal(model)


@pytest.mark.parametrize("values", [{"max_new_tokens": -1}, {"cache_implementation": "foo"}])
def test_a_generation_config_that_cannot_be_read_is_refused(model, values):
    (model / "generation_config.json").write_text(json.dumps(values))
    assert "its generation_config.json cannot be read" in refusal(model)


def test_reward_models_have_one_trained_head(model, whole, tmp_path):
    def said(folder: Path) -> str:
        return refusal(model, "reward.function=null", f"reward.model={folder}", "data.eval_function=reasoning_gym")

    assert said(whole["reward"]) == ""
    assert "whose score head would be random" in said(whole["policy"])
    two = Path(shutil.copytree(whole["reward"], tmp_path / "two"))
    edit(two / "config.json", id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1})
    assert "2 labels" in said(two)
    edit(two / "config.json", id2label=None, label2id=None)
    assert "2 labels" in said(two)
    headless = Path(shutil.copytree(whole["reward"], tmp_path / "headless"))
    weights = load_file(headless / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    assert "lack score.weight" in said(headless)


def test_c02_code_of_a_model_runs_where_the_profile_says_so(model):
    add_code(model)
    assert "model.trust_remote_code=true" in refusal(model)
    assert refusal(model, "model.trust_remote_code=true") == ""


def add_code(model: Path) -> None:
    """Give a model folder a tokenizer with code of its own."""
    code = "from transformers import PreTrainedTokenizerFast\n\n\nclass MyTok(PreTrainedTokenizerFast):\n    pass\n"
    (model / "tokenization_mine.py").write_text(code)
    edit(
        model / "tokenizer_config.json",
        tokenizer_class="MyTok",
        auto_map={"AutoTokenizer": [None, "tokenization_mine.MyTok"]},
    )
