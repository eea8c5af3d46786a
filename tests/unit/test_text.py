"""C54: files are UTF-8 whatever the locale, and output is escaped where it cannot be shown. Also: working directories that are gone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.files import write_atomic
from hybrid.telemetry.jsonl import JsonLines, read_lines

ROOT = Path(__file__).resolve().parents[2]
ODD = "½ → 日本"
ASCII_LOCALE = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
TEXT_CALLS = (
    "open",
    "read_text",
    "write_text",
    "fdopen",
    "NamedTemporaryFile",
    "TemporaryFile",
    "run",
    "Popen",
    "check_output",
)


def start(*command: str, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIOENCODING", "PYTHONUTF8"))}
    env = {**clean, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run([sys.executable, *command], capture_output=True, env=env, timeout=120)


NOT_TEXT = ("os.open", "tarfile.open")


def calls_without_encoding(file: Path) -> list[str]:
    """Calls in `file` that read or write text in the locale's encoding."""
    found = []
    for node in ast.walk(ast.parse(file.read_bytes())):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        if (
            name not in TEXT_CALLS
            or "encoding" in given
            or (isinstance(node.func, ast.Attribute) and ast.unparse(node.func) in NOT_TEXT)
        ):
            continue
        modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)] + [
            given.get("mode") or ""
        ]
        as_text = {
            "open": not any(set(mode) <= set("rwaxb+") and "b" in mode for mode in modes),
            "fdopen": not any("b" in mode for mode in modes),
            "read_text": True,
            "write_text": True,
        }.get(
            name,
            bool(
                given.get("text") or given.get("universal_newlines") or any(mode in ("w", "r", "w+") for mode in modes)
            ),
        )
        if as_text:
            found.append(f"{file.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)[:80]}")
    return found


def test_c54_every_text_file_is_opened_with_an_encoding(tmp_path, monkeypatch):
    files = [*ROOT.glob("hybrid/**/*.py"), *ROOT.glob("launch/*.py")]
    assert [call for file in files for call in calls_without_encoding(file)] == []
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    bad = 'open("x")\np.read_text()\np.write_text("b")\nos.fdopen(1, "w")\np.open()\nsubprocess.run(["x"], text=True)\n'
    good = 'open("x", "rb")\np.open("wb")\nos.open("x", 0)\ntarfile.open("x", "w:gz")\nsubprocess.run(["x"])\nopen("x", encoding="utf-8")\n'
    (tmp_path / "x.py").write_text(bad + good)
    assert len(calls_without_encoding(tmp_path / "x.py")) == 6, "the test finds what it looks for"


LOAD = "import sys; from hybrid.config import load_run; print(ascii(load_run(sys.argv[1]).data.system_prompt))"


def test_c54_a_profile_is_read_in_an_ascii_locale(profile):
    text = profile.read_text(encoding="utf-8")
    profile.write_text(
        text.replace("max_prompt_tokens: 64", f"max_prompt_tokens: 64, system_prompt: {ODD}"), encoding="utf-8"
    )
    done = start("-c", LOAD, str(profile), **ASCII_LOCALE)
    assert done.stdout.decode().strip() == ascii(ODD), done.stderr.decode()


def test_c54_logs_of_processes_are_utf8(tmp_path):
    code = (
        "import subprocess, sys; from hybrid.process import _redirect_output; _redirect_output(sys.argv[1]);"
        f"print({ODD!a}, chr(0xd800), flush=True);"
        """subprocess.run([sys.executable, '-c', 'print(chr(0xbd), chr(0xd800))'])"""
    )
    log = tmp_path / "x.log"
    done = start("-c", code, str(log), PYTHONIOENCODING="ascii", **ASCII_LOCALE)
    assert done.returncode == 0, done.stderr.decode()
    assert log.read_text(encoding="utf-8").splitlines()[1:] == [f"{ODD} \\ud800", "½ \\ud800"]


def test_c36_lone_surrogates_are_escaped_in_files(tmp_path):
    lines = JsonLines(tmp_path / "a.jsonl")
    lines.append('{"a": "é\ud800"}')
    lines.close()
    assert list(read_lines(tmp_path / "a.jsonl")) == [(1, {"a": "é\ud800"})]
    write_atomic(tmp_path / "b.txt", "é\ud800")
    assert (tmp_path / "b.txt").read_text(encoding="utf-8") == "é\\ud800"


@pytest.fixture
def gone(tmp_path):
    """A working directory that was deleted."""
    before, folder = os.getcwd(), tmp_path / "gone"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    yield
    os.chdir(before)


@pytest.mark.parametrize("command", ["train", "plan", "report"])
def test_a_deleted_working_directory_gets_a_sentence(command, profile, hybrid_command, gone):
    done = hybrid_command(command, profile)
    assert done.exit_code == 2 and "the working directory does not exist any more" in done.stderr


@pytest.mark.parametrize("command", ["train", "plan", "report"])
def test_a_closed_working_directory_gets_a_sentence(command, profile, hybrid_command, monkeypatch):
    closed = os.getcwd()
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)  # root may read everything
    done = hybrid_command(command, profile)
    assert done.exit_code == 2 and f"the working directory {closed} may not be read" in done.stderr
