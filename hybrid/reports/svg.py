"""What charts are drawn with: elements, fills, and the axis of bytes.

Text and rules take the page's colours (classes `ink`, `rule`, ... of style.css), so that a chart is readable in light, dark and print.
Element trees escape every name.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from hybrid.reports.bands import Band
from hybrid.telemetry.summary import UNITS

WIDTH, HEIGHT = 960, 372
ROW = 16
"""Names under the axis are on rows of this height; a chart grows with those it needs."""
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 22, 46
CHARACTER = 6.4
"""Width of a character of 12 px, about."""


def swatch(band: Band, prefix: str) -> str:
    """A small square of the band's fill, for a legend; with its own definition, since a page may show it first."""
    svg = ET.Element("svg", {"width": "22", "height": "14", "viewBox": "0 0 22 14", "aria-hidden": "true"})
    define_fills(svg, [band], prefix)
    add(svg, "rect", x=0.5, y=0.5, width=21, height=13, fill=f"url(#{prefix}-{band.fill_id})", cls="swatch")
    return text_of(svg)


def define_fills(svg: ET.Element, bands: Sequence[Band], prefix: str) -> None:
    """A pattern per band: its colour, with marks of its part on it."""
    defs = ET.SubElement(svg, "defs")
    for band in bands:
        size = {"id": f"{prefix}-{band.fill_id}", "width": "8", "height": "8", "patternUnits": "userSpaceOnUse"}
        pattern = ET.SubElement(defs, "pattern", size)
        add(pattern, "rect", width=8, height=8, fill=band.colour)
        if band.pattern == "dots":
            for cx, cy in ((2, 2), (6, 6)):
                add(pattern, "circle", cx=cx, cy=cy, r=1.3, fill="#000", **{"fill-opacity": "0.65"})
        paths = {"diagonal": "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6", "cross": "M0,4 H8 M4,0 V8", "lines": "M4,0 V8"}
        if band.pattern in paths:
            style = {"stroke": "#000", "stroke-opacity": "0.5", "stroke-width": "1"}
            add(pattern, "path", d=paths[band.pattern], **style)


def nice_top(highest: float) -> float:
    """The end of an axis that leaves room above `highest`, in bytes."""
    step = tick_step(highest * 1.04)
    return step * -(-highest * 1.04 // step)


def tick_step(top: float) -> float:
    """1, 2 or 5 times a power of ten of a binary unit, so that an axis has 3 to 7 ticks."""
    unit = 1024 ** unit_power(top)
    step = 10 ** (len(str(int(top / unit))) - 1) / 10
    factors = (1, 2, 5, 10, 20, 50)
    return unit * step * next((f for f in factors if top / (unit * step * f) <= 6), 100)


def unit_power(size: float) -> int:
    """Which of `UNITS` is the largest that `size` holds one of."""
    return max(0, min(len(UNITS) - 1, (int(size).bit_length() - 1) // 10))


def root(title: str, description: str, prefix: str, height: int = HEIGHT) -> ET.Element:
    names = f"{prefix}-title {prefix}-desc"
    box = {"viewBox": f"0 0 {WIDTH} {height}", "role": "img", "aria-labelledby": names, "class": "chart"}
    svg = ET.Element("svg", box)
    ET.SubElement(svg, "title", {"id": f"{prefix}-title"}).text = title
    ET.SubElement(svg, "desc", {"id": f"{prefix}-desc"}).text = description
    return svg


def y_axis(svg: ET.Element, top: float, y, right: float = WIDTH - RIGHT) -> None:
    step, power = tick_step(top), unit_power(top)
    for i in range(int(top / step) + 1):
        add(svg, "line", x1=LEFT, x2=right, y1=y(i * step), y2=y(i * step), cls="rule")
        text = "0" if i == 0 else f"{i * step / 1024**power:g} {UNITS[power]}"
        add(svg, "text", text, x=LEFT - 8, y=y(i * step) + 4, cls="ink soft", **{"text-anchor": "end"})


def add(parent: ET.Element, tag: str, text: str | None = None, cls: str | None = None, **attributes) -> ET.Element:
    values = {key: value if isinstance(value, str) else number(value) for key, value in attributes.items()}
    element = ET.SubElement(parent, tag, values | ({"class": cls} if cls else {}))
    element.text = text
    return element


def number(value: float) -> str:
    """A coordinate with one decimal at most."""
    return f"{value:.1f}".removesuffix(".0")


def text_of(svg: ET.Element) -> str:
    return ET.tostring(svg, encoding="unicode")
