"""C54: the command where the locale or the output is ASCII."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.tiny_models import make_tiny_llama
from tests.unit.test_text import ASCII_LOCALE, ODD, start


@pytest.fixture(scope="module")
def odd_profile(tmp_path_factory) -> Path:
    """A sound profile with characters outside ASCII in a text, in its own name and in the names of what it points to."""
    folder = tmp_path_factory.mktemp("größe")
    make_tiny_llama(folder / "modèle")
    (folder / "größe.jsonl").write_text('{"prompt": "½", "label": "1"}\n', encoding="utf-8")
    profile = folder / "名.yaml"
    profile.write_text(
        f"model: {{path: {folder}/modèle}}\nreward: {{function: math_verify}}\ntrain: {{steps: 1, prompts_per_step: 8}}\n"
        f"cluster: {{device: cpu}}\ndata: {{train: größe.jsonl, system_prompt: {ODD}}}\n",
        encoding="utf-8",
    )
    return profile


ASCII_OUTPUT = {"PYTHONIOENCODING": "ascii"}


@pytest.mark.parametrize(
    "env", [ASCII_LOCALE, ASCII_OUTPUT, ASCII_LOCALE | ASCII_OUTPUT], ids=["locale", "output", "both"]
)
def test_c54_the_command_in_an_ascii_locale(odd_profile, env):
    done = start("-m", "hybrid.cli", "train", "--dry-run", str(odd_profile), f"data.prompt_suffix={ODD}", **env)
    shown = done.stdout.decode("ascii")
    assert done.returncode == 0, done.stderr.decode()
    assert shown.count(r"\xbd \u2192 \u65e5\u672c") == 2 and r"gr\xf6\xdfe.jsonl" in shown
    wrong = start("-m", "hybrid.cli", "train", str(odd_profile), f"model.pfad={ODD}", **env)
    assert wrong.returncode == 2 and "pfad" in wrong.stderr.decode("ascii")


def test_c54_a_utf8_terminal_shows_everything(odd_profile):
    done = start("-m", "hybrid.cli", "train", "--dry-run", str(odd_profile), PYTHONIOENCODING="utf-8")
    assert f"system_prompt: {ODD}" in done.stdout.decode("utf-8"), done.stderr.decode()
