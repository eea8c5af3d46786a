"""The README holds: tests run its commands, and its options, keys, links and code exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from hybrid.cli import app
from hybrid.config import SECTIONS, RunConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"`([^`\n]+)`", README) + re.findall(r"(?m)^(bash .*?)(?: +#.*)?$", README)
COMMANDS = sorted({text for text in SHOWN if re.match(r"(hybrid|bash|python|source) ", text)})

LAUNCH = "tests/integration/test_launch_whole.py"
RUN_BY = {
    "bash launch/install.sh": f"{LAUNCH}::test_install_makes_the_environment_once",
    "bash launch/quickstart.sh": f"{LAUNCH}::test_quickstart_trains_with_overrides",
    "bash launch/ray_node.sh": "tests/integration/test_ray_node.py::test_a_worker_joins_a_head_and_both_end_on_ctrl_c",
    "bash launch/test.sh": f"{LAUNCH}::test_unit_tests_run_on_all_cores_and_others_one_after_another",
    "python launch/make_bundle.py": "tests/unit/test_make_bundle.py::test_it_holds_both_packages_and_what_pip_brings",
    "hybrid doctor": "tests/unit/test_doctor.py::test_each_check_says_what_it_proves_and_what_its_failure_means",
    "hybrid plan": "tests/integration/test_plan_command.py::test_tables_and_the_verdict",
    "hybrid report": "tests/unit/test_reports_pages.py::test_the_command_writes_both_files_beside_the_run_or_where_told",
    "hybrid train": "tests/integration/test_death.py::test_a_terminated_run_ends_in_order",
    "hybrid train PROFILE --dry-run": "tests/integration/test_text_commands.py::test_c54_a_utf8_terminal_shows_everything",
    "hybrid train --help": "tests/unit/test_cli.py::test_help_shows_sections_and_examples",
    "python -m hybrid.doctor": "tests/integration/test_doctor.py::test_core_passes_without_ray_vllm_and_transformers",
    "python launch/make_models.py": "tests/integration/test_readme_programs.py::test_the_tiny_models_are_made",
    "python launch/make_reports.py": "tests/integration/test_reports_current.py::test_the_reports_are_current",
    "python tests/benchmarks/": "tests/integration/test_readme_programs.py::test_benchmarks_start",
    "source .venv/bin/activate": f"{LAUNCH}::test_quickstart_trains_with_overrides",  # as venv makes it
}
"""The test that runs each command, by how the command begins; the longest beginning counts."""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_test_runs_it(command):
    beginnings = [each for each in RUN_BY if command.startswith(each)]
    assert beginnings, "name the test that runs it in RUN_BY"
    file, _, name = RUN_BY[max(beginnings, key=len)].partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.startswith("hybrid ")])
def test_its_options_exist(command):
    known = typer.main.get_command(app).commands[command.split()[1]]
    options = {option for parameter in known.params for option in parameter.opts} | {"--help"}
    assert set(re.findall(r"--[\w-]+", command)) <= options


def test_its_keys_exist():
    keys = {key for text in SHOWN for key in re.findall(rf"\b(?:{'|'.join(SECTIONS)})\.[a-z_]+\b(?!\.?\w*[/(])", text)}
    keys -= {key for key in keys if key.endswith((".py", ".json", ".jsonl", ".md"))}
    assert len(keys) > 10
    for key in keys:
        section, _, field = key.partition(".")
        assert field in RunConfig.model_fields[section].annotation.model_fields, key


def test_what_it_links_exists():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_reward_that_it_shows_scores():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    made: dict = {}
    exec(code, made)
    assert made["score"](["1 + 1", "2 + 1"], ["it is 2", "it is 4"], ["2", "3"], level=[1, 1]) == [1.0, 0.0]
