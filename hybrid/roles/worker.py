"""One Ray actor = one rank of one role. Layers: `DistributedWorker` (rendezvous), `ModelWorker` (a model that comes and goes)."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hybrid.garbage import resume_gc
from hybrid.memory.node_copy import NodeTier
from hybrid.memory.probe import PeakSampler, held_and_shared, keep_free_memory, measured_bytes, release_free_memory
from hybrid.memory.storages import as_tensor
from hybrid.memory.swap import Part, StorageSwap, come_parts, leave_parts
from hybrid.memory.tenants import RankMoved, RankPeak
from hybrid.memory.tiers import make_tier
from hybrid.roles.packing import PackedBatch, Row, pack
from hybrid.roles.shards import flat
from hybrid.roles.zero import FrozenModel, TrainedModel, load_deepspeed
from hybrid.telemetry.torch_trace import OpTrace, TorchRecorder


class DistributedWorker:
    """A rank of a process group that holds exactly the ranks of its role."""

    def __init__(self, role: str, rank: int, world_size: int, node: str, device: str, threads: int, timeout_s: float):
        self.role, self.rank, self.world_size, self.node = role, rank, world_size, node
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.timeout = timedelta(seconds=timeout_s)
        self.store: dist.TCPStore | None = None
        torch.set_num_threads(threads)
        load_deepspeed()
        # DeepSpeed asks MPI for these where they are not set; Ray shows a rank one GPU, whose local index is 0.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_SIZE="1")
        if device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"

    def host_store(self) -> int:
        """Open this role's rendezvous on rank 0 and return its port; the port is held from the start, never guessed."""
        self.store = dist.TCPStore(
            "0.0.0.0", 0, self.world_size, is_master=True, wait_for_workers=False, timeout=self.timeout
        )
        return self.store.port

    def join(self, host: str, port: int) -> None:
        """Form the role's process group: gloo, and nccl for CUDA tensors."""
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        store = self.store or dist.TCPStore(host, port, self.world_size, is_master=False, timeout=self.timeout)
        backend = "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=self.timeout)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def start_ops(self) -> None:
        """Record torch's operations of this process until `stop_ops`."""
        self.recorder = TorchRecorder(self.device.type)

    def stop_ops(self) -> list[OpTrace]:
        """What was recorded."""
        return [self.recorder.stop()]


class ModelWorker(DistributedWorker):
    """A rank whose model can leave the device and come back. Subclasses set `self.model` in `load`."""

    read_only = False
    """True where nothing trains: the first copy outside the device stays valid."""

    def __init__(self, *args, tier: str, swap_dir: str, node_ranks: list[int], keep_heap: bool = False, **kwargs):
        """`node_ranks`: ranks of this role on this node, this one among them. `keep_heap`: `tidy` gives no memory back."""
        super().__init__(*args, **kwargs)
        self.model: TrainedModel | FrozenModel | None = None
        own = make_tier(tier, Path(swap_dir) / f"{self.role}-{self.rank}")
        self.node_ranks = node_ranks
        self.tier = NodeTier(own, Path(swap_dir) / f"{self.role}-{self.node}", is_writer=self.rank == min(node_ranks))
        self.swap = StorageSwap(self.tier, self.device.type)
        self.peak = PeakSampler(self.device.type)
        self.keeps_heap = keep_heap and self.device.type == "cpu"
        self.share_prompts = True

    def leave(self, parts: list[str]) -> list[RankMoved]:
        """Move `parts` off the device; communication buffers and gradients hold no state and are freed without a copy."""
        self.model.drop_caches()
        storages = self.model.storages()
        leaving = {
            part: Part(storages[part], keep_bytes=part != "gradients", read_only=self.read_only) for part in parts
        }
        return leave_parts(self.swap, leaving, self.rank, self.node)

    def come(self, parts: list[str]) -> list[RankMoved]:
        """Bring `parts` back to where they were, bit for bit."""
        return come_parts(self.swap, parts, self.rank, self.node)

    def settle(self) -> dict[str, int]:
        """To be called when everything is loaded: bytes of each part.

        Buffers are written once, for memory that was never touched is counted but not there yet.
        """
        if self.model.stage < 3 and len(self.node_ranks) > 1:
            self.tier.replicated = ("weights",)
        for _, storage in self.model.storages().get("gradients", []):
            as_tensor(storage).zero_()
        gc.collect()
        resume_gc()
        if self.keeps_heap:
            keep_free_memory()
        return self.count()

    def count(self) -> dict[str, int]:
        """Bytes of each part on the device, counted by storages; 0 for what is away."""
        return {
            part: sum(s.storage.nbytes() for s in found if s.storage.device.type == self.device.type)
            for part, found in self.model.storages().items()
        }

    def take_peak(self) -> RankPeak:
        """The highest memory of this process since the last call, and what it holds now."""
        return RankPeak(self.role, self.rank, self.peak.take(), *held_and_shared(self.device.type))

    def tidy(self) -> None:
        """Give back what a phase left in caches, where the next one's tenants count on it."""
        self.model.drop_caches()
        if not self.keeps_heap:
            release_free_memory(self.device, collect=False)

    def measure(self) -> int:
        """Bytes that this process holds now."""
        return measured_bytes(self.device.type)

    def pack(self, rows: Sequence[Row]) -> PackedBatch:
        """A micro-batch on this rank's device; an empty one becomes two tokens whose results are dropped."""
        return pack(rows or [Row(0, [0], [0])], self.share_prompts).to(self.device)

    def forward_rows(self, micros: Iterable[Sequence[Row]], run: Callable[[PackedBatch], torch.Tensor]) -> np.ndarray:
        """`run` (R floats of a packed batch) over micro-batches: the floats of all rows, flat, in their order."""
        return flat([run(self.pack(rows))[: sum(len(row.response) for row in rows)].cpu() for rows in micros])
