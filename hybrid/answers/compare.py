"""Whether a response gives the answer that a label asks for."""

from __future__ import annotations

import re

from hybrid.answers.final import Found, closing_brace, find_answer, sentences
from hybrid.answers.narrow import letters, narrow
from hybrid.answers.quantity import Quantity, read_quantity, same_quantity
from hybrid.answers.structure import Parts, is_name, read_parts
from hybrid.answers.text import clean, tidy
from hybrid.answers.words import date_of, is_words, looks_like_date, same_subject, same_words, time_of

LONGEST = 1000
"""Characters of an answer, beside ten for each of the label's: what is longer is not compared."""
MOST_WORDS = 20
"""Labels with more words are prose: no response would repeat them word for word."""

_CHOICE = re.compile(r"\(?([A-J]|[a-d])\)?[.):]?|\(([A-J])\)\s*[^\s,;/&].*|([A-J])[.):]\s+\S.*", re.DOTALL)
_OPTION = re.compile(r"\(?[A-Ja-j][.):]\s*(?=\S)(.+)", re.DOTALL)
_SEVERAL = re.compile(r"[A-H]{2,8}")
_RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?)+")
_BASE = re.compile(r"\(?([0-9A-F]+)\)?\s*_\s*\{?\s*(\w+)\s*\}?")
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
}


def equal(label: str, response: str) -> bool:
    """Whether the final answer of `response` is `label`."""
    gold = label_answer(label)
    found = find_answer(response)
    if gold is None or found is None:
        return False
    if len(found.text) > LONGEST + 10 * len(gold):
        return False
    # A sentence is not an expression, and would cost a parse to find out.
    prose = found.loose and re.match(r"[A-Za-z]{2,},?\s", found.text) and kind_of(gold) in ("number", "expression")
    if not prose and same(gold, found.text):
        return True
    return found.loose and _same_in_sentence(gold, found, response)


def label_answer(label: str) -> str | None:
    """The answer of a label: itself, or the one at its end when it is a solution (`####`, a box, `<answer>`). None for nothing."""
    text = clean(label)
    if re.search(r"####|\\boxed|\\fbox|<answer>", text):
        found = find_answer(text)
        text = found.text if found else ""
    elif re.search(r"\banswer(?:\s+is\b|\s*:)", text, re.IGNORECASE) and (found := find_answer(text)):
        text = found.text
    text = tidy(text)
    return text if re.search(r"\w|\\", text) else None


def unreadable(label: str) -> str | None:
    """Why no response would be found equal to `label`, but for the same letters in the same order; None for one that can be read."""
    gold = label_answer(label)
    if gold is None:
        return "there is nothing in it"
    if closing_brace(f"{{{gold}}}", 0) != len(gold) + 2 or not equal(gold, f"\\boxed{{{gold}}}"):
        return "its braces do not match"
    if kind_of(gold) == "text":
        return f"it is prose of more than {MOST_WORDS} words" if len(gold.split()) > MOST_WORDS else None
    return None if _readable(gold) else "it is neither a number, an expression, a choice nor words"


def kind_of(gold: str) -> str:
    """choice, number, date, ratio, text or expression, as `narrow` asks."""
    if _choice(gold):
        return "choice"
    if looks_like_date(gold):
        return "date"
    if time_of(gold) or _RATIO.fullmatch(gold):
        return "ratio"
    if read_quantity(gold) is not None:
        return "number"
    return "text" if is_words(gold) else "expression"


def same(label: str, answer: str) -> bool:
    """Whether two answers, without words around them, are the same. `label` may leave out less than `answer`."""
    a, b = tidy(label), tidy(answer)
    if a == b:
        return a != ""
    if not a or not b:
        return False
    if r"\approx" in b and r"\approx" not in a:
        exact, _, rounded = b.partition(r"\approx")
        return same(a, exact) or same(a, rounded)
    if choice := _choice(a):
        return choice == (_choice(b) or _choice(_option_words(b)))
    if option := _OPTION.fullmatch(b):
        b = tidy(option[1])
    if _SEVERAL.fullmatch(a) and list(a) == sorted(set(a)) and sorted(letters(b)) == list(a):
        return True
    if looks_like_date(a) or looks_like_date(b):
        return date_of(a) is not None and date_of(a) == date_of(b)
    if (verdict := _same_colons(a, b)) is not None:
        return verdict
    if (verdict := _same_base(a, b)) is not None:
        return verdict
    x, y = read_quantity(a), read_quantity(b)
    if x is not None and y is not None:
        return same_quantity(x, y)
    p, q = read_parts(a), read_parts(b)
    if p is not None or q is not None:
        if (verdict := _same_parts(a, b, p, q)) is not None:
            return verdict
    elif is_words(a) or is_words(b):
        return same_words(a, b)
    return _same_symbols(a, b, x, y)


def _same_symbols(a: str, b: str, x: Quantity | None, y: Quantity | None) -> bool:
    from hybrid.answers.symbolic import same_expression  # sympy takes a second to import

    if re.sub(r"\s", "", a) == re.sub(r"\s", "", b):
        return True
    return same_expression(_without_unit(a, x), _without_unit(b, y))


def _same_parts(a: str, b: str, p: Parts | None, q: Parts | None) -> bool | None:
    """True or False where the parts decide; None where the expressions have to be compared."""
    if q is not None and q.kind == "equation":
        if p is None or p.kind != "equation":
            return same(a, q.items[1])
        if is_name(p.items[0]) and is_name(q.items[1]) and same(p.items[0], q.items[1]):
            return same(p.items[1], q.items[0])
        if same(p.items[0], q.items[0]):
            return same(p.items[1], q.items[1])
        return None if not (is_name(p.items[0]) and is_name(q.items[0])) else False
    if p is not None and p.kind == "equation":
        return is_name(p.items[0]) and same(p.items[1], b)
    if p is None or q is None:
        if (is_words(a) or is_words(b)) and same_words(a, b):
            return True
        single = p if q is None else q
        if single.kind == "group" and single.name and not is_words(a) and not is_words(b):
            return None
        # One value in braces or in a list of one is that value.
        return (
            len(single.items) == 1
            and single.kind != "matrix"
            and same(*((single.items[0], b) if p else (a, single.items[0])))
        )
    if "matrix" in (p.kind, q.kind):
        return _same_matrix(p, q)
    if p.name and q.name and p.name != q.name:
        return False
    if p.kind == q.kind == "group" and p.brackets != q.brackets:
        return False
    if len(p.items) != len(q.items):
        return False
    if p.ordered or q.ordered:
        return p.brackets != "{}" and q.brackets != "{}" and all(same(x, y) for x, y in zip(p.items, q.items))
    rest = list(q.items)
    for item in p.items:
        match = next((other for other in rest if same(item, other)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _same_matrix(p: Parts, q: Parts) -> bool:
    if p.kind != q.kind or [len(row) for row in p.items] != [len(row) for row in q.items]:
        return False
    return all(same(x, y) for rows in zip(p.items, q.items) for x, y in zip(*rows))


def _same_colons(a: str, b: str) -> bool | None:
    """Times of day and ratios; None for neither."""
    x, y = time_of(a), time_of(b)
    if x and y and (x[2] or y[2] or ":" not in a):
        # A label without AM or PM does not ask for it.
        return x[:2] == y[:2] or (not x[2] and (x[0] % 12, x[1]) == (y[0] % 12, y[1]))
    if not (_RATIO.fullmatch(a) or _RATIO.fullmatch(b)):
        return None
    left, right = (re.split(r"\s*:\s*|\s+to\s+", text) for text in (a, b))
    if len(left) == len(right):
        if all(same(s, t) for s, t in zip(left, right)):
            return True
        if x and y:
            return False
        numbers = [[read_quantity(part) for part in side] for side in (left, right)]
        if None in numbers[0] or None in numbers[1]:
            return False
        (s, *others), (t, *rest) = ([number.value for number in side] for side in numbers)
        return all(u * t == v * s for u, v in zip(others, rest))
    if len(left) == 2 and len(right) == 1:
        return same(f"{left[0]}/{left[1]}", b)
    return len(right) == 2 and len(left) == 1 and same(a, f"{right[0]}/{right[1]}")


def _same_base(a: str, b: str) -> bool | None:
    """Numbers with a base as subscript; the base may be left out on one side."""
    x, y = _BASE.fullmatch(a), _BASE.fullmatch(b)
    if x and y:
        return x[1] == y[1] and _BASES.get(x[2].lower(), x[2]) == _BASES.get(y[2].lower(), y[2])
    if x and x[2] != "10" and x[1][0].isdigit() and re.fullmatch(r"[0-9A-F]+", b):
        return x[1] == b
    return None


def _same_in_sentence(gold: str, found: Found, response: str) -> bool:
    kind = kind_of(gold)
    if kind == "text":
        said = (
            _REPEATED_VERDICT.match(sentences(clean(response).strip() or " ")[0]) if _VERDICT.fullmatch(gold) else None
        )
        if said and same(gold, said[1]):
            return True
        if same_subject(gold, tidy(found.text)):
            return True
    narrowed = narrow(found.text, kind)
    return narrowed is not None and same(gold, narrowed)


_VERDICT = re.compile(r"yes|no|true|false", re.IGNORECASE)
_REPEATED_VERDICT = re.compile(r"\W*(yes|no|true|false)\b\s*[,.:;!-]", re.IGNORECASE)


def _choice(text: str) -> str | None:
    match = _CHOICE.fullmatch(text)
    if not match or (len(text) > 4 and re.match(r"\W*[A-J]\W*(?:or|and)\b", text)):
        return None
    return next(group for group in match.groups() if group).upper()


def _option_words(text: str) -> str:
    """`option C` and `(C) 5` and `c` as a choice."""
    text = re.sub(r"^(?:option|choice|answer)\s+", "", text, flags=re.IGNORECASE)
    lower = re.fullmatch(r"\(?([a-j])\)?[.):]?", text)
    return lower[1].upper() if lower else text


def _without_unit(text: str, read: Quantity | None) -> str:
    """An expression without the unit after it: 36\\pi cm^2."""
    if read is not None:
        return text
    return re.sub(
        r"(?<=[\d}a-z)])\s+(?:square |cubic )?(?:units?|cm|mm|km|inch(?:es)?|feet|ft|meters?|degrees)\b(?:\s?\^\s?\{?\d\}?)?$",
        "",
        text,
    )


def _readable(gold: str) -> bool:
    """Whether `gold` is something that can be compared by value."""
    if (
        _choice(gold)
        or read_quantity(gold)
        or looks_like_date(gold)
        or time_of(gold)
        or _RATIO.fullmatch(gold)
        or _BASE.fullmatch(gold)
    ):
        return True
    if is_words(gold):
        return True
    if parts := read_parts(gold):
        if parts.kind == "matrix":
            return all(_readable(tidy(cell)) for row in parts.items for cell in row if cell)
        if all(_readable(tidy(item)) for item in parts.items if item):
            return True
    from hybrid.answers.symbolic import read_expression  # sympy takes a second to import

    return read_expression(_without_unit(gold, None)) is not None
