"""Fixtures of several test files."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybrid.cli import app
from tests.unit.config_profile import PROFILE


@pytest.fixture
def profile(tmp_path, monkeypatch) -> Path:
    """A sound profile in `profiles/`, its model beside that folder, and the working directory elsewhere."""
    for name in ("tiny", "reward"):
        (tmp_path / "models" / name).mkdir(parents=True)
        config = {
            "model_type": "llama",
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_size": 128,
            "num_hidden_layers": 2,
        }
        (tmp_path / "models" / name / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    (tmp_path / "profiles").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = tmp_path / "profiles" / "p.yaml"
    path.write_text(PROFILE)
    return path


@pytest.fixture
def hybrid_command():
    """Call the command in this process; signal handlers are put back."""
    handlers = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGHUP)}
    yield lambda *args: CliRunner().invoke(app, [str(arg) for arg in args])
    for name, handler in handlers.items():
        signal.signal(name, handler)
