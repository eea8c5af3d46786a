"""Expressions: read and compared by math-verify, with what its rounding to six decimals would get wrong done exactly."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache

from math_verify import LatexExtractionConfig, parse, verify
from sympy import (
    Basic,
    Eq,
    Float,
    I,
    Integer,
    MatrixBase,
    Ne,
    Rational,
    Set,
    binomial,
    exp,
    factorial,
    nan,
    oo,
    simplify,
    zoo,
)
from sympy.core.relational import Relational

from hybrid.answers.quantity import Quantity, read_quantity, stands_for

LARGEST_LOG10 = 20_000
"""Numbers with more digits are not worked out."""
DIGITS = 40

_CONFIG = [LatexExtractionConfig()]
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])(?<!_\{)(?<!_)i(?![a-zA-Z])")
_HUGE = re.compile(r"\d{5}\d*\s*[})]?\s*!|\\binom\s*\{\s*\d{5}")
"""Written out while it is parsed, which nothing interrupts."""


class TooLarge(Exception):
    """A number with too many digits to work out."""


@lru_cache(maxsize=4096)
def read_expression(text: str) -> Basic | MatrixBase | None:
    """The expressions that math-verify reads in `text`, as `tidy` gives it; None when it cannot."""
    text = re.sub(r"\bsqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text).replace("**", "^")
    text = re.sub(
        r"(?<![a-zA-Z\\])(pi|infinity|infty|sin|cos|tan|log|ln)(?![a-zA-Z])", r"\\\1", text, flags=re.IGNORECASE
    )
    text = re.sub(r"\\infinity", r"\\infty", text, flags=re.IGNORECASE)
    text = re.sub(r"([_^])\s*([A-Za-z0-9])", r"\1{\2}", text)
    # 2/3\pi and 1/2x, as people mean them.
    text = re.sub(r"(?<![\w}^.])(\d+)/(\d+)(?=\s*(?:\\pi|[a-zA-Z]))", r"\\frac{\1}{\2}", text)
    if _HUGE.search(text):
        return None
    if _IMAGINARY.search(text) and not re.search(r"_\{?[^{}]*i|\\sum|\\prod", text):
        text = _IMAGINARY.sub(r" \\imath ", text)
    read = parse(f"\\boxed{{{text}}}", _CONFIG, fallback_mode="no_fallback", parsing_timeout=None)
    if not read or not isinstance(read[0], Basic | MatrixBase):
        return None
    return read[0].subs({x: I for x in read[0].free_symbols if x.name == "imath"})


def same_expression(label: str, answer: str) -> bool:
    """Whether both are the same value or, with variables in them, the same function of these."""
    a, b = read_expression(label), read_expression(answer)
    if a is None or b is None:
        return False
    if _constant(a) and _constant(b):
        try:
            return _same_constant(a, b, read_quantity(label), read_quantity(answer))
        except TooLarge:
            return a == b
    if any(isinstance(x, Relational | Set | MatrixBase) or not x.is_commutative for x in (a, b)):
        if isinstance(a, Relational) and isinstance(b, Relational) and _same_relation(a, b):
            return True
        return bool(verify(a, b, timeout_seconds=None))
    try:
        for part in (a, b):
            _refuse_large(part)
        same = _same_at_points(a, b)
    except (TooLarge, ValueError, TypeError):
        return a == b
    return bool(verify(a, b, timeout_seconds=None)) if same is None else same


def _same_at_points(a: Basic, b: Basic) -> bool | None:
    """Whether two functions have the same values where they are tried; None where they have none. Much faster than to simplify."""
    if a == b:
        return True
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    verdict = None
    for sign in (1, -1):
        # No two are alike, none is special, and all are exact.
        point = {x: sign * Rational(10 * i + 13, 7 * i + 11) for i, x in enumerate(symbols)}
        x, y = (complex_parts(part.subs(point).evalf(DIGITS)) for part in (a, b))
        if x is None or y is None:
            continue
        bound = max(abs(part) for part in x + y) * (1e-12 if a.has(Float) or b.has(Float) else 1e-25)
        if not all(abs(p - q) <= bound for p, q in zip(x, y)):
            return False
        verdict = True
    return verdict


def _constant(read: Basic | MatrixBase) -> bool:
    return isinstance(read, Basic) and not isinstance(read, Relational | Set) and not read.free_symbols


def _same_constant(a: Basic, b: Basic, exact_a: Quantity | None, exact_b: Quantity | None) -> bool:
    for read in (a, b):
        _refuse_large(read)
    a, b = a.doit(), b.doit()
    if nan in (a, b) or zoo in (a, b):
        return False
    if a in (oo, -oo) or b in (oo, -oo) or (isinstance(a, Rational) and isinstance(b, Rational)):
        return a == b
    for decimal, exact in ((exact_a, b), (exact_b, a)):
        if decimal is not None and decimal.digits is not None:
            number = exact.evalf(DIGITS)
            if not number.is_real or exact.has(Float):
                break
            return stands_for(decimal, Fraction(str(number))) and not isinstance(exact, Integer)
    x, y = (complex_parts(value.evalf(DIGITS)) for value in (a, b))
    if x is None or y is None:
        return False
    size = max(*(abs(part) for part in x + y))
    bound = size * (1e-12 if a.has(Float) or b.has(Float) else 1e-30)
    return all(abs(p - q) <= bound for p, q in zip(x, y))


def _same_relation(a: Relational, b: Relational) -> bool:
    """Whether one is the other times a constant: 2x > 6 and x > 3, 3x + y = 6 and 6x = 12 - 2y."""
    left, right = a.lhs - a.rhs, b.lhs - b.rhs
    factor = simplify(left / right) if right != 0 else nan
    if factor.free_symbols or factor in (nan, zoo, 0) or not factor.is_real:
        return False
    if isinstance(a, Eq | Ne) or isinstance(b, Eq | Ne):
        return type(a) is type(b)
    return type(a) is (type(b) if factor.is_positive else type(b.reversed))


def complex_parts(number: Basic) -> tuple | None:
    """(real, imaginary) of a number; None for what has no value."""
    real, imaginary = number.as_real_imag()
    return (
        (real, imaginary) if real.is_number and imaginary.is_number and real.is_finite and imaginary.is_finite else None
    )


def _refuse_large(read: Basic | MatrixBase) -> None:
    """Raise `TooLarge` when working `read` out would make a number with too many digits, such as 9^{9^{9}}."""
    for part in getattr(read, "args", ()):
        if isinstance(part, Basic):
            _refuse_large(part)
    if (getattr(read, "is_Pow", False) or isinstance(read, exp)) and not read.free_symbols:
        base, exponent = (_log10(x) for x in read.as_base_exp())
        power = 10**exponent if exponent < 30 else math.inf
        if abs(base) * power > LARGEST_LOG10 and base != 0:
            raise TooLarge
    if isinstance(read, factorial | binomial) and _log10(read.args[0]) > 3.5:
        raise TooLarge


def _log10(read: Basic) -> float:
    """About the logarithm of the size of a constant; infinite where it is too large to say."""
    if read.is_Pow or isinstance(read, exp):
        base, power = read.as_base_exp()
        exponent = _log10(power)
        return _log10(base) * (10**exponent if exponent < 30 else math.inf)
    if read.is_Rational:
        size = abs(read.p).bit_length() - abs(read.q).bit_length()
        return (
            math.log10(abs(float(read)))
            if read != 0 and abs(size) < 1000
            else size * math.log10(2)
            if read != 0
            else -math.inf
        )
    value = abs(complex(read.evalf(15)))
    return math.log10(value) if value else -math.inf
