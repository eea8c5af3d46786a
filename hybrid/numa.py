"""Keeping a process on the cores beside its GPU: its copies to the GPU and its launches of kernels then cross no link between sockets.

Memory follows: Linux takes a page from the node of the core that touches it first.
Source: https://docs.kernel.org/admin-guide/mm/numaperf.html; numa_node in Documentation/ABI/testing/sysfs-bus-pci; cpulist in
Documentation/ABI/stable/sysfs-devices-node.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybrid.config import cgroups, machine


def bind_to_gpu(gpu_id: str, root: Path = cgroups.ROOT) -> str:
    """Bind all threads of this process, and those to come, to the cores of the NUMA node of GPU `gpu_id`, an index in PCI order or a UUID.
    Returns a line about what was done, or why nothing was. To be called before a library starts threads that are as many as cores.

    Nothing is done where a GPU would get fewer cores than its even part of those that affinity and control groups allow. `root`: where
    /proc and /sys are.
    """
    try:
        own, all_gpus = _bus_addresses(gpu_id)
    except Exception as error:  # no driver, no library, or a MIG parent: three error classes, one meaning
        return f"not bound to cores: NVML does not tell where GPU {gpu_id} is ({type(error).__name__})"
    nodes = [node_of(address, root) for address in all_gpus]
    node = node_of(own, root)
    if node is None:
        return f"not bound to cores: the machine does not say which NUMA node GPU {gpu_id} ({own}) is on"
    allowed, usable = os.sched_getaffinity(0), machine.cpu_cores(root)
    local = cores_of(node, root) & allowed
    here = nodes.count(node)
    if len(local) * len(nodes) < usable * here:
        return (
            f"not bound to cores: NUMA node {node} has {len(local)} of the {usable} cores that this process may use, and {here} of "
            f"{len(nodes)} GPUs"
        )
    for thread in _threads(root):
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(thread, local)
    return f"bound to {len(local)} cores of NUMA node {node}, where GPU {gpu_id} is"


def node_of(address: str, root: Path = cgroups.ROOT) -> int | None:
    """NUMA node of the PCI device at `address` (`0000:3b:00.0`, or NVML's form with eight digits of domain); None where it is not known."""
    domain, _, rest = address.lower().partition(":")
    try:
        node = int((root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware says nothing


def cores_of(node: int, root: Path = cgroups.ROOT) -> set[int]:
    """Cores of a NUMA node, from a list such as `0-15,32-47`; empty where it is not known."""
    with suppress(OSError, ValueError):
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text(encoding="utf-8").strip()
        ranges = [[int(end) for end in each.split("-")] for each in text.split(",") if each]
        return {core for ends in ranges for core in range(ends[0], ends[-1] + 1)}
    return set()


def _bus_addresses(gpu_id: str) -> tuple[str, Sequence[str]]:
    """PCI addresses of GPU `gpu_id` and of all GPUs that this machine shows. Raises what NVML raises."""
    import pynvml

    pynvml.nvmlInit()
    is_index = gpu_id.isdecimal()
    handle = pynvml.nvmlDeviceGetHandleByIndex(int(gpu_id)) if is_index else pynvml.nvmlDeviceGetHandleByUUID(gpu_id)
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    address_of = lambda each: _text(pynvml.nvmlDeviceGetPciInfo(each).busId)  # noqa: E731
    return address_of(handle), [address_of(each) for each in handles]


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _threads(root: Path) -> list[int]:
    """Of this process; the calling one at least."""
    try:
        return [int(each.name) for each in (root / "proc/self/task").iterdir()]
    except OSError:
        return [0]
