"""Measured bytes: of this process, of children, and peaks between two looks."""

import ctypes
import os
import subprocess
import sys
import time

import pytest
import torch

from hybrid.memory import probe
from hybrid.memory.probe import PeakSampler, measured_bytes, process_bytes

MIB = 2**20
ALLOCATE = "import sys; b = b'x' * (80 << 20); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", ALLOCATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.communicate()


def test_process_bytes_follow_an_allocation():
    before = process_bytes()
    block = torch.ones(50 * MIB // 4)
    after = process_bytes()
    for field in ("rss", "pss", "private"):
        assert getattr(after, field) - getattr(before, field) == pytest.approx(block.nbytes, rel=0.1)
    assert after.peak_rss >= after.rss - MIB
    assert abs(measured_bytes("cpu") - after.pss) < 2 * MIB


FREES = """
import torch
from hybrid.memory.probe import keep_free_memory, process_bytes, release_free_memory

def given_back():
    blocks = [torch.ones(8 << 18) for _ in range(24)]
    full = process_bytes().rss
    del blocks
    freed = process_bytes().rss
    release_free_memory("cpu")
    return [(full - size) >> 20 for size in (freed, process_bytes().rss)]

print(*given_back())
keep_free_memory()
print(*given_back())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's")
def test_freed_memory_is_kept_until_it_is_given_back():
    """24 blocks of 8 MiB."""
    printed = subprocess.run([sys.executable, "-c", FREES], capture_output=True, text=True, check=True).stdout
    at_first, kept = ([int(size) for size in line.split()] for line in printed.splitlines())
    assert min(at_first) > 180
    on_freeing, when_asked = kept
    assert on_freeing < 10 and when_asked > 180


def test_another_process_is_measured_from_outside_and_children_are_added(child):
    alone, other = process_bytes(), process_bytes(child.pid)
    assert 80 * MIB < other.pss < 110 * MIB
    together = process_bytes(children=True)
    assert together.pss - alone.pss == pytest.approx(other.pss, rel=0.1)


def test_a_process_that_is_gone_is_an_error(child):
    child.communicate()
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        process_bytes(child.pid)


@pytest.mark.parametrize("exact", [True, False])
def test_peaks_are_per_span(exact, monkeypatch):
    if not exact:
        monkeypatch.setattr(probe, "_reset_high_water", lambda pid: False)
    elif not probe._reset_high_water(os.getpid()):
        pytest.skip("/proc/self/clear_refs is not writable here")
    with PeakSampler("cpu") as sampler:
        base = process_bytes().rss
        block = torch.ones(100 * MIB // 4)
        torch.ones(10 * MIB).sum()  # Gives the sampling thread time to look.
        time.sleep(0.1)
        del block
        first = sampler.take()
        second = sampler.take()
    assert sampler.exact is exact
    assert first - base > 95 * MIB
    assert second - base < 60 * MIB


def test_peaks_count_children(child):
    alone, family = PeakSampler("cpu"), PeakSampler("cpu", children=True)
    assert family.take() - alone.take() > 75 * MIB


def test_device_bytes_of_this_machine():
    used, total = probe.device_bytes("cpu")
    assert 0 < used < total
