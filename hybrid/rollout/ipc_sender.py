"""Weight sync over CUDA IPC, with vLLM's own trainer half. Imported on CUDA only.

Every GPU of the pool holds an actor rank, so each engine worker finds the handle of its own GPU among those that the ranks gathered.
Weights are packed through one staging buffer: exporting the weights themselves would pin their storages, which then could not leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

from hybrid.rollout import sender


class IpcSender:
    """See `sender.Sender`. vLLM's collectives run over the default process group: it must be exactly the actor's ranks."""

    def __init__(self, rank: int, calls: sender.EngineCalls, peers: sender.Peers, bucket_bytes: int):
        self.rank, self.peers, self.bucket_bytes = rank, peers, bucket_bytes
        self.client = _Client(calls)
        self.weights = _Flattened()
        self.buffer_bytes = 0
        self.engine: IPCTrainerWeightTransferEngine | None = None

    def send(self, source: sender.WeightSource, version: int) -> None:
        self.weights.stream = sender.InStep(source, "cuda")
        if self.engine is None:
            error, engine = sender.attempt(lambda: self._open(source))
            self.peers.agree(self.client.take_error() or error)
            self.engine = engine
        # vLLM allocates the buffer when the others wait already. What fits now fits then: the block stays in torch's cache.
        error, buffer = sender.attempt(lambda: torch.empty(self.buffer_bytes, dtype=torch.uint8, device="cuda"))
        del buffer
        self.peers.agree(error)
        error, _ = sender.attempt(self.engine.send_weights)
        torch.cuda.empty_cache()
        self.peers.agree(self.weights.stream.error or self.client.take_error() or error)
        error, _ = sender.attempt(lambda: self.client.calls("set_weight_version", version))
        self.peers.agree(error)

    def _open(self, source: sender.WeightSource) -> IPCTrainerWeightTransferEngine:
        self.buffer_bytes = sender.staging_bytes(self.bucket_bytes, source.names_shapes())
        info = IPCTrainerInitInfo(rank=self.rank, packed=True, packed_buffer_size_bytes=self.buffer_bytes)
        return IPCTrainerWeightTransferEngine.trainer_init(info, client=self.client, source=self.weights)


class _Client:
    """vLLM's control calls. After a failure it only pretends, so that this rank keeps step in the collectives of the rest of the round;
    the error is raised on all ranks at the end."""

    def __init__(self, calls: sender.EngineCalls):
        self.calls = calls
        self.error: Exception | None = None

    def take_error(self) -> Exception | None:
        error, self.error = self.error, None
        return error

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        self._call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def _call(self, method: str, *args) -> None:
        if self.error is None:
            self.error, _ = sender.attempt(lambda: self.calls(method, *args))


class _Flattened(WeightSource):
    """Our buckets as the flat stream that vLLM takes; a bucket stays gathered while its tensors are packed."""

    stream: sender.InStep

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in self.stream.source.names_shapes()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.stream)
