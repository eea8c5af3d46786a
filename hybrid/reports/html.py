"""A report as one HTML file that needs nothing else: style, charts and tables are inside."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from hybrid.reports.bands import Band
from hybrid.reports.document import Document
from hybrid.reports.figures import Figure
from hybrid.reports.svg import swatch


@dataclass(frozen=True)
class _Drawn:
    """A figure whose SVG is known to be escaped."""

    title: str
    caption: str
    bands: tuple[Band, ...]
    drawn: Markup


def to_html(doc: Document, figures: tuple[Figure, ...]) -> str:
    """The page. Every name is escaped: by the template in text, by the element tree in charts."""
    here = files("hybrid.reports")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(here.joinpath("page.html.j2").read_text(encoding="utf-8"))
    all_bands = {band.key: band for figure in figures for band in figure.bands}
    return page.render(
        doc=doc,
        style=Markup(here.joinpath("style.css").read_text(encoding="utf-8")),
        figures=[_Drawn(f.title, f.caption, f.bands[::-1], Markup(f.svg)) for f in figures],
        swatches={key: Markup(swatch(band, "legend")) for key, band in all_bands.items()},
    )
