"""From a record's prompt to token ids: the chat template is applied once, here, and nothing is tokenised again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hybrid.config.sections import Data
from hybrid.data.messages import Note, require_unicode, to_messages
from hybrid.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOLS_UNREAD = "have tools, which the model's chat template does not read"
ANSWER = "42"
"""Stands for what the assistant will say."""


def render(
    prompt: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    where: str,
    data: Data,
    tools: list[dict[str, Any]] | None = None,
    note: Note = lambda said: None,
) -> tuple[str, list[int]]:
    """Readable text and token ids of `prompt`, a text or a list of {"role", "content"} messages that ends with the user.

    `data.prompt_suffix` is added to the last user message, `data.system_prompt` put in front; the template gets `tools` and
    `data.template_args`. The text is what the user says, without the system prompt and the template's marks; with more than one message
    each is shown as "role: content". A tokenizer without a chat template takes texts only and gets system prompt, blank line and text.
    The ids do not end with an end token that the tokenizer or the template appends. `where` names the record in errors, `note` is told
    what was done to the prompt. Without a `tokenizer` there are no ids.

    Raises `DataError` for an empty or malformed prompt, for messages without a chat template, and when the template refuses them.
    """
    messages = to_messages(prompt, where, note)
    asked = next((message for message in reversed(messages) if message["role"] == "user"), messages[-1])
    asked["content"] += data.prompt_suffix
    text = messages[0]["content"] if len(messages) == 1 else _readable(messages)
    if data.system_prompt is not None:
        if messages[0]["role"] == "system":
            raise DataError(
                f"{where}: the prompt has a system message, and data.system_prompt would add a second one. Remove one of the two."
            )
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    require_unicode(messages, "the prompt", where)
    require_unicode(tools, "the description of the tools", where)
    if tokenizer is None:
        return text, []
    if tools and not reads(tokenizer, "tools", tools):
        note(TOOLS_UNREAD)
    if tokenizer.chat_template:
        return text, _from_template(messages, tools, tokenizer, where, data.template_args)
    if len(messages) > 1 + (data.system_prompt is not None) or not isinstance(prompt, str):
        raise DataError(
            f"{where}: the prompt is a list of messages, but the model's tokenizer has no chat template. Give prompts as text, or "
            "take an instruct model (or add chat_template.jinja to the model's folder)."
        )
    return text, _from_text("\n\n".join(message["content"] for message in messages), tokenizer)


def reads(tokenizer: PreTrainedTokenizerBase, name: str, tools: list[dict[str, Any]] | None = None) -> bool:
    """Whether the tokenizer's chat template mentions the variable `name`."""
    template = tokenizer.get_chat_template(tools=tools) if tokenizer.chat_template else ""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _readable(messages: list[dict[str, Any]]) -> str:
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _from_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of `text` with what the tokenizer puts in front, and without what it appends: the model has to go on from here."""
    bare, ids = tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer(text)["input_ids"]
    start = next((at for at in range(len(ids) - len(bare) + 1) if ids[at : at + len(bare)] == bare), None)
    if start is not None:
        ids = ids[: start + len(bare)]
    begins, ends = _repeats(text, tokenizer.bos_token, at_end=False), _repeats(text, tokenizer.eos_token, at_end=True)
    return _cut_ends(_one_beginning(ids, tokenizer, max(1, begins)), tokenizer, ends)


def _from_template(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    args: dict[str, Any],
) -> list[int]:
    def apply(messages: list[dict[str, Any]], **options: Any) -> Any:
        return tokenizer.apply_chat_template(messages, tools=tools, return_dict=False, **options, **args)

    try:
        ids = apply(messages, add_generation_prompt=True)
        if not ids or ids[-1] != tokenizer.eos_token_id:
            return _one_beginning(ids, tokenizer, 1)
        text = apply(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # Templates are programs: they raise what they like, such as jinja's TemplateError.
        raise DataError(
            f"{where}: the tokenizer's chat template refuses the messages ({', '.join(m['role'] for m in messages)}): {error}"
        ) from error
    try:
        whole = apply([*messages, {"role": "assistant", "content": ANSWER}], tokenize=False)
    except Exception:  # As above; then nothing says that an end token at the end is meant.
        whole = ""
    return _cut_ends(_one_beginning(ids, tokenizer, 1), tokenizer, _ends_of_turn(text, whole, tokenizer.eos_token))


def _ends_of_turn(text: str, whole: str, end: str) -> int:
    """How many of the end tokens at the end of `text` close the user's turn: those that stay when the assistant has answered (`whole`)."""
    text = text.rstrip()
    while text.endswith(end) and not whole.startswith(text):
        text = text.removesuffix(end).rstrip()
    return _repeats(text, end, at_end=True)


def _repeats(text: str, token: str | None, at_end: bool) -> int:
    """How often `token` stands at the end, or the start, of `text`, one after the other."""
    if not token:
        return 0
    form = rf"(?:{re.escape(token)}\s*)+\Z" if at_end else rf"\A(?:\s*{re.escape(token)})+"
    found = re.search(form, text)
    return found.group().count(token) if found else 0


def _cut_ends(ids: list[int], tokenizer: PreTrainedTokenizerBase, keep: int) -> list[int]:
    """`ids` with `keep` end tokens at their end at most."""
    kept = len(ids)
    while kept and ids[kept - 1] == tokenizer.eos_token_id:
        kept -= 1
    return ids[: kept + keep]


def _one_beginning(ids: list[int], tokenizer: PreTrainedTokenizerBase, keep: int) -> list[int]:
    """`ids` with `keep` beginning tokens at their start at most: template and tokenizer may both have written one."""
    start = next((at for at, token in enumerate(ids) if token != tokenizer.bos_token_id), len(ids))
    return ids[max(0, start - keep) :]
