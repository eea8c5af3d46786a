"""torch's allocator as each role's process is told to run it."""

import os
import subprocess
import sys

import pytest
import torch

from hybrid.environment import Place, process_environment

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

FRAGMENTS = """
import torch
large = [torch.empty(32 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(32)]
kept = large[::2]
del large
torch.cuda.empty_cache()
again = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")  # as much as was freed, in one piece
print(torch.cuda.memory_reserved())
"""
EXPORTS = """
import torch
from torch.multiprocessing.reductions import reduce_tensor
reduce_tensor(torch.ones(2**20, device="cuda"))
print({segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""


def run(code: str, role: str) -> str:
    given = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{role in ('actor', 'rollout')}"}  # the wrong way round
    env = os.environ | given
    env |= process_environment(Place("cuda", role, "0", False), env, "127.0.0.1")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_memory_that_was_freed_in_pieces_serves_a_whole():
    """Proves that expandable segments are on in the critic; a failure means that its fragments stay."""
    assert int(run(FRAGMENTS, "critic")) <= 1.1 * 2**30


def test_the_actor_exports_memory_that_cuda_itself_allocated():
    """Proves that its segments are not expandable; a failure means that weight sync ends in containers."""
    assert run(EXPORTS, "actor") == "{False}"
