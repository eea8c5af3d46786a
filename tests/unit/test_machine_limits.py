"""C42: the memory and the cores that a run plans with are those that the groups around it allow."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid.config import cgroups, machine

GIB = 2**30
V2 = "cgroup2 cgroup2 rw,nsdelegate"
ROOT = Path(__file__).resolve().parents[2]


def tree(root: Path, *, own: str, mounts: list[str], files: dict[str, str | bytes]) -> Path:
    """A fake /proc and /sys: lines of /proc/self/cgroup, `top place - type source options` of mounts, files by path."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    lines = [f"{30 + i} 23 0:{i} {m.replace(' - ', ' rw,relatime shared:9 - ')}\n" for i, m in enumerate(mounts)]
    (root / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/vda rw\n" + "".join(lines))
    for name, content in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def v2(root: Path, own: str, top: str = "/", **files: str) -> Path:
    named = {name.replace("__", "/").replace("_max", ".max").replace("_high", ".high"): v for name, v in files.items()}
    return tree(root, own=f"0::{own}\n", mounts=[f"{top} /sys/fs/cgroup - {V2}"], files=named)


def test_c42_the_smallest_limit_of_all_nested_groups_holds(tmp_path):
    root = v2(
        tmp_path, "/a/b/c", a__memory_max=f"{3 * GIB}\n", a__b__memory_max="max\n", a__b__c__memory_max=f"{9 * GIB}\n",
        a__cpu_max="150000 100000\n", a__b__cpu_max="max 100000\n", a__b__c__cpu_max="400000 100000\n",
    )  # fmt: skip
    assert cgroups.memory_limit(root) == 3 * GIB
    assert cgroups.cpu_limit(root) == 1.5
    assert machine.ram_bytes(root) == min(3 * GIB, machine.ram_bytes())
    assert machine.cpu_cores(root) == 1


def test_c42_high_counts_where_it_is_below_max(tmp_path):
    root = v2(tmp_path, "/a/b", a__memory_high=f"{2 * GIB}", a__b__memory_max=f"{3 * GIB}", a__b__memory_high="max")
    assert cgroups.memory_limit(root) == 2 * GIB


@pytest.mark.parametrize(
    ("own", "top"),
    [("/", "/"), ("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/../../other", "/"), ("/x", "/elsewhere")],
    ids=["own namespace", "its group at the top", "whole hierarchy named, one seen", "outside", "unrelated"],
)
def test_c42_a_container_sees_its_group_at_the_top(tmp_path, own, top):
    root = v2(tmp_path, own, top, memory_max=f"{3 * GIB}", cpu_max="200000 100000")
    assert (cgroups.memory_limit(root), cgroups.cpu_limit(root)) == (3 * GIB, 2.0)


def test_c42_version_1_has_a_hierarchy_of_each_controller(tmp_path):
    root = tree(
        tmp_path,
        own="12:memory:/job/step\n4:cpu,cpuacct:/job\n3:pids:/job\n1:name=systemd:/x\n0::/y\n",
        mounts=[
            "/ /sys/fs/cgroup/memory - cgroup cgroup rw,memory",
            "/ /sys/fs/cgroup/cpu,cpuacct - cgroup cgroup rw,cpu,cpuacct",
            "/ /sys/fs/cgroup/pids - cgroup cgroup rw,pids",
            f"/ /sys/fs/cgroup/unified - {V2}",
        ],
        files={
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
            "memory/job/step/memory.limit_in_bytes": "9223372036854771712\n",
            "cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
            "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "pids/job/pids.max": "512\n",
        },
    )
    assert cgroups.memory_limit(root) == 3 * GIB
    assert cgroups.cpu_limit(root) == 3.0
    assert cgroups.process_limit(root) == 512


def test_c42_version_1_knows_limits_above_what_a_container_sees(tmp_path):
    root = tree(
        tmp_path,
        own="12:memory:/docker/abc\n",
        mounts=["/docker/abc /sys/fs/cgroup/memory - cgroup cgroup rw,memory"],
        files={
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.stat": f"cache 1\nhierarchical_memory_limit {3 * GIB}\nhierarchical_memsw_limit 1\n",
        },
    )
    assert cgroups.memory_limit(root) == 3 * GIB


@pytest.mark.parametrize("content", ["", "max", "max max", "-1", "0", "a b", "1e9", "²", "100000", b"\xff\xfe", "0 0"])
def test_c42_bad_contents_set_no_limit(tmp_path, content):
    root = tree(
        tmp_path,
        own="\n::\nx\n0::/a\n",
        mounts=[f"/ /sys/fs/cgroup - {V2}"],
        files={"a/memory.max": content, "a/cpu.max": content},
    )
    assert (cgroups.memory_limit(root), cgroups.cpu_limit(root)) == (None, None)
    assert machine.ram_bytes(root) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.cpu_cores(root) == len(os.sched_getaffinity(0))


def test_c42_the_usual_places_serve_where_mounts_are_not_told(tmp_path):
    root = tree(tmp_path, own="4:memory:/a\n", mounts=[], files={"memory/a/memory.limit_in_bytes": str(GIB)})
    (root / "proc/self/mountinfo").unlink()
    assert cgroups.memory_limit(root) == GIB
    (root / "proc/self/cgroup").unlink()
    assert cgroups.memory_limit(root) is None
    assert cgroups.memory_limit(tmp_path / "nothing") is None


def test_c42_affinity_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 256)
    assert machine.cpu_cores(tmp_path) == 8


def test_c42_a_real_group(tmp_path):
    """Where this machine lets a group be made: a process in a group of a group with a limit."""
    own = next((m for m in cgroups._read_mounts(cgroups.ROOT) if "memory" in m.controllers), None)
    made: list[Path] = []
    try:
        if own is None:
            pytest.skip("no memory controller of version 1 here")
        outer = Path(own.place) / f"hybrid-test-{os.getpid()}"
        for folder in (outer, outer / "inner"):
            folder.mkdir()
            made.append(folder)
        (outer / "memory.limit_in_bytes").write_text(str(3 * GIB))
    except OSError as error:
        for folder in reversed(made):
            folder.rmdir()
        pytest.skip(f"no group can be made here: {error}")
    try:
        code = "from hybrid.config import machine; print(machine.ram_bytes())"
        enter = f"echo $$ > {outer}/inner/cgroup.procs && exec {sys.executable} -c '{code}'"
        done = subprocess.run(["sh", "-c", enter], capture_output=True, text=True, cwd=ROOT, timeout=50)
        assert done.stdout.strip() == str(min(3 * GIB, machine.ram_bytes())), done.stderr
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()
