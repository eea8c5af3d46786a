"""Numbers as people write them, read exactly: 1,000; 1.5e20; 1 3/4; 50%; $18.90; 5 cm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache

from hybrid.answers.text import CURRENCIES

LARGEST_EXPONENT = 5000
"""Decimals beyond 10 to this power are compared by their digits: as a fraction they would fill the memory."""
ENOUGH_DIGITS = 5
"""Significant digits of a decimal that may stand for a value that has no end, such as 1/3 or a root."""

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)(?:\.\d*)?|\.\d+"
_TIMES_TEN = r"(?:[eE]([+-]?\d+)|\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+)))"
_DECIMAL = re.compile(rf"({_DIGITS})(?:{_TIMES_TEN})?")
_POWER = re.compile(r"10\s*(?:\^|\*\*)\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
_LATEX_FRACTION = re.compile(r"(?:(\d+)\s*)?\\frac\s*\{\s*([+-]?[\d,.]+)\s*\}\s*\{\s*([+-]?[\d,.]+)\s*\}")
_FRACTION = re.compile(rf"(?:(\d+)[ -])?({_DIGITS})\s*/\s*({_DIGITS})")
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORDS = dict(
    zip(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
        "nineteen twenty".split(),
        range(21),
    )
)
_CURRENCY_WORDS = {
    **dict.fromkeys(("dollar", "dollars", "usd", "us dollars"), "USD"),
    **dict.fromkeys(("euro", "euros", "eur"), "EUR"),
    **dict.fromkeys(("pound", "pounds", "gbp"), "GBP"),
    **dict.fromkeys(("yen", "jpy"), "JPY"),
    **dict.fromkeys(("rupee", "rupees", "inr"), "INR"),
}
_UNITS = {
    "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre", "m": "meter metre", "kg": "kilogram",
    "g": "gram", "mg": "milligram", "ml": "milliliter millilitre", "l": "liter litre", "hr": "hour h", "min": "minute", "s": "second sec",
    "ft": "foot feet", "in": "inch inches", "mi": "mile", "yd": "yard", "lb": "lbs", "mph": "miles_per_hour", "n": "newton", "j": "joule",
    "w": "watt", "v": "volt", "k": "kelvin", "pa": "pascal", "hz": "hertz", "kw": "kilowatt", "day": "d", "°": "degree deg", "oz": "ounce",
}  # fmt: skip
_KNOWN = {alias: unit for unit, aliases in _UNITS.items() for alias in (unit, *aliases.split())}
_ANY_UNIT = {"unit", "square unit", "cubic unit", "unit^2", "unit^3"}
_NOT_UNITS = re.compile(r"\b(?:or|and|to|pi|if|when|where|is|not|mod)\b")


@dataclass(frozen=True)
class Quantity:
    """A number that was read. `digits`: significant ones of a decimal, None for a fraction."""

    value: Decimal | Fraction
    digits: int | None
    percent: bool = False
    unit: str | None = None


@lru_cache(maxsize=4096)
def read_quantity(text: str) -> Quantity | None:
    """The number that `text`, as `tidy` gives it, is; None for anything else."""
    if len(text) > 10_000:
        return None
    if text.lower() in _WORDS:
        return Quantity(Decimal(_WORDS[text.lower()]), 1)
    rest = text.strip()
    negative = re.match(r"([+-])\s*", rest)
    if negative:
        rest = rest[negative.end() :]
    unit = CURRENCIES.get(rest[:1])
    if unit:
        rest = rest[1:].lstrip()
        if not negative and (negative := re.match(r"([+-])\s*", rest)):
            rest = rest[negative.end() :]
    elif len(rest) > 1 and rest[-1] in CURRENCIES:
        unit, rest = CURRENCIES[rest[-1]], rest[:-1].rstrip()
    read = _read_number(rest)
    if read is None:
        return None
    value, digits, end = read
    rest, spaced = rest[end:].strip(), rest[end : end + 1] == " "
    if scale := re.match(r"(thousand|million|billion|trillion)s?\b", rest):
        value, rest = value * 10 ** _SCALES[scale[1]], rest[scale.end() :].strip()
    percent = re.match(r"%|percent\b|per cent\b|pct\b", rest, re.IGNORECASE)
    if percent:
        rest = rest[percent.end() :].strip()
    if unit and re.match(r"(?:per|each|an?)\b|/", rest):
        rest = ""
    if rest:
        found = _read_unit(rest, spaced)
        if found is None or (unit and found != unit):
            return None
        unit = found
    return Quantity(-value if negative and negative[1] == "-" else value, digits, bool(percent), unit)


def same_quantity(label: Quantity, answer: Quantity) -> bool:
    """Equal in value; a unit, a currency or a percent sign may be left out on one side, but must not differ."""
    if label.unit and answer.unit and label.unit != answer.unit and not {label.unit, answer.unit} & _ANY_UNIT:
        return False
    if _same_value(label, answer):
        # 0.5% is not 0.5; 50% for a label 50 is how a question for a percentage is answered.
        return not (answer.percent and not label.percent and abs(label.value) < 1 and label.value != 0)
    if label.percent == answer.percent:
        return False
    whole, share = (label, answer) if label.percent else (answer, label)
    return _same_value(Quantity(whole.value / 100, whole.digits), share)


def stands_for(decimal: Quantity, exact: Fraction | Decimal) -> bool:
    """Whether `decimal` is `exact`, rounded or cut to its own digits, at least `ENOUGH_DIGITS` of them."""
    if decimal.digits is None or decimal.digits < ENOUGH_DIGITS or not isinstance(decimal.value, Decimal):
        return False
    step = Fraction(10) ** decimal.value.as_tuple().exponent
    return abs(Fraction(decimal.value) - Fraction(exact)) < step


def _same_value(a: Quantity, b: Quantity) -> bool:
    if isinstance(a.value, Decimal) and isinstance(b.value, Decimal):
        return a.value == b.value
    if any(abs(x.value.adjusted()) > LARGEST_EXPONENT for x in (a, b) if isinstance(x.value, Decimal) and x.value):
        return False
    if Fraction(a.value) == Fraction(b.value):
        return True
    for decimal, exact in ((a, b), (b, a)):
        if isinstance(exact.value, Fraction) and not _ends(exact.value) and stands_for(decimal, exact.value):
            return True
    return False


def _ends(value: Fraction) -> bool:
    """Whether the decimals of `value` end."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _read_number(text: str) -> tuple[Decimal | Fraction, int | None, int] | None:
    """(value, significant digits of a decimal, characters read)."""
    try:
        if match := _REPEATING.match(text):
            whole, start, cycle = match.groups()
            top = int(whole + start + cycle) - int(whole + start or "0")
            return Fraction(top, (10 ** len(cycle) - 1) * 10 ** len(start)), None, match.end()
        if match := _LATEX_FRACTION.match(text) or _FRACTION.match(text):
            part = _fraction(match[2]) / _fraction(match[3])
            return int(match[1] or 0) + part, None, match.end()
        if (match := _POWER.match(text)) and not re.match(r"\s*[\^!_]|\*\*", text[match.end() :]):
            return Decimal(f"1e{match[1] or match[2]}"), 1, match.end()
        if match := _DECIMAL.match(text):
            plain = re.sub("[, ]", "", match[1])
            exponent = match[2] or match[3] or match[4] or "0"
            digits = len(plain.replace(".", "").lstrip("0"))
            return Decimal(f"{plain}e{exponent}"), digits, match.end()
    except (ValueError, ZeroDivisionError, InvalidOperation, OverflowError):
        return None
    return None


def _fraction(text: str) -> Fraction:
    return Fraction(Decimal(re.sub("[, ]", "", text)))


def _read_unit(text: str, spaced: bool) -> str | None:
    """The unit that `text`, found after a number, names, in one spelling; None when it is something else, such as a factor."""
    lower = re.sub(r"\^\{(\d)\}", r"^\1", text.lower().strip(" .()"))
    if lower in _CURRENCY_WORDS:
        return _CURRENCY_WORDS[lower]
    if re.fullmatch(r"\^\s*(\{\s*)?\\circ\s*\}?|\\degree|degrees?", lower):
        return "°"
    lower = re.sub(r"\^\s*\{?\s*\\circ\s*\}?\s*", "°", lower)
    if re.fullmatch(r"°[cfk]", lower):
        return lower
    if not re.fullmatch(r"[a-z°][a-z /.'°-]*(\^-?\d)?(\s*/\s*[a-z]+(\^\d)?)?", lower) or _NOT_UNITS.search(lower):
        return None
    lower = lower.replace(" per ", "/").replace(" squared", "^2").replace(" cubed", "^3").replace(" ^", "^")
    words = re.split(r"(\s*/\s*|\s+)", lower)
    if len(words) > 7:
        return None
    first = re.split(r"[\^/]", words[0])[0].rstrip("s") or words[0]
    known = first in _KNOWN or first + "s" in _KNOWN or words[0] in _KNOWN
    if not (known and (spaced or len(first) > 1)) and not (spaced and len(first) >= 3):
        return None
    names = [_unit_name(word) for word in words]
    name = re.sub(r"\s*/\s*", "/", "".join(names))
    name = re.sub(r"^(?:square|sq) (\S+)$", r"\1^2", re.sub(r"^cubic (\S+)$", r"\1^3", name))
    return {"mi/hr": "mph"}.get(name, re.sub(r"^(\S+) square$", r"\1^2", name))


def _unit_name(word: str) -> str:
    base, mark, power = word.partition("^")
    singular = (
        base.rstrip("s") if base.rstrip("s") in _KNOWN else base[:-1] if len(base) > 3 and base.endswith("s") else base
    )
    return _KNOWN.get(base, _KNOWN.get(singular, singular)) + mark + power
