"""The table of architectures: each of `TRAINED` from its plan to its export, in one process of vLLM. Prints it."""

from __future__ import annotations

import os

import pytest

from tests.integration.architecture_row import _options, architecture_row, table
from tests.integration.engine_process import EngineProcess
from tests.tiny_architectures import TRAINED

LEAST_ROWS = 20


@pytest.mark.timeout(3600)
def test_every_architecture_is_exact_from_plan_to_export(tmp_path, capsys):
    import torch

    names = os.environ.get("HYBRID_ARCHITECTURES", " ".join(TRAINED)).split()
    rows, failed = [], {}
    process = EngineProcess(_options(tmp_path, torch.float32))
    try:
        for name in names:
            try:
                rows.append(architecture_row(process, name, tmp_path))
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            with capsys.disabled():
                print(f"\n{name}: {failed.get(name) or ' '.join(rows[-1].cells()[1:])}", flush=True)
    finally:
        process._process.kill()
    with capsys.disabled():
        print(f"\n{table(rows)}")
    assert not failed
    assert [row.name for row in rows if not row.is_exact()] == []
    assert len(rows) >= min(LEAST_ROWS, len(names))
