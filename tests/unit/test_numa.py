"""Processes stay on the cores beside their GPU, as far as that takes no core from a GPU; on a made-up machine."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hybrid import numa
from hybrid.config import load_run, resolve


@dataclass
class Machine:
    """Nodes with their cores and the nodes of GPUs, as /sys and NVML show them."""

    root: Path
    monkeypatch: pytest.MonkeyPatch
    bound: dict[int, set[int]] = field(default_factory=dict)

    def make(
        self, nodes: dict[int, str], gpus: list[int], allowed: set[int], quota: int | None = None, names=str.encode
    ):
        for node, cores in nodes.items():
            self.write(f"sys/devices/system/node/node{node}/cpulist", cores + "\n")
        for number, node in enumerate(gpus):
            self.write(f"sys/bus/pci/devices/0000:{0x3B + number:02x}:00.0/numa_node", f"{node}\n")
        self.write("proc/self/task/11/comm", "python")
        self.write("proc/self/task/12/comm", "grpc")
        if quota:
            self.write("sys/fs/cgroup/cpu.max", f"{quota * 100_000} 100000\n")
        nvml = ModuleType("pynvml")
        nvml.nvmlInit = lambda: None
        nvml.nvmlDeviceGetCount = lambda: len(gpus)
        nvml.nvmlDeviceGetHandleByIndex = lambda number: number
        nvml.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid[-1])
        nvml.nvmlDeviceGetPciInfo = lambda number: SimpleNamespace(busId=names(f"00000000:{0x3B + number:02X}:00.0"))
        self.monkeypatch.setitem(sys.modules, "pynvml", nvml)
        self.monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
        self.monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: self.bound.update({thread: set(cores)}))

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def bind(self, gpu: str) -> str:
        return numa.bind_to_gpu(gpu, self.root)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


TWO = {0: "0-7,16-23", 1: "8-15,24-31"}


@pytest.mark.parametrize(("gpu", "cores"), [("0", TWO[0]), ("2", TWO[1]), ("GPU-aa-3", TWO[1])])
@pytest.mark.parametrize("names", [str.encode, str], ids=["bytes", "text"])
def test_all_threads_go_to_the_node_of_the_gpu(machine, gpu, cores, names):
    machine.make(TWO, [0, 0, 1, 1], set(range(32)), names=names)
    said = machine.bind(gpu)
    wanted = numa.cores_of(TWO_NODE[cores], machine.root)
    assert machine.bound == {11: wanted, 12: wanted} and len(wanted) == 16
    assert said.startswith("bound to 16 cores of NUMA node")


TWO_NODE = {cores: node for node, cores in TWO.items()}


@pytest.mark.parametrize(
    ("gpus", "allowed", "quota", "bound"),
    [
        ([0, 0, 1, 1], set(range(32)), None, 16),
        ([0, 0, 0, 0], set(range(32)), None, 0),  # the other socket has no GPU, and would be idle
        ([0, 0, 0, 0], set(range(32)), 16, 16),  # a quota of 16 cores is used up on one node
        ([0, 0, 0, 0], set(range(32)), 17, 0),
        ([0, 1, 1, 1], set(range(32)), None, 16),
        ([0, 0, 1, 1], {0, 1, 2, 3}, None, 4),  # a container on one socket, beside its GPU
        ([1, 1, 0, 0], {0, 1, 2, 3}, None, 0),  # and far from it
        ([0, 0, 1, 1], {0, 1, 2, 8}, None, 3),
        ([0, 0, 1, 1], {0, 8, 9, 10}, None, 0),
        ([0], {5}, None, 1),
    ],
)
def test_no_gpu_gets_fewer_cores_than_its_part(machine, gpus, allowed, quota, bound):
    """The process is that of GPU 0."""
    machine.make(TWO, gpus, allowed, quota)
    said = machine.bind("0")
    assert all(cores <= allowed and len(cores) == bound for cores in machine.bound.values())
    assert bool(machine.bound) == bool(bound)
    assert ("not bound to cores" in said) == (not bound)


def test_what_the_machine_does_not_say_binds_nothing(machine, monkeypatch):
    machine.make(TWO, [-1, 0], set(range(32)))
    assert "does not say which NUMA node GPU 0" in machine.bind("0") and not machine.bound
    (machine.root / "sys/bus/pci/devices/0000:3c:00.0/numa_node").unlink()
    assert "does not say which NUMA node GPU 1" in machine.bind("1") and not machine.bound
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "NVML does not tell where GPU 0 is (ModuleNotFoundError)" in machine.bind("0") and not machine.bound


@pytest.mark.parametrize(("text", "cores"), [("0-2,5", {0, 1, 2, 5}), ("7\n", {7}), ("", set()), ("what", set())])
def test_lists_of_cores(machine, text, cores):
    machine.write("sys/devices/system/node/node0/cpulist", text)
    assert numa.cores_of(0, machine.root) == cores
    assert numa.cores_of(1, machine.root) == set()


@pytest.mark.parametrize(
    ("device", "given", "bound"), [("cuda", "auto", True), ("cuda", "false", False), ("cpu", "auto", False)]
)
def test_auto_is_on_where_there_are_gpus(profile, device, given, bound):
    cfg = resolve(load_run(profile, [f"cluster.device={device}", "model.dtype=bfloat16", f"cluster.bind_numa={given}"]))
    assert cfg.cluster.bind_numa is bound
