"""From a record's prompt to token ids: the chat template is applied once, here, and nothing is tokenised again."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid.errors import DataError

ROLES = ("system", "user", "assistant")


def render(
    prompt: Any, tokenizer: PreTrainedTokenizerBase, where: str, system_prompt: str | None = None, suffix: str = ""
) -> tuple[str, list[int]]:
    """Readable text and token ids of `prompt`, a text or a list of {"role", "content"} messages that ends with the user.

    `suffix` is added to the last user message, `system_prompt` put in front. The text is what the user says, without the system prompt
    and the template's marks; with more than one message each is shown as "role: content". A tokenizer without a chat template takes
    texts only and gets system prompt, blank line and text. `where` names the record in errors.

    Raises `DataError` for an empty or malformed prompt, for messages without a chat template, and when the template refuses them.
    """
    messages = _messages(prompt, where)
    messages[-1]["content"] += suffix
    text = messages[0]["content"] if len(messages) == 1 else _readable(messages)
    if system_prompt is not None:
        if messages[0]["role"] == "system":
            raise DataError(
                f"{where}: the prompt has a system message, and data.system_prompt would add a second one. Remove one of the two."
            )
        messages.insert(0, {"role": "system", "content": system_prompt})
    if tokenizer.chat_template:
        return text, _apply_template(messages, tokenizer, where)
    if not isinstance(prompt, str):
        raise DataError(
            f"{where}: the prompt is a list of messages, but the model's tokenizer has no chat template. Give prompts as text, or "
            "take an instruct model (or add chat_template.jinja to the model's folder)."
        )
    return text, tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]


def _messages(prompt: Any, where: str) -> list[dict[str, Any]]:
    """`prompt` as a new list of messages of a sound shape."""
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt:
        messages = [_message(message, f"{where}: message {i}") for i, message in enumerate(prompt)]
    else:
        shown = "an empty list" if prompt == [] else type(prompt).__name__
        raise DataError(f"{where}: the prompt must be a text or a list of chat messages, not {shown}.")
    if messages[-1]["role"] != "user":
        raise DataError(f"{where}: the last message is from {messages[-1]['role']}; a prompt must end with the user.")
    if not messages[-1]["content"].strip():
        raise DataError(f"{where}: the prompt is empty.")
    try:
        "".join(message["content"] for message in messages).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the prompt is no valid Unicode: {error}.") from error
    return messages


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message):
        raise DataError(f'{where} must be {{"role": ..., "content": ...}}, not {str(message)[:80]!r}.')
    if message["role"] not in ROLES:
        raise DataError(f"{where} has the role {message['role']!r}; roles are {', '.join(ROLES)}.")
    if not isinstance(message["content"], str):
        raise DataError(
            f"{where} has a content of type {type(message['content']).__name__}; only text is supported, as one string."
        )
    return dict(message)


def _readable(messages: list[dict[str, Any]]) -> str:
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _apply_template(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # Templates are programs: they raise what they like, such as jinja's TemplateError.
        raise DataError(
            f"{where}: the tokenizer's chat template refuses the messages ({', '.join(m['role'] for m in messages)}): {error}"
        ) from error
