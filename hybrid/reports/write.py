"""From a run's folder to its report's files."""

from __future__ import annotations

from pathlib import Path

from hybrid.errors import ConfigError, HybridError
from hybrid.files import write_atomic
from hybrid.reports.document import Document, document
from hybrid.reports.figures import figures
from hybrid.reports.html import to_html
from hybrid.reports.markdown import to_markdown
from hybrid.reports.read import Run, read_run
from hybrid.reports.summary import summarize


def write_report(run_dir: Path, out: Path | None = None) -> tuple[Path, Path, Document]:
    """Write the HTML report of the run in `run_dir` to `out` (default: report.html in that folder) and its Markdown twin beside it.

    Returns both paths and what the report says. Raises `DataError` when the folder holds no ledger, `HybridError` when a file cannot be
    written, `ConfigError` when `out` names no HTML file.
    """
    page = out or run_dir / "report.html"
    if page.suffix not in (".html", ".htm"):
        raise ConfigError(
            f"--out {page} is not the name of an HTML file (.html). Its Markdown twin goes beside it, as .md."
        )
    twin = page.with_suffix(".md")
    html, markdown, doc = render(read_run(run_dir))
    try:
        write_atomic(page, html)
        write_atomic(twin, markdown)
    except OSError as error:
        reason = error.strerror or error
        raise HybridError(
            f"The report cannot be written to {page} ({reason}). Name a file of yours with --out."
        ) from error
    return page, twin, doc


def render(run: Run) -> tuple[str, str, Document]:
    """(HTML, Markdown, what they say). The same run gives the same bytes."""
    summary = summarize(run)
    doc = document(summary)
    return to_html(doc, figures(summary)), to_markdown(doc), doc
