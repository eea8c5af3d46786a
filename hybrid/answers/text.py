"""One notation for what people and models write: unicode, LaTeX spacing, markdown and quotes."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

CURRENCIES = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR"}

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_SYMBOLS = {
    **dict.fromkeys("−–—‒﹣－", "-"),
    **dict.fromkeys("⋅·∙", r"\cdot "),
    **dict.fromkeys("“”„«»", '"'),
    **dict.fromkeys("‘’", "'"),
    **dict.fromkeys("≤⩽", r"\le "),
    **dict.fromkeys("≥⩾", r"\ge "),
    "×": r"\times ", "÷": "/", "⁄": "/", "∕": "/", "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ",
    "β": r"\beta ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "∶": ":", "≈": r"\approx ", "￥": "¥", "、": ",", "。": ".",
}  # fmt: skip
_TO_LATEX = str.maketrans(_SYMBOLS)
_SPACES = re.compile(r"\\[;:> ]|\\q?quad\b|~|\\hspace\{[^{}]*\}|\s+")
_NOTHING = re.compile(
    r"\\(?:text)?color\s*\{[a-zA-Z]+\}|\\displaystyle\b|\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?|\\!"
)
_FONTS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|boldsymbol|bm|operatorname\*?|emph|underline)\s*\{([^{}]*)\}"
)
_PAIRS = (
    ("$$", "$$"),
    ("$", "$"),
    (r"\(", r"\)"),
    (r"\[", r"\]"),
    ("**", "**"),
    ("__", "__"),
    ("*", "*"),
    ("'", "'"),
    ('"', '"'),
    ("`", "`"),
)


def clean(text: str) -> str:
    """`text` in ASCII and LaTeX where unicode has signs for mathematics; without control characters. Words keep their letters."""
    if text.isascii() and text.isprintable():
        return text
    text = "".join(_drop_control(char) for char in text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"[₀-₉₊₋]+", lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}", text)
    text = re.sub(r"(\^?)(\d?)([¼-¾⅐-⅞↉])", _vulgar, text)
    text = unicodedata.normalize(
        "NFKC", re.sub("[°˚º]", "\ue000", text).replace("℃", "\ue000C").replace("℉", "\ue000F")
    )
    text = re.sub(r"(√|∛)\s*(\d+(?:\.\d+)?|[a-zA-Zπ]|\([^()]*\)|\{[^{}]*\})", _root, text.replace("\ue000", "°"))
    return text.translate(_TO_LATEX)


@lru_cache(maxsize=4096)
def tidy(answer: str) -> str:
    """An answer without what does not change it: spacing, fonts, math delimiters around it, markdown, quotes, a full stop."""
    text = clean(answer)
    text = re.sub(r"(?<=\d)\\[,;!: ](?=\d{3}(?!\d))|(?<=\d)\{,\}(?=\d{3}(?!\d))|(?<=\d),\\!(?=\d{3}(?!\d))", ",", text)
    text = _NOTHING.sub("", text).replace(r"\,", " ")
    while (plain := _FONTS.sub(r" \1 ", text)) != text:
        text = plain
    text = _SPACES.sub(" ", text)
    text = re.sub(r"\\varnothing\b|\\\{ ?\\\}", r"\\emptyset", text)
    text = text.replace(r"\pounds", "£").replace(r"\euro", "€").replace(r"\%", "%").replace("{,}", ",")
    text = (
        re.sub(r"\\[dtc]frac", r"\\frac", text).replace("{ }", "").replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    )
    text = re.sub(r"\\frac(?![a-zA-Z])\s*(\\pi(?![a-zA-Z])|[0-9a-zA-Z])", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\\pi(?![a-zA-Z])|[0-9a-zA-Z])", r"\1{\2}", text)
    text = re.sub(r"\\sqrt\s*(\d|[a-zA-Z])(?![a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\(?:le|leqslant|leq)(?![a-zA-Z])", r"\\le", text)
    text = re.sub(r"\\(?:ge|geqslant|geq)(?![a-zA-Z])", r"\\ge", text)
    text = re.sub(r"\\(?:neq|not\s*=)(?![a-zA-Z])", r"\\ne", text)
    text = re.sub(r"\\lt(?![a-zA-Z])", "<", re.sub(r"\\gt(?![a-zA-Z])", ">", text))
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ").replace("!=", r"\ne ")
    return _bare(text)


def _bare(text: str) -> str:
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(".,;:").strip() if not text.endswith("...") else text.strip()
        for opening, closing in _PAIRS:
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner.strip() and opening not in inner:
                if not (opening == r"\[" and inner.endswith("\\")):
                    text = inner
                break
        if text.startswith("{") and text.endswith("}") and closes_at_end(text) and not split_top(text[1:-1])[1:]:
            text = text[1:-1]
        text = re.sub(r"^=\s*|(?<!\\)\\$", "", text)
    return re.sub(r" +", " ", text.replace(r"\$", "$"))


def closes_at_end(text: str) -> bool:
    """Whether the bracket that opens `text` is closed by its last character."""
    depth = 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def split_top(text: str, separators: str = ",;") -> list[str]:
    """`text` cut at separators outside of brackets and LaTeX environments."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"\\begin\b|\\end\b|[(\[{]|[)\]}]|[" + re.escape(separators) + "]", text):
        token = match[0]
        if token in (r"\begin", "(", "[", "{"):
            depth += 1
        elif token in (r"\end", ")", "]", "}"):
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


def _drop_control(char: str) -> str:
    kind = unicodedata.category(char)
    if char in "\n\t":
        return char
    return " " if kind == "Zs" else "" if kind in ("Cc", "Cf", "Cs") else char


def _vulgar(match: re.Match) -> str:
    top, bottom = unicodedata.normalize("NFKC", match[3]).split("⁄")
    fraction = f"{match[2]}{' ' if match[2] else ''}\\frac{{{top}}}{{{bottom}}}"
    return f"^{{{fraction}}}" if match[1] else fraction


def _root(match: re.Match) -> str:
    inner = match[2][1:-1] if match[2][0] in "({" else match[2]
    return (r"\sqrt" if match[1] == "√" else r"\sqrt[3]") + f"{{{inner}}}"
