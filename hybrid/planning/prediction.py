"""What a run will hold, in bytes: plain data, made from config.json alone, read by the schedule, the plan and the report.

A GPU is a real one, or a logical one on a machine without: then its memory is the processes' own. Bytes are those of the fullest GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid.memory.tenants import Key


@dataclass(frozen=True)
class TenantSize:
    """One tenant on one GPU.

    `movable` is false where the platform cannot move it. `leave_bytes` and `come_bytes` are copied when it moves: 0 for what keeps its host
    copy or loses its contents. `host_bytes` is what it holds in the slow tier from its first departure on (0: nothing is kept), per GPU.
    """

    role: str
    part: str
    device_bytes: int
    movable: bool = True
    leave_bytes: int = 0
    come_bytes: int = 0
    host_bytes: int = 0

    @property
    def key(self) -> Key:
        return (self.role, self.part)


LOADING = "loading the "


@dataclass(frozen=True)
class PhaseUse:
    """What a phase allocates besides tenants, on one GPU, while it works; `parts` says what the sum is made of, in bytes by name, e.g.
    {"activations": ..., "logits": ..., "gathered parameters": ...}. Parts are taken at the moment of the phase's peak, so they add up; but
    roles load one after another, so of init's parts "loading the <role>" there is one at a time."""

    phase: str
    parts: dict[str, int] = field(default_factory=dict)

    @property
    def working_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class KVCache:
    """The KV cache of an engine: `bytes` on each of its GPUs, in which together `tokens` fit, or `sequences` of the longest length.

    `least_bytes` is one such sequence, on each GPU: vLLM does not start with less. It keeps one block to itself.
    """

    bytes: int
    bytes_per_token: int
    tokens: int
    sequences: int
    least_bytes: int


@dataclass(frozen=True)
class Prediction:
    """A whole run on one GPU of the pool and on one node's host.

    `phases` come in the order of a step (init first, and checkpoint and evaluate where the run has them). `overhead` is there in every
    phase, whatever moves: by name, bytes per GPU, all processes on it together (CUDA contexts, communicators, cuBLAS, IPC buffer; on CPU
    the interpreters and libraries). `host` is per node, by name, besides the tenants' `host_bytes`. `gpus_per_node` multiplies the latter.
    """

    tenants: tuple[TenantSize, ...]
    phases: tuple[PhaseUse, ...]
    overhead: dict[str, int]
    host: dict[str, int]
    gpus_per_node: int
    kv_cache: KVCache | None = None
    """`None` without engines."""

    def tenant(self, role: str, part: str) -> TenantSize | None:
        return next((t for t in self.tenants if t.key == (role, part)), None)
