"""Answers with parts: lists, sets, tuples, intervals, inequalities, matrices, equations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from hybrid.answers.quantity import read_quantity
from hybrid.answers.text import closes_at_end, split_top

_RELATION = re.compile(r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|\\ne(?![a-zA-Z])|<|>|(?<![<>!:])=")
_MIRROR = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_ENVIRONMENT = re.compile(r"\\begin\s*\{([pbBvV]?(?:small)?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
_NAME = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\^\{?-1\}?)?'?(?:\([a-zA-Z, ]+\))?|\([a-zA-Z](?:, ?[a-zA-Z])+\)")
_GROUPED = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?!,?\d)")
_REALS = re.compile(r"\\mathbb\s*\{?R\}?|(?:all )?real numbers|all reals|\\R", re.IGNORECASE)
_JOINED = re.compile(
    r"\s*(?:,\s*)?(?:\bor\b|\band\b|\\cup(?![a-zA-Z])|\\lor\b|\\vee\b|\\land\b)\s*|\s*[,;]\s*|\s+U\s+(?=[(\[])"
)


@dataclass(frozen=True)
class Parts:
    """An answer in parts. `kind`: list (order free), group (in brackets), matrix (rows, each a group), equation (left and right)."""

    kind: str
    items: tuple
    brackets: str = ""
    name: str | None = None
    """Variable of an inequality that was turned into an interval."""

    @property
    def ordered(self) -> bool:
        return self.kind != "list" and self.brackets != "{}"


@lru_cache(maxsize=4096)
def read_parts(text: str) -> Parts | None:
    """The parts of `text`, as `tidy` gives it; None for an answer that is one piece."""
    if read_quantity(text) is not None:
        return None
    if _REALS.fullmatch(text):
        return Parts("group", (r"-\infty", r"\infty"), "()")
    if text[:1] in "([" and text[-1:] in ")]" and _ENVIRONMENT.fullmatch(text[1:-1].strip()):
        text = text[1:-1].strip()
    if match := _ENVIRONMENT.fullmatch(text):
        # Determinants are numbers, not matrices.
        return None if match[1][0] in "vV" else _matrix(match[2])
    pieces = [piece for piece in _split(text) if piece.strip()]
    if len(pieces) > 1:
        return Parts("list", tuple(_flat(pieces)))
    if set_of := re.fullmatch(r"(?:[a-zA-Z]|\([a-z, ]+\))\s*\\in(?![a-zA-Z])\s*(.+)", text):
        return read_parts(set_of[1].strip())
    text = re.sub(r"\\([{}])", r"\1", text) if text.startswith(r"\{") else text
    if text[:1] in "([{" and text[:1] and closes_at_end(text) and text[-1] in ")]}":
        items = tuple(part.strip() for part in split_top(_grouped(text[1:-1])))
        if len(items) == 1 and text[0] == "(":
            return read_parts(items[0])
        if items[0]:
            rows = [read_parts(item) for item in items]
            if text[0] == "[" and len(items) > 1 and all(row and row.brackets == "[]" for row in rows):
                return Parts("matrix", tuple(row.items for row in rows))
            return Parts("group", items, text[0] + text[-1])
    if text[:1] in "([" and text[-1:] in ")]" and _closes_half_open(text):
        return Parts("group", tuple(part.strip() for part in split_top(text[1:-1])), text[0] + text[-1])
    return _relation(text) or _plus_minus(text)


def _closes_half_open(text: str) -> bool:
    """[0,1) and (0,1]: brackets of two kinds around two ends."""
    inner = text[1:-1]
    return not re.search(r"[()\[\]]", re.sub(r"\([^()]*\)", "", inner)) and len(split_top(inner)) == 2


def _split(text: str) -> list[str]:
    """`text` cut at commas, "and", "or" and unions that stand outside of brackets."""
    text = _grouped(text)
    pieces, start, depth, place = [], 0, 0, 0
    while place < len(text):
        char = text[place]
        if text.startswith((r"\begin", r"\end"), place):
            depth += 1 if text[place + 1] == "b" else -1
            place += 4
            continue
        depth += (char in "([{") - (char in ")]}")
        match = _JOINED.match(text, place) if depth == 0 else None
        if match and match.end() > place and (char not in "oau" or place == 0 or not text[place - 1].isalnum()):
            pieces.append(text[start:place])
            start = place = match.end()
            continue
        place += 1
    return [*pieces, text[start:]]


def _grouped(text: str) -> str:
    """Thousands in a list whose items stand apart: 1,000, 2,000."""
    return _GROUPED.sub(lambda m: m[0].replace(",", ""), text) if re.search(r"[,;]\s", text) else text


def _flat(pieces: list[str]) -> list:
    """Pieces, with \\pm and \\ne written out."""
    flat: list = []
    for piece in pieces:
        read = read_parts(piece.strip())
        flat += read.items if read is not None and read.kind == "list" else [piece.strip()]
    return flat


def _matrix(body: str) -> Parts:
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr\b", body) if row.strip()]
    return Parts("matrix", tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows))


def _plus_minus(text: str) -> Parts | None:
    places = list(re.finditer(r"\\pm(?![a-zA-Z])|\\mp(?![a-zA-Z])|\+/-", text))
    if not places:
        return None
    up = re.sub(r"\\pm(?![a-zA-Z])|\+/-", "+", re.sub(r"\\mp(?![a-zA-Z])", "-", text))
    down = re.sub(r"\\pm(?![a-zA-Z])|\+/-", "-", re.sub(r"\\mp(?![a-zA-Z])", "+", text))
    return Parts("list", tuple(re.sub(r"(^|=)\s*\+\s*", r"\1", sign).strip() for sign in (up, down)))


def _relation(text: str) -> Parts | None:
    if "{" in text and re.search(r"\\(?:sum|prod|lim|int)\b", text):
        return None
    signs = [m for m in _RELATION.finditer(text) if _depth(text, m.start()) == 0]
    if not signs:
        return None
    ends = [0, *(m.end() for m in signs)]
    sides = [text[a:b].strip() for a, b in zip(ends, [*(m.start() for m in signs), len(text)])]
    names = [m[0] for m in signs]
    if not all(sides):
        return None
    if set(names) == {"="}:
        expanded = _plus_minus(sides[-1])
        if expanded is not None and _NAME.fullmatch(sides[0]):
            return Parts("list", tuple(f"{sides[0]} = {item}" for item in expanded.items))
        return Parts("equation", (sides[0], sides[-1]))
    if names == [r"\ne"] and _NAME.fullmatch(sides[0]):
        items = (f"(-\\infty,{sides[1]})", f"({sides[1]},\\infty)")
        return Parts("list", items)
    return _interval(sides, names)


def _interval(sides: list[str], names: list[str]) -> Parts | None:
    """x > 3, 3 < x and 1 < x <= 2 as intervals; None for inequalities that would have to be solved."""
    if len(names) == 1 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        sides, names = sides[::-1], [_MIRROR.get(names[0], names[0])]
    if len(names) == 1 and _NAME.fullmatch(sides[0]) and names[0] in _MIRROR:
        closed = "\\" in names[0]
        if names[0] in (">", r"\ge"):
            return Parts("group", (sides[1], r"\infty"), ("[" if closed else "(") + ")", sides[0])
        return Parts("group", (r"-\infty", sides[1]), "(" + ("]" if closed else ")"), sides[0])
    if len(names) == 2 and _NAME.fullmatch(sides[1]):
        if set(names) <= {">", r"\ge"}:
            sides, names = sides[::-1], [_MIRROR[name] for name in names[::-1]]
        if set(names) <= {"<", r"\le"}:
            brackets = ("[" if names[0] == r"\le" else "(") + ("]" if names[1] == r"\le" else ")")
            return Parts("group", (sides[0], sides[2]), brackets, sides[1])
    return None


def is_name(text: str) -> bool:
    """Whether `text` is a variable, a function of variables or a tuple of variables: x, f(x), (x, y)."""
    return _NAME.fullmatch(text) is not None


def _depth(text: str, place: int) -> int:
    return sum((char in "([{") - (char in ")]}") for char in text[:place])
