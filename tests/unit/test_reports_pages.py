"""What a person opens: complete without a network, safe with any name, the same for the same run."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from hybrid.config import RunConfig
from hybrid.reporting import Reporter
from hybrid.reports.charts import spread
from hybrid.reports.read import read_run
from hybrid.reports.write import render
from tests.unit.report_runs import RunWriter, add_plan, profile


class Page(HTMLParser):
    """Tags that are open at the end, every address that a browser would load, and the text."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, text: str):
        super().__init__()
        self.open, self.addresses, self.text, self.tags = [], [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [v for k, v in attributes if k in ("src", "href", "xlink:href", "action", "data", "srcset")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def run(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path / "a<b>&'name", monkeypatch)
    writer.start()
    for step in (1, 2, 3):
        writer.step(step, kv_cache_share=0.4)
    profile(writer.folder)
    return writer


@pytest.mark.parametrize("wanted", [[], [5.0], [130.0, 131.0, 129.0, 130.0], [216.0] * 5, [10.0, 200.0, 12.0]])
def test_labels_at_one_height_are_spread(wanted):
    placed = spread(wanted, 15, 216)
    heights = sorted(placed)
    assert all(b - a >= 15 for a, b in pairwise(heights)) and all(h <= 216 for h in heights)


def test_the_page_is_whole_and_loads_nothing(run):
    add_plan(run.folder)
    html, _, _ = render(read_run(run.folder))
    page = Page(html)
    assert page.open == [] and page.addresses == []
    assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    references = set(re.findall(r"url\(#([^)]*)\)", html))
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert references and references <= set(ids)
    assert "prefers-color-scheme: dark" in html and "@media print" in html


def test_charts_say_in_words_what_they_show(run):
    add_plan(run.folder)
    html, _, _ = render(read_run(run.folder))
    charts = [ET.fromstring(text) for text in re.findall(r"<svg [^>]*role=.*?</svg>", html, re.DOTALL)]
    assert len(charts) == 4  # a step, the run, the plan, residue
    for chart in charts:
        named = {e.get("id"): e.text for e in chart if e.tag in ("title", "desc")}
        assert all(named[name] for name in chart.get("aria-labelledby").split())
    words = " ".join(t.text or "" for t in charts[0].iter("text"))
    for shown in ("generate 4.0 s", "train_actor 6.0 s", "capacity 6.00 GiB", "actor/optimizer"):
        assert shown in words


def test_names_are_text_and_not_markup(run):
    ledger = run.folder / "memory.jsonl"
    ledger.write_text(ledger.read_text().replace('"optimizer"', '"<script>alert(1)</script>"'))
    run.ledger.failed("sync", RuntimeError("<img src=x> *bold* [link](http://example.org) | pipe"))
    html, markdown, _ = render(read_run(run.folder))
    page = Page(html)
    assert "script" not in page.tags and "img" not in page.tags and page.open == []
    assert "actor/<script>alert(1)</script>" in page.text and "a<b>&'name" in page.text
    assert not re.search(r"(?<!\\)<", markdown) and "\\[link\\]" in markdown


def test_markdown_says_what_the_page_says(run):
    html, markdown, doc = render(read_run(run.folder))
    page = Page(html)
    assert doc.advice and len(doc.tables) == 6
    for advice in doc.advice:
        assert advice.override in page.text and f"`{advice.override}`" in markdown
    for table in doc.tables:
        assert table.title in page.text and f"## {table.title}\n" in markdown
        for row in table.rows:
            assert any(all(cell in line for cell in row) for line in markdown.splitlines())
    assert "no plan recorded" in page.text.lower() and "no plan recorded" in markdown.lower()


def test_the_same_run_gives_the_same_bytes(run, tmp_path):
    first = render(read_run(run.folder))[:2]
    assert first == render(read_run(run.folder))[:2]
    assert str(tmp_path) not in first[0] + first[1]


def test_a_plan_alone_makes_a_report(tmp_path):
    add_plan(tmp_path)
    html, markdown, _ = render(read_run(tmp_path))
    assert "Fullest by plan: train_actor, 3.27 GiB of 6.00 GiB (55%)" in Page(html).text
    assert "actor/optimizer" in markdown and "0.50" in markdown


def test_a_run_that_died_at_its_start_makes_a_report(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path / "early", monkeypatch)
    writer.ledger.failed("init", RuntimeError("no memory"))
    html, _, _ = render(read_run(writer.folder))
    assert "no memory" in Page(html).text and "nothing was measured" in html


def test_the_command_writes_both_files_beside_the_run_or_where_told(run, tmp_path, hybrid_command):
    result = hybrid_command("report", run.folder)
    assert result.exit_code == 0, result.output
    assert (run.folder / "report.html").is_file() and (run.folder / "report.md").is_file()
    assert "Fullest: train_actor" in result.output and len(result.output.splitlines()) < 40
    result = hybrid_command("report", run.folder, "--out", tmp_path / "new" / "x.html")
    assert result.exit_code == 0 and sorted(p.name for p in (tmp_path / "new").iterdir()) == ["x.html", "x.md"]
    assert hybrid_command("report", tmp_path / "none").exit_code == 2


def test_a_run_leaves_its_report_when_it_ends_and_when_it_breaks(run, capsys):
    reporter = Reporter(RunConfig.model_validate(RUN), run.folder)
    with pytest.raises(RuntimeError), reporter:
        raise RuntimeError("broke")
    assert (run.folder / "report.html").is_file() and "memory report:" in capsys.readouterr().out
    (run.folder / "report.html").unlink()
    with Reporter(RunConfig.model_validate(RUN), run.folder) as reporter:
        reporter.finish(None)
    shown = capsys.readouterr().out
    assert (run.folder / "report.html").is_file() and "report.html" in shown and "Fullest: train_actor" in shown


def test_a_report_that_cannot_be_made_is_a_warning(run, capsys):
    (run.folder / "report.html").mkdir()
    with Reporter(RunConfig.model_validate(RUN), run.folder) as reporter:
        reporter.finish(None)
    shown = capsys.readouterr().out
    assert "warning: the memory report was not made" in shown and "run folder" in shown


RUN = {
    "cluster": {"device": "cpu", "gpus_per_node": 2},
    "model": {"path": "some-org/some-model"},
    "reward": {"function": "reasoning_gym"},
    "train": {"steps": 3},
    "data": {"train": "reasoning_gym:chain_sum"},
    "logging": {"progress": "lines"},
}


def test_the_command_says_why_a_report_cannot_be_written(run, tmp_path, hybrid_command):
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    for out, code, said in (
        (tmp_path / "file" / "x.html", 1, "cannot be written"),
        (tmp_path / "folder.html", 1, "cannot be written"),
        (tmp_path, 2, "not the name of an HTML file"),
        (tmp_path / "x.md", 2, "twin"),
    ):
        result = hybrid_command("report", run.folder, "--out", out)
        assert result.exit_code == code and said in result.output and "Traceback" not in result.output
