"""The self-test at the start of a run: how long its prompts and answers may be, and how far engine and trainer are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS = (
    "The capital of France is",
    "One, two, three, four, five, six, seven, eight, nine, ten. Now count backwards:",
)
NEW_TOKENS = 12


def self_test_tokens(max_sequence_tokens: int) -> int:
    """Tokens of an answer: enough to decode from decoded tokens, and at most half of a sequence."""
    return max(1, min(NEW_TOKENS, max_sequence_tokens // 2))


def self_test_prompts(tokenizer: PreTrainedTokenizerBase, max_sequence_tokens: int) -> list[list[int]]:
    """Two prompts that fit beside their answers, of unlike length, so that padding and batching mistakes show."""
    longest = max_sequence_tokens - self_test_tokens(max_sequence_tokens)
    short, long = ([int(i) for i in tokenizer(text)["input_ids"]] or [0] for text in TEXTS)
    return [short[: max(1, longest - 1)], long[:longest]]
