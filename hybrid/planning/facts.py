"""What a plan knows of the machine: measured once by `calibration.calibrate`, else stated here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybrid.config import RunConfig, machine
from hybrid.errors import ConfigError
from hybrid.planning.known_gpus import CUDA_CONTEXT, Gpu, find_gpu

__all__ = ["CUDA_CONTEXT", "MIB", "MachineFacts", "ProcessBytes", "stated_facts"]

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
    context, cuBLAS's workspaces included.
    """

    private: int
    shared: int = 0


CPU_ROLE = ProcessBytes(private=396 * MIB, shared=236 * MIB)
CPU_ENGINE = ProcessBytes(private=656 * MIB, shared=241 * MIB)
"""By `calibrate` on an x86 server with two cores: torch 2.13, transformers 5.19, DeepSpeed 0.19.8, vLLM 0.32.0, Ray 2.60."""
NCCL_COMMUNICATOR = 700 * MIB
"""Per process group over several GPUs, after its first collective (NCCL #964: 544 MB with 2 A100s, 688 MB with more)."""
CUDA_GRAPHS = 512 * MIB
"""Captured graphs of an engine and their pool. Published are 0.23 to 0.68 GiB for dense models of up to 12B."""
ALLOCATOR_SHARE = 0.05
"""Of all that a process has allocated through torch: what rounding and free pieces between used ones add, where segments are fixed.
Published are 0.2 to 16 %, 3 % in the middle."""
EXPANDABLE_SHARE = 0.01
"""The same where segments are expandable: 10.1 GiB on an A800 fell to 0.3 (verl)."""
CPU_BATCHED_TOKENS, BATCHED_TOKENS, FEWER_BATCHED_TOKENS = 4096, 16384, 8192
"""Tokens that vLLM 0.32.0 takes in one pass when `LLM` is not told (`EngineArgs.get_batch_defaults`): on CPU per tensor-parallel rank; the
fewer on a GPU of less than 70 GiB and on every A100."""
MANY_BYTES = 70 * 2**30


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
    graphs: int = 0
    """Bytes of an engine's CUDA graphs, on each of its GPUs."""
    batched_tokens: int = CPU_BATCHED_TOKENS
    """Tokens of an engine's largest pass; on CPU per tensor-parallel rank."""
    allocator_share: float = 0.0
    """Of what torch has allocated in a process with fixed segments: what its caching allocator holds besides."""
    expandable_share: float = 0.0
    """The same in a process with expandable segments."""
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
    found = find_gpu(gpu) if gpu else _gpu_here(size)
    pinned = SHARE_OF_LINE_RATE * found.pcie_bytes_per_s
    rate = pinned if cfg.memory.tier == "pinned" else FILE_BYTES_PER_S / per_node
    return MachineFacts(
        "cuda",
        found.name,
        found.nbytes or None,
        leave_bytes_per_s=rate,
        come_bytes_per_s=rate,
        role=ProcessBytes(found.context_bytes),
        engine=ProcessBytes(found.context_bytes),
        communicator=NCCL_COMMUNICATOR,
        graphs=CUDA_GRAPHS,
        batched_tokens=batched_tokens(found),
        allocator_share=ALLOCATOR_SHARE,
        expandable_share=EXPANDABLE_SHARE,
    )


def _gpu_here(size: int | None) -> Gpu:
    """The first GPU of this machine, with the rates of its kind where that is known. `size`: its bytes where nothing can be asked."""
    nbytes, name = machine.gpu_bytes() or size or 0, machine.gpu_name() or "GPU"
    try:
        return replace(find_gpu(name), name=name, nbytes=nbytes)
    except ConfigError:
        return Gpu(name, nbytes, 32e9, 0.0)


def batched_tokens(gpu: Gpu) -> int:
    """Tokens that vLLM takes in one pass on `gpu`."""
    return BATCHED_TOKENS if gpu.nbytes >= MANY_BYTES and "a100" not in gpu.name.lower() else FEWER_BATCHED_TOKENS
