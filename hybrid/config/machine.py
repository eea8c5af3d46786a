"""What this machine offers. Imports torch only to count GPUs, and never starts CUDA."""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from hybrid.config import cgroups
from hybrid.files import nearest_there
from hybrid.gpus import SLICE, has_driver, visible_devices


@cache
def visible_gpus() -> int:
    """CUDA devices that this process sees; no CUDA context is made. Without a driver torch (seconds to import) is not asked."""
    if not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_bytes() -> int | None:
    """Memory of the first GPU in bytes, without what the driver keeps to itself; None where NVML does not answer. The GPUs of a pool are
    taken to be alike."""
    memory = _of_first_gpu("nvmlDeviceGetMemoryInfo", version="nvmlMemory_v2") or _of_first_gpu(
        "nvmlDeviceGetMemoryInfo"
    )
    return None if memory is None else int(memory.total - getattr(memory, "reserved", 0))


def gpu_used_bytes() -> int:
    """Bytes of the first GPU that this process sees in use now, whoever uses them; 0 where NVML does not answer. Opens no context."""
    memory = _of_first_gpu("nvmlDeviceGetMemoryInfo")
    return 0 if memory is None else int(memory.used)


def gpu_name() -> str | None:
    """Name of the first GPU, such as "NVIDIA H100 80GB HBM3"; None where NVML does not answer."""
    return _of_first_gpu("nvmlDeviceGetName")


def gpu_has_bf16() -> bool:
    """Whether the first GPU computes in bf16 (compute capability 8.0 or more); True where NVML does not answer."""
    capability = _of_first_gpu("nvmlDeviceGetCudaComputeCapability")
    return capability is None or capability[0] >= 8


def gpu_slice() -> str | None:
    """Why the first GPU is only a part of one, None when it is whole or NVML does not answer."""
    names = visible_devices() or ()
    if slices := [name for name in names if name.startswith(SLICE)]:
        return f"CUDA_VISIBLE_DEVICES={','.join(slices)} names parts of a GPU"
    mode = _of_first_gpu("nvmlDeviceGetMigMode")  # (now, after the next reset)
    return "the driver has cut the first GPU into parts" if mode and mode[0] else None


def _of_first_gpu(question: str, **names: str) -> Any:
    """What NVML's function `question` says of the first visible GPU, None where NVML does not answer. `names`: arguments that are constants
    of pynvml."""
    try:
        import pynvml

        pynvml.nvmlInit()
        first = (visible_devices() or ["0"])[0]
        by_name = pynvml.nvmlDeviceGetHandleByIndex if first.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID
        constants = {key: getattr(pynvml, name) for key, name in names.items()}
        return getattr(pynvml, question)(by_name(int(first) if first.isdecimal() else first), **constants)
    except Exception:  # no driver, no library, a MIG parent, an old version: one meaning
        return None


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 natively; without, bf16 is slower than fp32."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


@cache
def has_flash_attention() -> bool:
    """Whether flash-attn can be imported. Its kernels are built for one torch: next to another they are found and do not load."""
    try:
        importlib.import_module("flash_attn")
    except Exception:  # ImportError where it is missing or its library does not link, others from its own start
        return False
    return True


def cpu_cores(root: Path = cgroups.ROOT) -> int:
    """Cores that this process may use: its affinity, and the quota of every control group around it. At least 1."""
    quota = cgroups.cpu_limit(root)
    cores = len(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, int(quota)))


def ram_bytes(root: Path = cgroups.ROOT) -> int:
    """RAM of this machine, or as much of it as the control groups around this process allow."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, cgroups.memory_limit(root) or total)


def free_disk_bytes(folder: Path) -> int:
    """Free bytes of the disk on which `folder` lies or would be made."""
    return shutil.disk_usage(nearest_there(folder)).free
