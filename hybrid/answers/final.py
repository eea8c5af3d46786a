"""The one answer of a response: its last box, `<answer>` tag, or sentence that says what the answer is."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from hybrid.answers.text import clean, tidy

TAIL = 20_000
"""Characters at the end of a response that are searched for a box or a tag."""
SENTENCES = 4_000
"""Characters at the end of a response that are searched for a sentence with the answer."""
MOST_BOXES = 20

_THINK = r"(?:think|thinking|thought|reasoning|scratchpad)"
_CLOSED = re.compile(rf"</{_THINK}\s*>|\[/THINK\]|◁/think▷", re.IGNORECASE)
_OPENED = re.compile(rf"<{_THINK}\s*>|\[THINK\]|◁think▷", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.IGNORECASE | re.DOTALL)
_LINK = re.compile(r"[\s$\\()\[\].*]*(?:,|;|\band\b|\bor\b|&)[\s$\\()\[\],*]*(?:(?:and|or)[\s$\\()\[\]*]*)?")
_SAYS = re.compile(
    r"\b(?:answers?|(?:correct|right|best) (?:option|choice|one)|option|choice|solutions?|result)\b[*_\s]*"
    r"(?:(?:to|of|for|would|will|should|must|here|in|therefore)\b[^.:=\n]{0,80}?)?[*_\s]*"
    r"(?:\bis\b|\bare\b|\bbe\b|\bequals\b|:|=|\n)(?:\s+(?:therefore|thus|then|indeed|option|choice)\b)?[*_:,\s]*"
    r"|####\s*",
    re.IGNORECASE,
)
_BEGINS = re.compile(r"(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|solution|result)\s*(?:is\b|:)\s*", re.IGNORECASE)
_IS_CORRECT = re.compile(
    r"(?:option|choice|answer)?\s*[*(]*\b([A-J])\b[*)]*\s+is\s+(?:the\s+)?(?:correct|right|best)\b", re.IGNORECASE
)
_REASON = re.compile(
    r",?\s+(?:because|since|which|so that|as (?:it|the|they)|where|given|due to)\b|,\s+(?:so|as|and it)\b"
)
_SENTENCE = re.compile(r"(?<=[.!?])[\"'*)$]*\s+(?=\S)|\n+")
_INITIAL = re.compile(r"(?:\b(?:[A-Z]|Dr|Mr|Mrs|Ms|St|vs|approx|No))\.$")


@dataclass(frozen=True)
class Found:
    """`text` of an answer. `loose`: it may have words around it, as it was found in a sentence."""

    text: str
    loose: bool


def find_answer(response: str) -> Found | None:
    """The final answer of `response`, or None when it gives none.

    Text before the end of thinking does not count, and nothing does while the thinking is not over. A box or a tag goes before
    any sentence; of several the last counts. Boxes joined by "and", "or" or commas are one answer with several parts.
    """
    text = _compact(_after_thinking(clean(response[-10 * TAIL :])))[-TAIL:]
    boxed, tagged = _boxes(text), _tag(text)
    end, inner, loose = (*tagged, True) if tagged[0] > boxed[0] else (*boxed, False)
    if end >= 0:
        place, nested_box = _boxes(inner) if loose else (-1, "")
        inner, loose = (nested_box, False) if place >= 0 else (inner, loose)
        if len(inner) < SENTENCES and (said := _BEGINS.match(tidy(inner))):
            inner = tidy(inner)[said.end() :]
        return Found(inner.strip(), loose) if inner.strip() else None
    if unfinished := list(_BOX.finditer(text)):
        text = text[: unfinished[0].start()]
    text = text.rstrip()[-SENTENCES:]
    return _said(text) or _last_sentence(text)


def _compact(text: str) -> str:
    """`text` with long runs of the same sign shortened, as they end responses that went astray."""
    text = re.sub(r"[^\S\n]{2,}", " ", text)
    return re.sub(r"(\W)\1{40,}", lambda m: m[1] * 40, text)


def _after_thinking(text: str) -> str:
    if closed := list(_CLOSED.finditer(text)):
        text = text[closed[-1].end() :]
    opened = _OPENED.search(text)
    return text[: opened.start()] if opened else text


def _boxes(text: str) -> tuple[int, str]:
    """(end, content) of the last box; -1 without one. An unfinished box counts up to a line break or $."""
    boxes: list[tuple[int, int, str]] = []
    end = 0
    for match in list(_BOX.finditer(text))[-MOST_BOXES:]:
        if match.start() < end:  # a box within a box
            continue
        start = match.end()
        if text[start : start + 1] == "{":
            end = closing_brace(text, start)
            if end < 0:
                cut = re.compile(r"\$|\n|\\\)|\\\]").search(text, start)
                end = cut.start() if cut else len(text)
                if cut:
                    boxes.append((match.start(), end, text[start + 1 : end]))
                continue
            boxes.append((match.start(), end, text[start + 1 : end - 1]))
        elif bare := re.compile(r"[^\s$\\{}]+").match(text, start):
            end = bare.end()
            boxes.append((match.start(), end, bare[0]))
    if not boxes:
        return -1, ""
    parts = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if not _LINK.fullmatch(text[box[1] : parts[0][0]]):
            break
        parts.insert(0, box)
    content = ", ".join(part[2] for part in parts)
    return parts[-1][1], _inner(content)


def _inner(content: str) -> str:
    """The content of a box, without boxes within it."""
    return _BOX.sub("", content)


def closing_brace(text: str, start: int) -> int:
    """Place after the brace that closes the one at `start`; -1 when none does."""
    depth, skip = 0, False
    for place in range(start, len(text)):
        if skip:
            skip = False
            continue
        char = text[place]
        if char == "\\":
            skip = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return place + 1
    return -1


def _tag(text: str) -> tuple[int, str]:
    tags = list(_TAG.finditer(text))
    if not tags:
        return -1, ""
    return tags[-1].end(), tags[-1][1]


def _said(text: str) -> Found | None:
    """The answer after the last "the answer is", "Answer:" or "####"."""
    last, correct = last_match(_SAYS, text), last_match(_IS_CORRECT, text)
    if correct and (last is None or correct.start() >= last.start() - 1 or correct.end() > last.end()):
        return Found(correct[1], loose=False)
    if last is None:
        return None
    rest = text[last.end() :].lstrip()
    if rest.startswith(("$$", r"\[")):
        closing = rest.find("$$" if rest[0] == "$" else r"\]", 2)
        rest = rest[2:closing] if closing > 0 else rest[2:]
        return Found(rest.strip(), loose=True) if rest.strip() else None
    first = next((part for part in sentences(rest) if part.strip(" *_$.")), "")
    first = _REASON.split(first, maxsplit=1)[0].strip()
    return Found(first, loose=True) if first else None


def _last_sentence(text: str) -> Found | None:
    parts = [part for part in sentences(text) if re.search(r"\w", part)]
    if not parts:
        return None
    return Found(parts[-1].strip(), loose=True)


def last_match(pattern: re.Pattern, text: str) -> re.Match | None:
    """The last match of `pattern` in `text`."""
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def sentences(text: str) -> list[str]:
    """`text` cut at line breaks and after full stops, but not after initials and titles."""
    parts: list[str] = []
    for part in _SENTENCE.split(text):
        if parts and _INITIAL.search(parts[-1]):
            parts[-1] += " " + part
        else:
            parts.append(part)
    return parts
