"""The table of architectures: each of `TRAINED` from its plan to its export, in one process of vLLM. Prints it."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from hybrid.doctor.full.engine_process import EngineProcess
from tests.integration.architecture_row import architecture_row, engine_options, table
from tests.tiny_architectures import TRAINED

LEAST_ROWS = 20


@pytest.mark.timeout(3600)
def test_every_architecture_is_exact_from_plan_to_export(tmp_path, capsys):
    import torch

    names = os.environ.get("HYBRID_ARCHITECTURES", " ".join(TRAINED)).split()
    rows, failed = [], {}
    with ExitStack() as stack:
        process = stack.push(EngineProcess(engine_options(tmp_path, torch.float32)))
        for name in names:
            try:
                rows.append(architecture_row(process, name, tmp_path))
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            with capsys.disabled():
                print(f"\n{name}: {failed.get(name) or ' '.join(rows[-1].cells()[1:])}", flush=True)
    with capsys.disabled():
        print(f"\n{table(rows)}")
    assert not failed
    assert [row.name for row in rows if not row.is_exact()] == []
    assert len(rows) >= min(LEAST_ROWS, len(names))
