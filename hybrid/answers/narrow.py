"""From a sentence with an answer in it to the answer, for a label of some kind. One answer: never whichever part fits the label."""

from __future__ import annotations

import re

from hybrid.answers.final import last_match
from hybrid.answers.text import CURRENCIES, tidy

_MATH = re.compile(r"\$\$?([^$\n]+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_PROSE = re.compile(r"[A-Za-z]{3,}[ ,.]+[A-Za-z]{2,} ")
_SIGNS = re.escape("".join(CURRENCIES))
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_VALUE = re.compile(
    rf"(?<![\w.])(?<!\w[-/])(?:-\s?)?\\?[{_SIGNS}]?\s?-?(?:\\[dtc]?frac\s*\{{[^{{}}]*\}}\s*\{{[^{{}}]*\}}|(?:\d+ )?\d+/\d+|(?:{_NUMBER}))"
    r"(?:[eE][+-]?\d+|(?:\s?(?:\\times|\\cdot|\*|x)\s?10\s?\^\s?\{?-?\d+\}?)?)(?:\s?\\?%|\s(?:percent|thousand|million|billion|trillion)\b)?"
)
_LINK = re.compile(r"\s*(?:,|/|-|to|or|and|, or|, and)\s*")
_NOT = re.compile(r"(?:\bnot|n't|\bnever)(?:\s+(?:be|equal|equals|to|necessarily|simply|just))*[\s$\\(]*$")
_SHAPES = {
    "date": re.compile(
        r"\d{4}[-/]\d{1,2}[-/]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}|(?:\d{1,2}(?:st|nd|rd|th)? )?(?:of )?"
        r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?(?: \d{1,2}(?:st|nd|rd|th)?)?,? \d{4}",
        re.IGNORECASE,
    ),
    "ratio": re.compile(
        r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+(?:\s*[ap]\.?m\b\.?)?|\d{1,2}\s*[ap]\.?m\b\.?", re.IGNORECASE
    ),
}
_VERB = re.compile(r"(?:\b(?:is|are|was|were|be|equals|called|named|becomes?|get|gives?|has|have)\b|'s\b|:|=|→|->)\s+")
_OPENING = re.compile(r"^\W*(?:so|thus|hence|therefore|then|and|finally)\b,?\s*", re.IGNORECASE)
_LETTER = re.compile(r"(?<![A-Za-z0-9'\\])([A-J])(?![A-Za-z0-9'])")
_MARKED_LETTER = re.compile(r"(?:\b(?:option|choice|answer)\s+\(?\**|\(|\*\*\(?)([A-J])(?![A-Za-z0-9'])", re.IGNORECASE)


def narrow(sentence: str, kind: str) -> str | None:
    """The answer in `sentence` to compare with a label of `kind`: choice, number, date, ratio, text or expression."""
    bold = re.findall(r"\*\*(.+?)\*\*", sentence)
    if len(bold) == 1 and kind != "choice" and not bold[0].rstrip().endswith(":"):
        sentence = bold[0]
    if kind == "choice":
        return _letter(sentence)
    if kind in _SHAPES:
        found = _SHAPES[kind].findall(sentence)
        return found[-1] if len(set(found)) == 1 else None
    if kind == "text":
        return _words(sentence)
    math = [m for m in _MATH.finditer(sentence) if not _PROSE.search(re.sub(r"\\text\{[^{}]*\}", "", m[0]))]
    values = list(_VALUE.finditer(sentence))
    last = max([m.start() for m in (*math[-1:], *values[-1:])], default=0)
    if _NOT.search(sentence, 0, last):
        return None
    if math and (not values or values[-1].end() <= math[-1].end()):
        return _joined(sentence, math, [next(g for g in m.groups() if g) for m in math])
    if kind == "number" and values:
        return _joined(sentence, values, [m[0] for m in values])
    return _words(sentence)


def letters(text: str) -> list[str]:
    """The letters A to J that stand alone in `text`, each once; not an article, nor "I" as a person."""
    text = re.sub(r"\bI\b(?=\s+[a-z])", "", text)
    text = re.sub(r"(?:^|(?<=[\s*(]))A(?=\s+(?!is\b|or\b|and\b)[a-z])", "", text)
    return list(dict.fromkeys(_LETTER.findall(text)))


def _letter(sentence: str) -> str | None:
    alone = letters(sentence)
    if len(alone) == 1:
        return alone[0]
    marked = list(dict.fromkeys(x.upper() for x in _MARKED_LETTER.findall(sentence)))
    if len(marked) == 1:
        return marked[0]
    lower = re.fullmatch(r"[\s*(\[]*([a-j])[\s*)\].,:]*", sentence)
    return lower[1].upper() if lower and not alone else None


def _joined(sentence: str, matches: list[re.Match], texts: list[str]) -> str:
    """The last value, with those that "or", "and" or a comma joins it to."""
    parts = [texts[-1]]
    for i in range(len(matches) - 2, -1, -1):
        between = sentence[matches[i].end() : matches[i + 1].start()]
        if not (_LINK.fullmatch(between) or not between.strip()):
            break
        parts.insert(0, texts[i])
    return ", ".join(parts)


def _words(sentence: str) -> str:
    """The words after the last verb or colon of the sentence; the whole sentence without one."""
    last = last_match(_VERB, sentence)
    return tidy(sentence[last.end() :] if last else _OPENING.sub("", sentence))
