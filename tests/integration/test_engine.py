"""One real vLLM engine: it sleeps, takes new weights, and says no where vLLM would go on."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hybrid.doctor.full.engine_process import EngineProcess
from hybrid.errors import MemoryScheduleError, RolloutError
from hybrid.rollout.requests import EngineOptions, GenerateRequest, SamplingOptions
from hybrid.rollout.sender import make_sender
from launch.tiny_models import make_tiny_llama
from tests.integration.references import reference_logprobs

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

KV_BYTES = 128 * 2**20
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [20, 21, 22], [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40]]
GREEDY = SamplingOptions(max_new_tokens=12, temperature=0.0)
SAMPLED = SamplingOptions(max_new_tokens=12, n=4, temperature=0.7)


def options(folder, **changes) -> EngineOptions:
    base = EngineOptions(str(folder), "bfloat16", "cpu", KV_BYTES, max_model_len=128, max_num_seqs=16, threads=1)
    return dataclasses.replace(base, **changes)


def greedy(engine, version=None):
    return [group[0] for group in engine.generate([GenerateRequest(p) for p in PROMPTS], GREEDY, version)]


def tokens(completions):
    return [c.token_ids for c in completions]


def weights(folder):
    return load_file(folder / "model.safetensors")


def send(engine, named, version, bucket_bytes=2**18):
    make_sender("shm", 0, [engine], bucket_bytes).send([list(named.items())], version)


def largest_difference(completions, rows):
    return max(
        abs(a - b) for c, row in zip(completions, rows, strict=True) for a, b in zip(c.logprobs, row, strict=True)
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two checkpoints of one architecture with tied embeddings, apart enough that their greedy responses differ."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    for folder in (old, new):
        make_tiny_llama(folder, tie_word_embeddings=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        # One token in ten, so that responses have some.
        special = [word for word in tokenizer.convert_ids_to_tokens(range(256, 512, 2)) if word.isascii()]
        tokenizer.add_special_tokens({"additional_special_tokens": special})
        tokenizer.save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    changed = {n: w + 0.05 * torch.randn(w.shape, generator=generator).to(w.dtype) for n, w in weights(old).items()}
    save_file(changed, new / "model.safetensors", metadata={"format": "pt"})
    return old, new


@pytest.fixture(scope="module")
def engine(models):
    with EngineProcess(options(models[0])) as engine:
        yield engine


def test_texts_are_the_same_whoever_makes_them(engine):
    """A text that may end a response makes vLLM decode token by token; else whole responses are decoded."""
    requests = [GenerateRequest(p, seed=i) for i, p in enumerate(PROMPTS)]
    ours = engine.generate(requests, SAMPLED)
    theirs = engine.generate(requests, dataclasses.replace(SAMPLED, stop=("no such text",)))
    for of_us, of_vllm in zip(ours, theirs, strict=True):
        assert tokens(of_us) == tokens(of_vllm) and any(c.text for c in of_us)
        assert [c.text for c in of_us] == [c.text for c in of_vllm]


def test_c31_special_tokens_stay_in_the_text_where_they_are_wanted_and_the_end_token_never(engine, models):
    tokenizer, texts = AutoTokenizer.from_pretrained(models[0]), {}
    for keep in (False, True):
        sampling = dataclasses.replace(SAMPLED, keep_special_tokens=keep, stop=("no such text",))
        groups = engine.generate([GenerateRequest(p, seed=i) for i, p in enumerate(PROMPTS)], sampling)
        texts[keep] = [c.text for group in groups for c in group]
        ids = [c.token_ids[: -(c.finish_reason == "stop") or None] for group in groups for c in group]
        whole = [tokenizer.decode(i, skip_special_tokens=not keep) for i in ids]
        for text, wanted in zip(texts[keep], whole, strict=True):
            assert wanted.startswith(text)
            assert not any(map(str.isascii, wanted[len(text) :])), "only bytes of a last character that is not whole"
    assert any(map(str.__ne__, texts[False], texts[True]))


def test_log_probs_are_those_of_the_tokens_at_the_sampling_temperature(engine, models):
    groups = engine.generate([GenerateRequest(p, seed=i) for i, p in enumerate(PROMPTS)], SAMPLED)
    prompts = [p for p in PROMPTS for _ in range(4)]
    completions = [c for group in groups for c in group]
    assert all(len(c.token_ids) == len(c.logprobs) <= 12 for c in completions)
    rows = reference_logprobs(models[0], prompts, tokens(completions), temperature=0.7)
    assert largest_difference(completions, rows) < 0.2  # bf16 against fp32
    raw = reference_logprobs(models[0], prompts, tokens(completions))
    assert largest_difference(completions, raw) > 0.2


def test_seeds_repeat_and_samples_of_a_group_differ(engine):
    requests = [GenerateRequest(p, seed=100 * i) for i, p in enumerate(PROMPTS)]
    first, second = engine.generate(requests, SAMPLED), engine.generate(requests, SAMPLED)
    assert first == second
    assert all(len({tuple(c.token_ids) for c in group}) > 1 for group in first)
    others = engine.generate([GenerateRequest(p, seed=100 * i + 50) for i, p in enumerate(PROMPTS)], SAMPLED)
    assert tokens(others[0]) != tokens(first[0])
    plain = [GenerateRequest(p) for p in PROMPTS]
    assert engine.generate(plain, SAMPLED, seed=3) != engine.generate(plain, SAMPLED, seed=4)


def test_a_response_ends_at_max_new_tokens_or_at_a_stop_string(engine):
    [long] = engine.generate([GenerateRequest(PROMPTS[0])], GREEDY)[0]
    assert long.truncated and len(long.token_ids) == 12
    stop = long.text[len(long.text) // 2 :][:2]
    [short] = engine.generate([GenerateRequest(PROMPTS[0])], dataclasses.replace(GREEDY, stop=(stop,)))[0]
    assert not short.truncated
    assert stop not in short.text
    assert short.token_ids == long.token_ids[: len(short.token_ids)]
    with pytest.raises(RolloutError, match="max_model_len=128"):
        engine.generate([GenerateRequest([1] * 120)], GREEDY)


def test_the_kv_cache_leaves_and_comes_without_a_trace(engine):
    before = greedy(engine)
    with pytest.raises(MemoryScheduleError, match="already"):
        engine.come(["kv_cache"])
    with pytest.raises(MemoryScheduleError, match="weights"):
        engine.leave(["weights"])
    rows = []
    for _ in range(6):
        [left] = engine.leave(["kv_cache"])
        with pytest.raises(RolloutError, match="kv_cache"):
            greedy(engine)
        [came] = engine.come(["kv_cache"])
        assert greedy(engine) == before
        rows.append((left, came))
    for left, came in rows:
        assert left["counted_bytes"] == came["counted_bytes"] == pytest.approx(KV_BYTES, rel=0.01)
        assert left["before_bytes"] - left["after_bytes"] == pytest.approx(left["counted_bytes"], rel=0.1)
        assert came["after_bytes"] - came["before_bytes"] == pytest.approx(came["counted_bytes"], rel=0.1)
    assert rows[-1][0]["after_bytes"] < 1.03 * rows[1][0]["after_bytes"]


def test_synced_weights_generate_as_if_loaded_from_disk(engine, models):
    old, new = models
    before = greedy(engine)
    for version in (1, 3):
        send(engine, weights(new), version)
        changed = greedy(engine, version)
        assert tokens(changed) != tokens(before)
        assert all(c.weight_version == version for c in changed)
        send(engine, weights(old), version + 1)
        assert [(c.token_ids, c.logprobs) for c in greedy(engine)] == [(c.token_ids, c.logprobs) for c in before]
    with EngineProcess(options(new)) as fresh:
        loaded = greedy(fresh)
    assert [(c.token_ids, c.logprobs) for c in loaded] == [(c.token_ids, c.logprobs) for c in changed]


def test_weights_of_another_version_are_refused(engine, models):
    send(engine, weights(models[0]), 7)
    with pytest.raises(RolloutError, match="holds weights of version 7, but version 8"):
        greedy(engine, 8)
    assert greedy(engine, 7)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda w: w | {"model.surprise.weight": torch.zeros(1)}, "has no weight `model.surprise.weight`"),
        (
            lambda w: {n: t for n, t in w.items() if not n.endswith("layers.1.self_attn.k_proj.weight")},
            "1 of .* not sent",
        ),
        (lambda w: w | {"model.norm.weight": torch.zeros(3)}, "`model.norm.weight` was sent with shape"),
        (lambda w: {}, "not sent"),
    ],
)
def test_a_wrong_set_of_weights_is_refused_and_the_next_sync_repairs(engine, models, spoil, says):
    send(engine, weights(models[0]), 10)
    right = tokens(greedy(engine))
    with pytest.raises(RolloutError, match=says):
        send(engine, spoil(weights(models[1])), 11)
    with pytest.raises(RolloutError, match="no complete weight sync"):
        greedy(engine)
    send(engine, weights(models[0]), 12)
    assert tokens(greedy(engine, 12)) == right


def test_two_ranks_agree_with_transformers_after_sleep_and_sync(tmp_path):
    """Tensor parallel 2, untied head, fp32: exact enough to compare with another implementation."""
    old, new = tmp_path / "old", tmp_path / "new"
    make_tiny_llama(old, tie_word_embeddings=False, seed=0)
    make_tiny_llama(new, tie_word_embeddings=False, seed=1)
    with EngineProcess(options(old, tensor_parallel_size=2, dtype="float32")) as engine:
        completions = greedy(engine)
        assert largest_difference(completions, reference_logprobs(old, PROMPTS, tokens(completions))) < 1e-3
        [left] = engine.leave(["kv_cache"])
        assert left["counted_bytes"] == pytest.approx(2 * KV_BYTES, rel=0.01)
        assert left["before_bytes"] - left["after_bytes"] == pytest.approx(left["counted_bytes"], rel=0.1)
        send(engine, {n: w.float() for n, w in weights(new).items()}, 1)
        engine.come(["kv_cache"])
        completions = greedy(engine, 1)
        assert largest_difference(completions, reference_logprobs(new, PROMPTS, tokens(completions))) < 1e-3
        requests = [GenerateRequest(p, seed=i) for i, p in enumerate(PROMPTS)]
        assert engine.generate(requests, SAMPLED, 1) == engine.generate(requests, SAMPLED, 1)
