"""What profiles/reports/ shows is what the code of today makes of the kept inputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def make_reports():
    spec = importlib.util.spec_from_file_location("make_reports", CHECKOUT / "launch" / "make_reports.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reports_are_current(make_reports, capsys):
    assert make_reports.main(["--check"]) == 0, capsys.readouterr().out + "run: python launch/make_reports.py"


def test_a_report_that_is_not_current_is_named(make_reports, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(make_reports, "CHECKOUT", tmp_path)
    monkeypatch.setattr(make_reports, "REPORTS", tmp_path / "reports")
    monkeypatch.setattr(make_reports, "plans", lambda: [])
    assert make_reports.main(["--check"]) == 1
    assert "not current: reports/quickstart.html" in capsys.readouterr().out
    assert make_reports.main([]) == 0 and make_reports.main(["--check"]) == 0


def test_what_is_kept_has_no_path_and_no_address(make_reports):
    for file in make_reports.QUICKSTART.iterdir():
        assert file.name in ("memory.jsonl", "profile.yaml") and file.stat().st_size < 200_000
        assert "/work" not in file.read_text() and '"node"' not in file.read_text()
