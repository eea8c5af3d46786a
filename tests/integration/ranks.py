"""Two ranks without Ray: what DeepSpeed does does not depend on who started the processes."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def run_ranks(function: Callable[..., Any], *args: Any, world: int = 2, timeout_s: float = 240) -> list[Any]:
    """`function(worker_kwargs, *args)` in `world` fresh processes; results by rank. Raises what a rank raised, as text."""
    context = mp.get_context("spawn")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    queue = context.Queue()
    processes = [
        context.Process(target=_entry, args=(function, rank, world, port, queue, args)) for rank in range(world)
    ]
    for p in processes:
        p.start()
    results = {}
    try:
        while len(results) < world:
            rank, error, value = queue.get(timeout=timeout_s)
            assert error is None, f"rank {rank}:\n{error}"
            results[rank] = value
    finally:
        for p in processes:
            p.join(10 if len(results) == world else 0)
            p.kill()
    return [results[rank] for rank in range(world)]


def _entry(function, rank, world, port, queue, args) -> None:
    try:
        queue.put((rank, None, function(rank, world, port, *args)))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
