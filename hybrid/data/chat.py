"""A record's prompt as token ids, once: what engines and trainer both see."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid.config import RunConfig
from hybrid.data.samples import Prompt
from hybrid.data.sources import Record
from hybrid.errors import DataError


def make_prompt(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase, record: Record) -> Prompt:
    """Tokenise a record with system prompt, suffix and chat template. `index` is set by whoever hands the prompt out.

    Raises `DataError` naming the record when its prompt is missing, empty or not a text or list of chat messages.
    """
    data = cfg.data
    if data.prompt_field not in record.columns:
        have = ", ".join(record.columns)
        raise DataError(f"{record.where} has no column {data.prompt_field}: it has {have}. Set data.prompt_field.")
    messages = _messages(record, data.prompt_field)
    last = messages[-1]
    messages = [*messages[:-1], {**last, "content": last["content"] + data.prompt_suffix}]
    if data.system_prompt is not None:
        messages = [{"role": "system", "content": data.system_prompt}, *messages]
    others = {k: v for k, v in record.columns.items() if k not in (data.prompt_field, data.label_field)}
    text = "\n".join(m["content"] for m in messages if m["role"] != "system")
    return Prompt(-1, text, _token_ids(tokenizer, messages, record), record.columns.get(data.label_field), others)


def _messages(record: Record, name: str) -> list[dict[str, str]]:
    value: Any = record.columns[name]
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    rule = f"{record.where}: column {name} must be a text or a non-empty list of messages with role and content"
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{rule}; it is {value!r:.80}.")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"{rule}; one is {message!r:.80}.")
    if not messages[-1]["content"].strip():
        raise DataError(f"{record.where}: column {name} is empty.")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def _token_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], record: Record) -> list[int]:
    if tokenizer.chat_template is not None:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    if len(messages) > 1:
        raise DataError(
            f"{record.where}: the model's tokenizer has no chat template, so it takes a plain text and no system prompt. "
            "Use a chat model, or prompts that are texts and data.system_prompt=null."
        )
    return tokenizer(messages[0]["content"])["input_ids"]
