"""The trainer half of weight sync: from the actor's ranks into every engine.

All ranks of the actor iterate the weights in lockstep (ZeRO-3 gathers them on the way); rank 0 alone talks to the engines. A rank that
fails says so at the next rendezvous, so that its peers raise with it instead of waiting for ever.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybrid.errors import DeadlineExceeded, HybridError, RolloutError
from hybrid.rollout.shared_memory import SharedBucket, host_name

Bucket = list[tuple[str, torch.Tensor]]


class WeightSource(Protocol):
    """The actor's weights under their checkpoint names; a fresh pass for every sync, in the same order on every rank."""

    def names_shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Full shape and wire dtype of every weight, without gathering anything."""

    def __iter__(self) -> Iterator[Bucket]:
        """Buckets of complete tensors, valid until the next one is asked for."""


class Sender(Protocol):
    def send(self, source: WeightSource, version: int) -> None:
        """Give every engine the weights of `source` and the number `version`. Called on all ranks at once.

        Raises `RolloutError` on every rank when one of them or an engine fails, `DeadlineExceeded` when an engine does not answer.
        """


def make_sender(backend: str, rank: int, engines: list[Any], bucket_bytes: int, timeout_s: float = 600) -> Sender:
    """The sender of this rank, made on all ranks at once (it opens a gloo group).

    `backend` is "shm" or "ipc". `engines` are Ray handles of `Engine`, or `Engine` objects of this process; used on rank 0 only.
    `bucket_bytes` bounds what is in flight (a larger tensor travels alone); `timeout_s` bounds each call of an engine.
    """
    peers = Peers(timeout_s + 60)
    calls = EngineCalls(engines if rank == 0 else [], timeout_s)
    if backend == "shm":
        return ShmSender(rank, calls, peers, bucket_bytes)
    if backend == "ipc":
        from hybrid.rollout.ipc_sender import IpcSender

        return IpcSender(rank, calls, peers, bucket_bytes)
    raise RolloutError(f"No weight transfer backend `{backend}`: use shm (CPU) or ipc (CUDA).")


class Peers:
    """The ranks that send together; alone when torch.distributed is not initialised."""

    def __init__(self, timeout_s: float):
        self.together = dist.is_initialized() and dist.get_world_size() > 1
        self.group = (
            dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s)) if self.together else None
        )

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank, in rank order."""
        if not self.together:
            return [value]
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, error: Exception | None, value: Any = None) -> list[Any]:
        """Meet the other ranks: raise when any of them brings an error, else return every rank's `value`."""
        try:
            met = self.gather((None if error is None else f"{type(error).__name__}: {error}", value))
        except RuntimeError as lost:  # a peer is gone or late: our own error, if any, is nearer to the cause
            if error is None:
                raise RolloutError(f"Weight sync: a rank of the actor did not keep step: {lost}") from lost
        if error is not None:
            raise error if isinstance(error, HybridError) else RolloutError(f"Weight sync failed: {error!r}") from error
        failed = {rank: text for rank, (text, _) in enumerate(met) if text is not None}
        if failed:
            raise RolloutError(f"Weight sync failed on actor rank {min(failed)}: {failed[min(failed)]}")
        return [value for _, value in met]


class EngineCalls:
    """The same call on every engine at once."""

    def __init__(self, engines: list[Any], timeout_s: float):
        self.engines = engines
        self.timeout_s = timeout_s

    def __call__(self, method: str, *args) -> None:
        bound = [getattr(engine, method) for engine in self.engines]
        remote = [b.remote(*args) for b in bound if hasattr(b, "remote")]
        for local in bound:
            if not hasattr(local, "remote"):
                local(*args)
        if remote:
            _wait(remote, method, self.timeout_s)


def _wait(refs: list[Any], method: str, timeout_s: float) -> None:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    try:
        ray.get(refs, timeout=timeout_s)
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"Weight sync: an engine did not finish `{method}` within {timeout_s:.0f} s.") from error
    except RayTaskError as error:
        if isinstance(error.cause, HybridError):
            raise error.cause from None
        raise RolloutError(f"Weight sync: an engine failed in `{method}`:\n{error}") from error
    except RayActorError as error:
        raise RolloutError(f"Weight sync: an engine's process ended during `{method}`: {error}") from error


def attempt(action: Callable[[], Any]) -> tuple[Exception | None, Any]:
    """Result or error of `action`, for the next `Peers.agree`."""
    try:
        return None, action()
    except Exception as error:
        return error, None


def staging_bytes(bucket_bytes: int, weights: list[tuple[str, torch.dtype, tuple[int, ...]]]) -> int:
    """Bytes of the buffer through which `weights` (see `WeightSource.names_shapes`) travel over CUDA IPC: a bucket, no less than the
    largest tensor, which vLLM does not cut, and no more than all of them."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in weights]
    return min(max(bucket_bytes, max(sizes)), sum(sizes))


class InStep:
    """The stream of all weights of `source`, one after another. Where the source fails, the error is kept and placeholders of the same
    shapes on `device` follow: the peers of this rank wait for it in as many collectives as there are weights to send."""

    def __init__(self, source: WeightSource, device: str):
        self.source, self.device = source, device
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        sent = 0
        try:
            for bucket in self.source:
                for named in bucket:
                    sent += 1
                    yield named
        except Exception as error:  # not what the reader of this stream raises: that does not come by here
            self.error = error
        for name, dtype, shape in self.source.names_shapes()[sent:] if self.error else ():
            yield name, torch.empty(shape, dtype=dtype, device=self.device)


class ShmSender:
    """Through shared memory: one writer a node, read by that node's engines."""

    def __init__(self, rank: int, calls: EngineCalls, peers: Peers, bucket_bytes: int):
        self.rank, self.calls, self.peers, self.bucket_bytes = rank, calls, peers, bucket_bytes
        hosts = peers.gather(host_name())
        self.is_writer = hosts.index(host_name()) == rank

    def send(self, source: WeightSource, version: int) -> None:
        """See `Sender`."""
        error, _ = attempt(lambda: self.calls("start_weight_update"))
        self.peers.agree(error)
        buckets = bounded(source, self.bucket_bytes)
        while True:
            error, bucket = attempt(lambda: next(buckets, None))
            if self.peers.agree(error, bucket is None)[0]:
                break
            self._send_bucket(bucket)
        error, _ = attempt(lambda: self._finish(version))
        self.peers.agree(error)

    def _send_bucket(self, bucket: Bucket) -> None:
        shared = None
        try:
            error, shared = attempt(lambda: SharedBucket(bucket) if self.is_writer else None)
            paths = self.peers.agree(error, (host_name(), shared.path) if shared else None)
            update = {
                "paths": dict(p for p in paths if p),
                "names": [name for name, _ in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
            }
            error, _ = attempt(lambda: self.calls("update_weights", {"update_info": update}))
            self.peers.agree(error)
        finally:
            if shared:
                shared.close()

    def _finish(self, version: int) -> None:
        self.calls("finish_weight_update")
        self.calls("set_weight_version", version)


def bounded(source: WeightSource, bucket_bytes: int) -> Iterator[Bucket]:
    """The source's buckets, cut where they exceed `bucket_bytes`; a single larger tensor stays whole."""
    for bucket in source:
        piece: Bucket = []
        size = 0
        for name, tensor in bucket:
            if piece and size + tensor.nbytes > bucket_bytes:
                yield piece
                piece, size = [], 0
            piece.append((name, tensor))
            size += tensor.nbytes
        if piece:
            yield piece
