"""Whoever does not answer is shown at work, or it is said why not."""

import os
import subprocess
import sys

import pytest

from hybrid import stacks


@pytest.fixture
def sleeper(tmp_path):
    """A process that hangs in a function of a telling name, and its log."""
    code = "import time\ndef waits_for_godot():\n    print('up', flush=True)\n    time.sleep(60)\nwaits_for_godot()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    log = tmp_path / "actor-1.log"
    log.write_text(f"pid {process.pid}\nloading\n")
    yield log
    process.kill()
    process.wait()


def test_the_stack_names_the_function_that_hangs(sleeper, tmp_path):
    (tmp_path / "gone.log").write_text("pid 4194304\n")
    (tmp_path / "empty.log").touch()
    hanging, gone, unknown = stacks.stacks_here([sleeper, tmp_path / "gone.log", tmp_path / "empty.log"])
    if "may not attach" in hanging:
        assert "SYS_PTRACE" in hanging
    else:
        assert "waits_for_godot" in hanging
    assert "py-spy may not attach to pid 4194304" in gone and "gone.log" in gone
    assert unknown == f"no pid in its output: {tmp_path / 'empty.log'}"


def fake_tool(tmp_path, monkeypatch, script):
    tool = tmp_path / "py-spy"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_forbidden_look_says_how_to_allow_it(tmp_path, monkeypatch):
    fake_tool(
        tmp_path,
        monkeypatch,
        "echo 'Error: Permission Denied: Try running again with elevated permissions' >&2; exit 1",
    )
    (tmp_path / "a.log").write_text("pid 7\n")
    [text] = stacks.stacks_here([tmp_path / "a.log"])
    assert (
        text.startswith("py-spy may not attach to pid 7: Error: Permission Denied") and "--cap-add SYS_PTRACE" in text
    )


def test_looking_is_bounded(tmp_path, monkeypatch):
    fake_tool(tmp_path, monkeypatch, "exec sleep 30")
    monkeypatch.setattr(stacks, "DUMP_TIMEOUT_S", 0.5)
    assert all("did not end within" in text for text in stacks.stacks_here(six_logs(tmp_path)))


def test_all_processes_are_looked_at_at_once(tmp_path, monkeypatch):
    # Each look waits until all six have begun: one after the other, the first would wait for ever.
    marks = tmp_path / "marks"
    marks.mkdir()
    wait_for_all = f"touch {marks}/$$; while [ $(ls {marks} | wc -l) -lt 6 ]; do sleep 0.05; done; echo all six"
    fake_tool(tmp_path, monkeypatch, wait_for_all)
    monkeypatch.setattr(stacks, "DUMP_TIMEOUT_S", 30)
    assert all("all six" in text for text in stacks.stacks_here(six_logs(tmp_path)))


def six_logs(folder):
    logs = [folder / f"{i}.log" for i in range(6)]
    for log in logs:
        log.write_text("pid 7\n")
    return logs
