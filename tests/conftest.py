"""What holds for every test: a mark and a deadline by folder, skipped GPU tests without CUDA, light unit tests, models by name."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hybrid.leftovers import keep_caches

ROOT = Path(__file__).resolve().parent.parent
SECONDS = {"unit": 60, "integration": 600, "gpu": 900, "e2e": 3600, "benchmarks": 3600}
"""Deadline of one test by folder, where the test sets none."""
NOT_IN_UNIT_TESTS = ("ray", "vllm")
"""Imports of seconds each: a unit test that needs one is an integration test."""


keep_caches()  # before any test file imports torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suites = {_suite(item) for item in items}
    no_cuda = None
    if "gpu" in suites and not _cuda():
        no_cuda = pytest.mark.skip(reason="needs CUDA")
    for item in items:
        suite = _suite(item)
        if suite not in SECONDS:
            continue
        item.add_marker(suite)
        if item.get_closest_marker("timeout") is None and config.getoption("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS[suite]))
        if suite == "gpu" and no_cuda:
            item.add_marker(no_cuda)
    config.stash[_ONLY_UNIT] = suites == {"unit"}


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    heavy = _heavy_imports(session.config)
    if (told := getattr(session.config, "workeroutput", None)) is not None:  # this process runs tests for another
        told["heavy imports"] = heavy
    elif exitstatus == pytest.ExitCode.OK and heavy:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error: object) -> None:
    """A process that ran tests for this one has ended."""
    heavy = getattr(node, "workeroutput", {}).get("heavy imports", [])
    node.config.stash.setdefault(_HEAVY_IN_WORKERS, set()).update(heavy)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    if heavy := _heavy_imports(config):
        terminalreporter.write_line(
            f"error: unit tests imported {' and '.join(heavy)}; move the test that needs it to tests/integration, or import "
            "it inside the function that uses it (`python -X importtime` shows who does)",
            red=True,
        )


_ONLY_UNIT = pytest.StashKey[bool]()
_HEAVY_IN_WORKERS = pytest.StashKey[set[str]]()


def _heavy_imports(config: pytest.Config) -> list[str]:
    if in_workers := config.stash.get(_HEAVY_IN_WORKERS, None):
        return sorted(in_workers)
    if not config.stash.get(_ONLY_UNIT, False):
        return []
    return [name for name in NOT_IN_UNIT_TESTS if name in sys.modules]


def _suite(item: pytest.Item) -> str:
    """The folder under tests/ that a test lies in."""
    parts = item.path.relative_to(ROOT / "tests").parts if item.path.is_relative_to(ROOT / "tests") else ()
    return parts[0] if len(parts) > 1 else ""


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def models_folder() -> Path:
    """Where launch/make_models.py puts models: HYBRID_MODELS, else models/ in the checkout."""
    return Path(os.environ.get("HYBRID_MODELS", ROOT / "models"))


@pytest.fixture(scope="session")
def smollm2(models_folder: Path) -> Path:
    """The SmolLM2-135M-Instruct folder. A missing one is an error, not a skip: a suite that skips the real model proves nothing."""
    folder = models_folder / "SmolLM2-135M-Instruct"
    if not (folder / "model.safetensors").is_file():
        pytest.fail(f"{folder} is missing: python launch/make_models.py")
    return folder
