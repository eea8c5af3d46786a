"""C21: a prompt does not end with an end token that nobody wrote, and does not begin twice."""

from __future__ import annotations

import pytest
from tokenizers import processors

from hybrid.data.prompts import load_prompts
from launch.tiny_models import CHAT_TEMPLATE
from tests.unit.data_files import config, plain_tokenizer, tokenizer, write_jsonl

BOS, EOS = "<|im_start|>", "<|im_end|>"


def base(single: str = f"{BOS} $A {EOS}", template: str | None = None):
    """A tokenizer that wraps texts as `single` says."""
    made = plain_tokenizer()
    specials = [(BOS, 1), (EOS, 2), ("<|endoftext|>", 0)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
    made.chat_template = template
    return made


def ids_of(tmp_path, prompt, tok, **data) -> str:
    """The prompt's ids, decoded."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt}])
    (made,) = load_prompts(config(file, **data), tok).take(1)
    return tokenizer().decode(made.token_ids)


@pytest.mark.parametrize(
    ("single", "prompt", "expected"),
    [
        (f"{BOS} $A {EOS}", "2 + 2 =", f"{BOS}2 + 2 ="),
        (f"$A {EOS}", "2 + 2 =", "2 + 2 ="),
        (f"{BOS} $A {EOS} {EOS}", "2 + 2 =", f"{BOS}2 + 2 ="),
        (f"{BOS} $A <|endoftext|>", "2 + 2 =", f"{BOS}2 + 2 ="),
        (f"{BOS} $A {EOS}", f"a{EOS}b", f"{BOS}a{EOS}b"),
        (f"{BOS} $A {EOS}", f"a{EOS}", f"{BOS}a{EOS}"),
        (f"{BOS} $A", f"{BOS}2 + 2 =", f"{BOS}2 + 2 ="),
        (f"{EOS} $A {EOS}", "2 + 2 =", f"{EOS}2 + 2 ="),
        ("$A", "2 + 2 =", "2 + 2 ="),
    ],
)
def test_c21_texts(tmp_path, single, prompt, expected):
    assert ids_of(tmp_path, prompt, base(single)) == expected


def test_c21_a_tokenizer_that_always_wraps(tmp_path, monkeypatch):
    """Some with code of their own take no notice of add_special_tokens."""
    tok = base()
    call = type(tok).__call__
    monkeypatch.setattr(type(tok), "__call__", lambda self, text, **_: call(self, text))
    assert ids_of(tmp_path, "2 + 2 =", tok) == f"{BOS}2 + 2 ="
    tok.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    assert ids_of(tmp_path, "hi", tok) == f"{BOS}user\nhi{EOS}\n{BOS}assistant\n"


ASKED = f"{BOS}user\nhi{EOS}\n{BOS}assistant\n"
OF_TURNS = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHAT_TEMPLATE, ASKED),
        (CHAT_TEMPLATE + "{{ eos_token }}", ASKED),
        (CHAT_TEMPLATE + "{% if add_generation_prompt %}{{ eos_token }}{% endif %}", ASKED),
        (CHAT_TEMPLATE + "{{ eos_token }}{{ eos_token }}", ASKED),
        (
            CHAT_TEMPLATE
            + "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ eos_token }}",
            ASKED,
        ),
        (OF_TURNS, f"hi{EOS}"),
        (OF_TURNS + "{{ eos_token }}", f"hi{EOS}"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}", "hi"),
        ("{{ bos_token }}{{ bos_token }}{{ messages[0].content }}", f"{BOS}hi"),
    ],
)
def test_c21_templates(tmp_path, template, expected):
    assert ids_of(tmp_path, "hi", base(template=template)) == expected


def test_c21_end_tokens_between_turns_stay(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert ids_of(tmp_path, chat, base(template=OF_TURNS)) == f"a{EOS}b{EOS}c{EOS}"
    assert ids_of(tmp_path, chat, base(template=CHAT_TEMPLATE + "{{ eos_token }}")).count(EOS) == 3


@pytest.mark.parametrize("option", ["add_eos_token", "add_bos_token"])
def test_c21_options_of_llamas_tokenizer(tmp_path, option):
    from transformers import LlamaTokenizer

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "a": 4, "▁a": 5}
    tok = LlamaTokenizer(vocab=vocab, merges=[("▁", "a")], **{"add_bos_token": False, option: True})
    assert tok("a")["input_ids"] == ([5, 2] if option == "add_eos_token" else [1, 5]), "the option is read"
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}])
    (made,) = load_prompts(config(file), tok).take(1)
    assert made.token_ids == ([5] if option == "add_eos_token" else [1, 5])
