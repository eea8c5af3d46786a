"""Tiny random models with a real tokenizer, for tests and for profiles that must run anywhere in seconds.

Head counts divide by 2, so that tensor parallel 2 works; head size 32, the smallest that vLLM's CPU attention takes.
"""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 512
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENIZER_TEXT = [
    "Beautiful is better than ugly. Explicit is better than implicit. Simple is better than complex.",
    "Complex is better than complicated. Flat is better than nested. Sparse is better than dense. Readability counts.",
    "State the final answer to the following arithmetic problem: what is the sum of the two numbers, step by step?",
    "the quick brown fox jumps over the lazy dog; the user asks and the assistant answers with a number and nothing else",
    *(f"{a} + {b} = {a + b}" for a in range(7, 60, 4) for b in range(3, 90, 7)),
]


def make_tokenizer():
    """A byte-level BPE tokenizer of `VOCAB_SIZE` entries, the same at every call; chat in the ChatML form."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TOKENIZER_TEXT, trainer)
    end_of_text, start, end = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=start,
        eos_token=end,
        pad_token=end,
        unk_token=end_of_text,
        chat_template=CHAT_TEMPLATE,
    )


def tiny_config(**changes):
    """A LlamaConfig of about 0.4 million parameters that fits `make_tokenizer`; `changes` replace fields."""
    from transformers import LlamaConfig

    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIALS.index("<|im_start|>"),
        "eos_token_id": SPECIALS.index("<|im_end|>"),
        "pad_token_id": SPECIALS.index("<|im_end|>"),
    }
    return LlamaConfig(**{**fields, **changes})


def make_tiny_llama(folder: str | Path, seed: int = 0, **changes) -> Path:
    """Save a random causal LM (fp32) with its tokenizer into `folder`; `changes` are LlamaConfig fields."""
    from transformers import LlamaForCausalLM

    return _save(LlamaForCausalLM, tiny_config(**changes), folder, seed)


def make_tiny_reward(folder: str | Path, seed: int = 1, **changes) -> Path:
    """Save a random sequence-classification model with one label (a reward model) and its tokenizer into `folder`."""
    from transformers import LlamaForSequenceClassification

    return _save(LlamaForSequenceClassification, tiny_config(num_labels=1, **changes), folder, seed)


def _save(model_class, config, folder: str | Path, seed: int) -> Path:
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return Path(folder)
