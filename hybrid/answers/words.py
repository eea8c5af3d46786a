"""Answers that are words: compared as text, never as products of letters."""

from __future__ import annotations

import re

FUNCTIONS = set(
    r"sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp sqrt max min gcd lcm det mod lim pi infinity infty".split()
)
_MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()
_PRODUCTS = {*"xy yx xz zx yz zy xyz xzy yxz yzx zxy zyx ab ba ac ca bc cb mn nm pq qp rs sr uv vu kn nk xx yy".split()}
_VERDICTS = {"yes", "no", "true", "false"}
_FILLERS = re.compile(r"^(?:(?:in|on|at|by)\s+)?(?:(?:the|a|an)\s+)?(?=\S)")


def is_words(text: str) -> bool:
    """Whether `text`, as `tidy` gives it, is words rather than mathematics."""
    if re.fullmatch(r"[A-Za-z]+(?:\+\+|#)", text):
        return True
    bare = re.sub(r"[.,'!?&\"_-]", " ", text)
    if re.fullmatch(r"[^\W\d_]+(?:\s+[^\W\d_]+)*", bare.strip()) is None:
        # Words with digits or signs in them, such as Apollo 11, as long as nothing in it is LaTeX.
        return bool(re.search(r"[^\W\d_]{3,}", text)) and not re.search(r"[\\^=<>{}+*]", text) and not _calls(text)
    words = bare.split()
    if len(words) == 1:
        word = words[0]
        return len(word) > 1 and word.lower() not in ("pi", "infinity", "infty") and word not in _PRODUCTS
    return not all(len(word) == 1 or word.lower() in FUNCTIONS for word in words)


def same_words(label: str, answer: str) -> bool:
    """Equal but for capitals, articles and punctuation; "Yes, it is." is yes."""
    a, b = _plain(label), _plain(answer)
    if a == b:
        return bool(a)
    if a in _VERDICTS:
        said = _VERDICTS & set(b.split())
        return bool(re.match(rf"{a}\b\s*[,.;:!-]", answer.strip().lower())) and said == {a}
    return False


def same_subject(label: str, sentence: str) -> bool:
    """Whether `sentence` is of the form "LABEL is ...", and not "... is not ...". Yes and no may come first as well."""
    if re.search(r"\b(?:not|never|or)\b|n't\b", sentence, re.IGNORECASE):
        return False
    subject = re.split(r"\s+(?:is|was|are|were)\s+", sentence, maxsplit=1)
    return len(subject) == 2 and _plain(subject[0]) == _plain(label)


def date_of(text: str) -> tuple[int, int, int] | None:
    """(year, month, day) of a date whose order is not in doubt: 2024-01-15, January 15, 2024, 15 January 2024."""
    if match := re.fullmatch(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})", text):
        return int(match[1]), int(match[2]), int(match[3])
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b|\bof\b|,", " ", text.lower())
    if match := re.fullmatch(r"\s*([a-z]{3})[a-z]*\.?\s+(\d{1,2})\s+(\d{4})\s*", text):
        name, day, year = match.groups()
    elif match := re.fullmatch(r"\s*(\d{1,2})\s+([a-z]{3})[a-z]*\.?\s+(\d{4})\s*", text):
        day, name, year = match.groups()
    else:
        return None
    return (int(year), _MONTHS.index(name) + 1, int(day)) if name in _MONTHS else None


def looks_like_date(text: str) -> bool:
    """Three numbers, or a date with the month's name."""
    return bool(re.fullmatch(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}", text)) or date_of(text) is not None


def time_of(text: str) -> tuple[int, int, bool] | None:
    """(hour, minute, whether it is known which half of the day) of 2:30 PM, 14:30 or 7 pm."""
    match = re.fullmatch(r"(\d{1,2})(?:\s*:\s*(\d{2}))?(?::00)?\s*([ap])?(?(3)\.?\s*m\.?)", text.strip().lower())
    if not match or not (match[2] or match[3]):
        return None
    hour, minute, half = int(match[1]), int(match[2] or 0), match[3]
    if minute > 59 or hour > 23 or (half and not 1 <= hour <= 12):
        return None
    if half:
        hour = hour % 12 + (12 if half == "p" else 0)
    return hour, minute, bool(half) or hour > 12 or hour == 0


def _plain(text: str) -> str:
    text = re.sub(r"[.,;:!?'\"()]", "", text.casefold())
    return _FILLERS.sub("", re.sub(r"[\s_-]+", " ", text).strip())


def _calls(text: str) -> bool:
    """Whether every word in `text` is the name of a function or a single letter: sin(x) / 2."""
    return all(word.lower() in FUNCTIONS or len(word) == 1 for word in re.findall(r"[^\W\d_]+", text))
