"""Texts made once a response has ended are those that vLLM makes token by token."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from hybrid.rollout.requests import SamplingOptions
from hybrid.rollout.texts import decodes_at_end, response_text

CORPUS = [
    "The quick brown fox (don't!) jumps over 12 lazy dogs.",
    "Grüße aus Köln, schöne Straße",
    "数学は楽しい 🙂🙃 naïve café",
    "x = {1: 'a'}\n\n  y",
] * 4
SPECIAL = ["<|end|>", "<|user|>"]


def byte_level():
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, special_tokens=SPECIAL)
    )
    return made


def metaspace():
    """As Llama 2: spaces are part of the words, the one at the start of a text is left out, unknown characters are bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted({c for c in CORPUS[0] if c != " "})]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    made.add_special_tokens(SPECIAL)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(strip)
    return made


def word_pieces():
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=False)
    made.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL]))
    return made


MADE = {"byte level": byte_level(), "metaspace": metaspace(), "word pieces": word_pieces()}


def step_by_step(tokenizer, prompt, response, ended):
    """vLLM's `FastIncrementalDetokenizer`."""
    stream = decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
    return "".join(stream.step(tokenizer, token) or "" for token in (response[:-1] if ended else response))


@pytest.mark.parametrize("name", MADE)
def test_they_are_those_of_decoding_step_by_step(name):
    tokenizer = MADE[name]
    wrapped = SimpleNamespace(backend_tokenizer=tokenizer)
    draw = random.Random(0)
    end = tokenizer.token_to_id("<|end|>")
    texts = 0
    for text in CORPUS[:4]:
        ids = tokenizer.encode(text).ids
        for cut in range(1, len(ids)):
            for last in range(cut + 1, len(ids) + 1):
                prompt, response = [end, *ids[:cut]], ids[cut:last]
                if tokenizer.decode(prompt).endswith("\N{REPLACEMENT CHARACTER}"):
                    continue  # a prompt that ends inside of a character
                ended = draw.random() < 0.5
                response = [*response, end] if ended else response
                ours = response_text(wrapped, prompt, response, ended)
                theirs = step_by_step(tokenizer, prompt, response, ended)
                assert ours == theirs, (prompt, response)
                texts += bool(ours)
    assert texts > 100


def test_the_context_may_hold_special_tokens_only():
    tokenizer = MADE["metaspace"]
    wrapped = SimpleNamespace(backend_tokenizer=tokenizer)
    user, word = tokenizer.token_to_id("<|user|>"), tokenizer.encode("The fox").ids
    prompt = [*word, *[user] * 40]
    assert response_text(wrapped, prompt, word, False) == step_by_step(tokenizer, prompt, word, False)
    assert response_text(wrapped, [user], word, False) == step_by_step(tokenizer, [user], word, False)
    assert response_text(wrapped, word, [user], True) == ""


@pytest.mark.parametrize(
    ("options", "fast", "at_end"),
    [
        ({}, True, True),
        ({"stop": ("\n",)}, True, False),
        ({"keep_special_tokens": True}, True, False),
        ({}, False, False),
    ],
)
def test_vllm_decodes_where_it_must(options, fast, at_end):
    tokenizer = SimpleNamespace(backend_tokenizer=MADE["byte level"]) if fast else SimpleNamespace()
    assert decodes_at_end(SamplingOptions(8, **options), tokenizer) is at_end
