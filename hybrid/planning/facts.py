"""What a plan knows of the machine: measured once by `calibration.calibrate`, else stated here."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.config import RunConfig, machine
from hybrid.planning.known_gpus import Gpu, find_gpu

MIB = 2**20
SHARE_OF_LINE_RATE = 0.6
"""What copies to pinned memory are planned with while all GPUs of a node copy, until measured."""
FILE_BYTES_PER_S = 1e9
"""What the file tier is planned with until measured, all processes of a node together."""
CALL_S = 0.025
"""Of a move that copies nothing, measured on CPU with two ranks of 1 to 2 GiB."""


@dataclass(frozen=True)
class ProcessBytes:
    """What a process holds besides tenants and working sets.

    On CPU: `private` pages, and `shared` ones (libraries), which all processes of a node have once. On CUDA, on its GPU: `private` is the
    context, cuBLAS workspaces and communicators included.
    """

    private: int
    shared: int = 0


CPU_ROLE = ProcessBytes(private=396 * MIB, shared=236 * MIB)
CPU_ENGINE = ProcessBytes(private=656 * MIB, shared=241 * MIB)
"""By `calibrate` on an x86 server with two cores: torch 2.13, transformers 5.19, DeepSpeed 0.19.8, vLLM 0.32.0, Ray 2.60."""
CUDA_CONTEXT = 500 * MIB
"""With lazily loaded modules (pytorch #107667: about 300 MB bare), and cuBLAS's workspaces of 32 MiB per handle on Hopper."""
NCCL_COMMUNICATOR = 700 * MIB
"""Per process group over several GPUs, after its first collective (NCCL #964: 544 MB with 2 A100s, 688 MB with more)."""


@dataclass(frozen=True)
class MachineFacts:
    """`leave_bytes_per_s`, `come_bytes_per_s`: one GPU to and from the slow tier while all of its node copy. `None`: not known here."""

    device: str = "cpu"
    name: str = "cpu"
    device_bytes: int | None = None
    leave_bytes_per_s: float | None = None
    come_bytes_per_s: float | None = None
    role: ProcessBytes = CPU_ROLE
    engine: ProcessBytes = CPU_ENGINE
    communicator: int = 0
    """Bytes on a GPU of a process group that spans several."""
    allocator_share: float = 0.0
    """Of a working set: what rounding and fragmentation of torch's caching allocator add to it."""
    source: str = "stated"
    """"stated" or "measured"."""


def stated_facts(cfg: RunConfig, gpu: str | None = None) -> MachineFacts:
    """Facts about the machine that a resolved config runs on, without measuring: `gpu` is a name of gpus.yaml or a size, None for the
    GPUs that are here. Raises `ConfigError` for a GPU that is not known."""
    per_node = max(1, cfg.cluster.gpus_per_node)
    size = cfg.memory.device_bytes if cfg.memory.device_bytes != "auto" else None
    if cfg.cluster.device == "cpu" and gpu is None:
        rate = FILE_BYTES_PER_S / per_node
        return MachineFacts("cpu", "cpu", size, leave_bytes_per_s=rate, come_bytes_per_s=rate)
    found = find_gpu(gpu) if gpu else Gpu("GPU", size or machine.gpu_bytes() or 0, 32e9, 0.0)
    pinned = SHARE_OF_LINE_RATE * found.pcie_bytes_per_s
    rate = pinned if cfg.memory.tier == "pinned" else FILE_BYTES_PER_S / per_node
    return MachineFacts(
        "cuda",
        found.name,
        found.nbytes or None,
        leave_bytes_per_s=rate,
        come_bytes_per_s=rate,
        role=ProcessBytes(CUDA_CONTEXT),
        engine=ProcessBytes(CUDA_CONTEXT),
        communicator=NCCL_COMMUNICATOR,
        allocator_share=0.03,
    )
