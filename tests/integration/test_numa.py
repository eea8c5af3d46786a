"""Which processes of a pool look for the cores beside their GPU. Here is none, so each says why it is not bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid.pool import open_pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


class Asked:
    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)


@pytest.mark.parametrize("wanted", [True, False])
def test_processes_with_one_gpu_are_bound_where_it_is_wanted(tmp_path, wanted):
    pool = open_pool(
        num_nodes=1, gpus_per_node=2, processes_per_bundle=2, device="cpu", log_dir=tmp_path / "logs", dashboard=False,
        bind_numa=wanted,
    )  # fmt: skip
    try:
        bundle = pool.bundles[0]
        one = pool.spawn(Asked, role="actor", rank=0, bundle=bundle)
        several = pool.spawn(Asked, role="rollout", rank=0, bundle=bundle, gpus=2)
        cores = pool.wait([one.submit("cores"), several.submit("cores")], "cores", 60)
        said = [Path(worker.log_file).read_text() for worker in (one, several)]
    finally:
        pool.stop()
    assert [("not bound to cores: NVML does not tell where GPU" in text) for text in said] == [wanted, False]
    assert cores == [os.sched_getaffinity(0)] * 2
