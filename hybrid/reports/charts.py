"""The two charts of a report as inline SVG: bands of memory over columns of time, and lines over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from hybrid.reports.bands import Band
from hybrid.reports.svg import (
    BOTTOM,
    CHARACTER,
    HEIGHT,
    LEFT,
    RIGHT,
    ROW,
    TOP,
    WIDTH,
    add,
    define_fills,
    nice_top,
    number,
    root,
    text_of,
    y_axis,
)
from hybrid.telemetry.summary import human_bytes


@dataclass(frozen=True)
class Column:
    """From x `start` to `end`, `bytes` by band. `measured` and `predicted` are drawn as marks across it; `label` names it below."""

    start: float
    end: float
    bytes: dict[str, int]
    label: str = ""
    shaded: bool = False
    measured: int | None = None
    predicted: int | None = None


@dataclass(frozen=True)
class Ticks:
    """Under a chart: texts at x, what the axis shows, and upright rules."""

    at: tuple[tuple[float, str], ...] = ()
    title: str = ""
    rules: tuple[float, ...] = field(default=())


def band_chart(
    columns: Sequence[Column],
    bands: Sequence[Band],
    *,
    title: str,
    description: str,
    capacity: int | None,
    ticks: Ticks,
    prefix: str,
) -> str:
    """Stacked bands, a dashed line at `capacity`. `prefix` keeps ids apart in one page. Columns follow each other without gaps."""
    start, end = columns[0].start, columns[-1].end
    highest = max(max(sum(c.bytes.values()), c.measured or 0, c.predicted or 0) for c in columns) or 1
    inside = capacity is not None and capacity <= 3 * highest
    top = nice_top(max(highest, capacity) if inside else highest)

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (at - start) / ((end - start) or 1)

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * size / top

    names = _rows(ticks, columns, x)
    height = HEIGHT + ROW * max((row for row, _, _, _ in names), default=0)
    svg = root(title, description, prefix, height)
    used = [band for band in bands if any(c.bytes.get(band.key) for c in columns)]
    define_fills(svg, used, prefix)
    y_axis(svg, top, y)
    for column in columns:
        if column.shaded:
            width = x(column.end) - x(column.start)
            add(svg, "rect", x=x(column.start), y=TOP, width=width, height=HEIGHT - TOP - BOTTOM, cls="moving")
    for rule in ticks.rules:
        add(svg, "line", x1=x(rule), x2=x(rule), y1=TOP, y2=HEIGHT - BOTTOM + 5, cls="boundary")
    floor = [0] * len(columns)
    for band in used:
        sizes = [c.bytes.get(band.key, 0) for c in columns]
        _band(svg, band, columns, floor, sizes, x, y, prefix)
        floor = [low + size for low, size in zip(floor, sizes, strict=True)]
    floor = [0] * len(columns)
    for band in used:
        sizes = [c.bytes.get(band.key, 0) for c in columns]
        _label_inside(svg, band, columns, floor, sizes, x, y)
        floor = [low + size for low, size in zip(floor, sizes, strict=True)]
    for column in columns:
        for size, cls in ((column.measured, "measured"), (column.predicted, "predicted")):
            if size is not None:
                add(svg, "line", x1=x(column.start), x2=x(column.end), y1=y(size), y2=y(size), cls=cls)
    if capacity is not None:
        _capacity(svg, capacity, y(capacity) if inside else None)
    _under(svg, ticks.title, names, height)
    return text_of(svg)


def line_chart(
    series: Sequence[tuple[str, str, Sequence[tuple[int, int]]]], *, title: str, description: str, prefix: str
) -> str:
    """Lines of (label, colour, points of (step, bytes)), each named at its end."""
    points = [point for _, _, line in series for point in line]
    first, last = min(p[0] for p in points), max(p[0] for p in points)
    top, height, right = nice_top(max(p[1] for p in points) or 1), 260, 150

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - right) * (at - first) / ((last - first) or 1)

    def y(size: float) -> float:
        return height - 44 - (height - TOP - 44) * size / top

    svg = root(title, description, prefix, height)
    y_axis(svg, top, y, WIDTH - right)
    dashes = ("", "7 3", "2 3", "10 3 2 3", "4 2")
    labels_at = spread([y(line[-1][1]) + 4 for _, _, line in series], 15, height - 44)
    for place, (label, colour, line) in enumerate(series):
        path = " ".join(f"{number(x(step))},{number(y(size))}" for step, size in line)
        attributes = {"stroke-dasharray": dashes[place % len(dashes)]} if place else {}
        add(svg, "polyline", points=path, fill="none", stroke=colour, cls="line", **attributes)
        add(svg, "text", f"{label} {human_bytes(line[-1][1])}", x=x(last) + 6, y=labels_at[place], cls="ink")
    ends = ((first, "start" if first == 0 else f"step {first}"), (last, f"step {last}"))
    for at, text in dict(ends).items():
        anchor = "start" if at == first else "end"
        add(svg, "text", text, x=x(at), y=height - 26, cls="ink soft", **{"text-anchor": anchor})
    return text_of(svg)


def spread(wanted: Sequence[float], gap: float, lowest: float) -> list[float]:
    """Heights for labels that want to be at `wanted`: in the same order, at least `gap` apart, none past `lowest` (y grows downwards)."""
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed = [0.0] * len(wanted)
    above = float("-inf")
    for index in order:
        placed[index] = above = max(wanted[index], above + gap)
    below = lowest + gap
    for index in reversed(order):
        placed[index] = below = min(placed[index], below - gap)
    return placed


def _band(svg: ET.Element, band: Band, columns, floor, sizes, x, y, prefix: str) -> None:
    """One path: each run of columns in which the band has bytes, its top forward and its bottom back."""
    path, i = [], 0
    while i < len(columns):
        if not sizes[i]:
            i += 1
            continue
        last = i
        while last < len(columns) and sizes[last]:
            last += 1
        run = range(i, last)
        top = [
            f"{number(x(columns[k].start))},{number(y(floor[k] + sizes[k]))} H{number(x(columns[k].end))}" for k in run
        ]
        bottom = [
            f"{number(x(columns[k].end))},{number(y(floor[k]))} H{number(x(columns[k].start))}" for k in reversed(run)
        ]
        path.append("M" + " L".join(top + bottom) + "Z")
        i = last
    shape = add(svg, "path", d=" ".join(path), fill=f"url(#{prefix}-{band.fill_id})", cls="band")
    ET.SubElement(shape, "title").text = f"{band.label}: at most {human_bytes(max(sizes))}"


def _label_inside(svg: ET.Element, band: Band, columns, floor, sizes, x, y) -> None:
    """The band's name where it is widest, if that is wide and high enough."""
    best, room, i = None, 0.0, 0
    while i < len(columns):
        last = i
        while last < len(columns) and sizes[last] and (floor[last], sizes[last]) == (floor[i], sizes[i]):
            last += 1
        last = max(last, i + 1)
        width, height = x(columns[last - 1].end) - x(columns[i].start), y(0) - y(sizes[i])
        if height >= 16 and width > room:
            best, room = (i, last - 1), width
        i = last
    if best is None or room < len(band.label) * CHARACTER + 10:
        return
    i, last = best
    at = {"x": (x(columns[i].start) + x(columns[last].end)) / 2, "y": y(floor[i] + sizes[i] / 2) + 4}
    style = {"text-anchor": "middle", "stroke": band.colour, "paint-order": "stroke"}
    add(svg, "text", band.label, **at, **style, cls="inside")


def _capacity(svg: ET.Element, capacity: int, at: float | None) -> None:
    text = f"capacity {human_bytes(capacity)}"
    if at is None:
        text = f"↑ {text}, beyond this chart"
    else:
        add(svg, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, cls="capacity")
    add(svg, "text", text, x=WIDTH - RIGHT - 4, y=(at or TOP + 2) - 6, cls="ink strong over", **{"text-anchor": "end"})


def _rows(ticks: Ticks, columns: Sequence[Column], x) -> list[tuple[int, float, float, str]]:
    """(row, x it belongs to, x of its middle, text) of the names under the axis: on up to three rows, so that none overlaps. Names of
    columns come first; those without room on any row are left out.
    """
    rows, ends = [], {}
    for places in (
        [((x(c.start) + x(c.end)) / 2, c.label) for c in columns if c.label],
        [(x(at), t) for at, t in ticks.at],
    ):
        first = max((row for row, _, _, _ in rows), default=-1) + 1
        for at, text in places:
            half = len(text) * CHARACTER / 2
            middle = min(max(at, LEFT - 40 + half), WIDTH - half - 2)
            row = next((i for i in range(first, first + 3) if middle - half > ends.get(i, 0.0) + 6), None)
            if row is not None:
                ends[row] = middle + half
                rows.append((row, at, middle, text))
    return rows


def _under(svg: ET.Element, title: str, names: Sequence[tuple[int, float, float, str]], height: int) -> None:
    base = HEIGHT - BOTTOM
    for row, at, middle, text in names:
        low = base + 18 + ROW * row
        if row:
            add(svg, "line", x1=at, x2=at, y1=base + 2, y2=low - 11, cls="leader")
        add(svg, "text", text, x=middle, y=low, cls="ink", **{"text-anchor": "middle"})
    add(svg, "line", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base, cls="axis")
    middle = (LEFT + WIDTH - RIGHT) / 2
    add(svg, "text", title, x=middle, y=height - 6, cls="ink soft", **{"text-anchor": "middle"})
