"""From a record's prompt and tools, as people write them, to messages and tools of a sound shape."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

from hybrid.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
ENDS = ("user", "tool")
"""Who speaks last in a prompt."""

ANSWERED = "end with the assistant's answer, which is left out"
AS_TEXT = "are the text of a message list and are read as messages"
TOOLS_FIX = "Correct them, or name another column with data.tools_field; data.tools_field=null reads none."

Note = Callable[[str], None]
"""Told what was done to a prompt, in words that go on after "N prompts"."""


def to_messages(prompt: Any, where: str, note: Note) -> list[dict[str, Any]]:
    """`prompt`, a text, a list of chat messages or the text of such a list, as new messages; the last one is from the user or a tool.

    Contents are texts; parts of a text are joined. Keys without a value are left out, and so are answers at the end. `where` names the
    record in errors. Raises `DataError` for anything else.
    """
    if isinstance(prompt, str) and (written := _written_list(prompt)):
        note(AS_TEXT)
        prompt = written
    if isinstance(prompt, dict) and {"role", "content"} <= prompt.keys():
        prompt = _rows(prompt)
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt:
        messages = [_message(message, f"{where}: message {i}") for i, message in enumerate(_asked(prompt, where, note))]
    else:
        shown = "an empty list" if prompt == [] else type(prompt).__name__
        raise DataError(f"{where}: the prompt must be a text or a list of chat messages, not {shown}.")
    if messages[-1]["role"] not in ENDS:
        raise DataError(f"{where}: the last message is from {messages[-1]['role']}; a prompt must end with the user.")
    if not messages[-1]["content"].strip():
        raise DataError(f"{where}: the prompt is empty.")
    return messages


def to_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """`value`, a list of tools or its JSON text, as new dicts without keys that have no value; None where there are none.

    Raises `DataError` for anything else.
    """
    tools = _parsed(value, where)
    if isinstance(tools, list):
        tools = [_parsed(tool, where) for tool in tools]
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{where}: the tools must be a list of objects or its JSON text, not {str(value)[:80]!r}. {TOOLS_FIX}"
        )
    return without_nulls(tools)


def _parsed(value: Any, where: str) -> Any:
    """`value`; of a text, the JSON that it is."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: the tools are not JSON: {error}. {TOOLS_FIX}") from error


def without_nulls(value: Any) -> Any:
    """A copy of `value` without the keys that have no value: `datasets` gives every object the keys of all others."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def require_unicode(value: Any, what: str, where: str) -> None:
    """Raise `DataError` where a text in `value` has a lone surrogate: no tokenizer reads it."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {what} is not valid Unicode: {error}. Remove the character.") from error


def _written_list(text: str) -> list[Any] | None:
    """The messages that `text` is, as JSON or as Python prints them; None where it is a text like others."""
    if not text.lstrip().startswith("["):
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        sound = isinstance(found, list) and found and all(isinstance(m, dict) and "role" in m for m in found)
        return found if sound and any("content" in m for m in found) else None
    return None


def _rows(columns: dict[str, Any]) -> list[Any]:
    """The messages that `columns` holds: lists of equal length, as a Sequence feature of `datasets` stores them, or one message."""
    if not isinstance(columns["role"], list):
        return [columns]
    lists = {key: values for key, values in columns.items() if isinstance(values, list)}
    return [dict(zip(lists, row)) for row in zip(*lists.values())]


def _asked(prompt: list[Any], where: str, note: Note) -> list[Any]:
    """`prompt` without the answer that it ends with."""
    end = len(prompt)
    while end and isinstance(prompt[end - 1], dict) and prompt[end - 1].get("role") == "assistant":
        end -= 1
    if not end:
        raise DataError(f"{where}: all messages are from the assistant; a prompt must end with the user.")
    if end < len(prompt):
        note(ANSWERED)
    return prompt[:end]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise DataError(f'{where} must be {{"role": ..., "content": ...}}, not {str(message)[:80]!r}.')
    message = without_nulls(message)
    if message.get("role") not in ROLES:
        raise DataError(f"{where} has the role {message.get('role')!r}; roles are {', '.join(ROLES)}.")
    if "content" not in message and message["role"] == "assistant" and message.get("tool_calls"):
        message["content"] = ""
    if "content" not in message:
        raise DataError(f'{where} must be {{"role": ..., "content": ...}}, not {str(message)[:80]!r}.')
    if isinstance(message["content"], list):
        message["content"] = "".join(_part(part, where) for part in message["content"])
    if not isinstance(message["content"], str):
        raise DataError(
            f"{where} has a content of type {type(message['content']).__name__}; only text is supported, as one string or as parts "
            '{"type": "text", "text": ...}.'
        )
    return message


def _part(part: Any, where: str) -> str:
    """The text of one part of a content."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        said = f"the type {kind!r}" if kind != "text" else "no text"
        raise DataError(f"{where} has a part with {said}; only text is supported. Remove the part, or the record.")
    return part["text"]
