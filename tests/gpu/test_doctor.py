"""The doctor's checks on the GPUs of this machine; `hybrid doctor --gpu` runs the same for a user."""

from __future__ import annotations

import pytest

from hybrid.doctor.check import Check, all_checks
from hybrid.doctor.command import visible_gpus
from hybrid.doctor.processes import run_check

CHECKS = all_checks()


@pytest.fixture(scope="module")
def gpus() -> list[str]:
    return visible_gpus()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_it_passes(check: Check, gpus, tmp_path):
    """What it proves and what its failure means are in `check`."""
    done = run_check(check, "cuda", gpus, tmp_path)
    if done.status == "skip":
        pytest.skip(done.said)
    assert done.status == "pass", f"{done.said}\n{done.means}\n{done.figures}\n{done.log}"
