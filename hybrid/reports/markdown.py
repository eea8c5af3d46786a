"""A report as Markdown: what the HTML says, without the charts."""

from __future__ import annotations

import re

from hybrid.reports.document import Document
from hybrid.reports.tables import Table


def to_markdown(doc: Document) -> str:
    """The whole report."""
    parts = [f"# Memory report: {_text(doc.name)}", _text(doc.facts)]
    if doc.failure:
        parts.append(f"> {_text(doc.failure)}")
    parts += [f"**{_text(doc.verdict)}**", "## Advice", advice_list(doc) or "None: the numbers suggest no change."]
    for table in doc.tables:
        parts += [f"## {table.title}", _text(table.intro)]
        if table.rows:
            parts.append(table_text(table))
    parts += ["## How to read this", "\n".join(f"- {_text(note)}" for note in doc.notes)]
    return "\n\n".join(parts) + "\n"


def short_form(doc: Document) -> str:
    """What a console shows at the end of a run: the verdict, a line per phase, and the advice."""
    table = next((table for table in doc.tables[:2] if table.rows), None)
    parts = [doc.failure or "", f"Memory. {doc.verdict}", table_text(table) if table else "", advice_list(doc)]
    return "\n\n".join(part for part in parts if part)


def advice_list(doc: Document) -> str:
    """Numbered advice, each with the override to type."""
    lines = []
    for number, advice in enumerate(doc.advice, start=1):
        override = f" Type `{advice.override}`" if advice.override else ""
        lines.append(f"{number}. {_text(advice.text)}{override}")
    return "\n".join(lines)


def table_text(table: Table) -> str:
    """A table whose columns line up in plain text too."""
    rows = [[column.name for column in table.columns], *([_cell(cell) for cell in row] for row in table.rows)]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(table.columns))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.ljust(width) if head.words else cell.rjust(width)
            for cell, width, head in zip(row, widths, table.columns, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |")
        if number == 0:
            rules = ["-" * w if h.words else "-" * (w - 1) + ":" for w, h in zip(widths, table.columns, strict=True)]
            lines.append(f"| {' | '.join(rules)} |")
    return "\n".join(lines)


def _text(text: str) -> str:
    """Words in which Markdown and the HTML inside it mean nothing."""
    return re.sub(r"[\\`*<>\[\]]|\b_|_\b", r"\\\g<0>", " ".join(text.split()))


def _cell(text: str) -> str:
    return _text(text).replace("|", "\\|")
