"""A process finds the cores beside a real GPU."""

import multiprocessing
import os

import pytest
import torch

from hybrid.numa import bind_to_gpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _bind(queue):
    said = bind_to_gpu("0")
    queue.put((said, os.sched_getaffinity(0)))


def test_it_is_bound_or_the_reason_is_named():
    """A failure means that cluster.bind_numa does nothing here, or takes cores that the process may not use."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_bind, args=(queue,))
    process.start()
    said, cores = queue.get(timeout=60)
    process.join(30)
    assert cores and cores <= os.sched_getaffinity(0)
    assert said.startswith(f"bound to {len(cores)} cores") or "machine does not say" in said or "has" in said, said
