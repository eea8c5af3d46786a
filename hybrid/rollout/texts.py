"""Texts of responses, made once a response has ended.

vLLM decodes every token in each step of an engine, its text and once more the token alone for the log-probs, in the thread that also
launches the GPU's kernels. It must where a text may end a response. Else a whole response is decoded at once, in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybrid.rollout.requests import SamplingOptions

CONTEXT_TOKENS = 16
"""Of the prompt, decoded before a response: some tokenizers leave out the space before the first token of a text."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def decodes_at_end(options: SamplingOptions, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether texts can be made when responses have ended. Between special tokens that are kept vLLM has a rule of its own for spaces, and
    a tokenizer without a backend in Rust one for whole texts."""
    is_fast = getattr(tokenizer, "backend_tokenizer", None) is not None
    return is_fast and not options.stop and not options.keep_special_tokens


def response_text(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], response: Sequence[int], ended: bool
) -> str:
    """The text of the token ids `response`, which follow `prompt`, as vLLM makes it: without special tokens, the last token where it
    `ended` the response, and without last tokens whose bytes are not a whole character."""
    decode = tokenizer.backend_tokenizer.decode
    shown = list(response[:-1] if ended else response)
    for context in (list(prompt[-CONTEXT_TOKENS:]), list(prompt)):
        before = decode(context, skip_special_tokens=True)
        if before or not context:
            break
    text = decode(context + shown, skip_special_tokens=True)
    while shown and text.endswith(INCOMPLETE):
        shown.pop()
        text = decode(context + shown, skip_special_tokens=True)
    return text.removeprefix(before) if text.startswith(before) else decode(shown, skip_special_tokens=True)
