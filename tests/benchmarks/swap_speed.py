"""How fast a part leaves and comes, over a plain copy of the same bytes to the same place.

    python tests/benchmarks/swap_speed.py [--mib 1024] [--folder .] [--rounds 5]

CPU: the place is a file. Plain out: one write per tensor over an existing file. Plain in: one read per tensor into memory that was
allocated for it, as a part that comes needs memory too; beside it the read into memory that was never given away. CUDA: the place is
pinned memory, plain is one `copy_` of the same bytes. Ours includes freeing, allocating and handing memory back to the system.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hybrid.memory.probe import release_free_memory
from hybrid.memory.storages import host_bytes
from hybrid.memory.swap import StorageSwap
from hybrid.memory.tiers import FileTier, PinnedTier

SHARES = [0.5, 0.2, 0.1, 0.05, 0.05] + [0.01] * 10
"""Flat buffers of ZeRO and single tensors of stage 0, in one part."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--mib", type=int, default=1024)
    arguments.add_argument("--folder", type=Path, default=Path("."))
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [
        torch.randint(0, 255, (int(share * options.mib * 2**20),), dtype=torch.uint8, device=device) for share in SHARES
    ]
    total = sum(t.numel() for t in tensors)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plain = plain_cuda(tensors) if device == "cuda" else plain_file(tensors, Path(folder) / "plain")
        tier = PinnedTier() if device == "cuda" else FileTier(folder)
        swap = StorageSwap(tier, device)
        named = [(str(i), t.untyped_storage()) for i, t in enumerate(tensors)]

        def leave() -> None:
            swap.leave("part", named)
            release_free_memory(device, collect=False)

        moves = {"out": leave, "in": lambda: swap.come("part"), **plain}
        speeds = measure(moves, total, options.rounds)
    for name, values in speeds.items():
        shown = ", ".join(f"{v:.2f}" for v in values)
        print(f"{name:>24}: {statistics.median(values):6.2f} GB/s  ({shown})")
    ratios = [statistics.median(speeds[ours]) / statistics.median(speeds[f"plain {ours}"]) for ours in ("out", "in")]
    print(f"ratio out {ratios[0]:.2f} in {ratios[1]:.2f}")


def measure(moves: dict[str, Callable[[], object]], total: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of each move, every one once per round so that a busy moment of the machine meets all; a first round is not counted."""
    speeds: dict[str, list[float]] = {name: [] for name in moves}
    for number in range(rounds + 1):
        for name, move in moves.items():
            start = time.perf_counter()
            move()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number:
                speeds[name].append(total / 1e9 / (time.perf_counter() - start))
    return speeds


def plain_file(tensors: list[torch.Tensor], path: Path) -> dict[str, Callable[[], object]]:
    """Write and read of the tensors' bytes by plain system calls, one per tensor."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    kept = [torch.zeros_like(t) for t in tensors]

    def write() -> None:
        at = 0
        for t in tensors:
            at += os.pwrite(fd, host_bytes(t.untyped_storage()), at)

    def read(targets: list[torch.Tensor]) -> None:
        at = 0
        for t in targets:
            at += os.preadv(fd, [host_bytes(t.untyped_storage())], at)

    return {
        "plain out": write,
        "plain in": lambda: read([torch.empty_like(t) for t in tensors]),
        "plain in, memory kept": lambda: read(kept),
    }


def plain_cuda(tensors: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Copies of the tensors to and from pinned tensors of the same sizes."""
    pinned = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
    kept = [torch.empty_like(t) for t in tensors]
    return {
        "plain out": lambda: [p.copy_(t, non_blocking=True) for p, t in zip(pinned, tensors)],
        "plain in": lambda: [k.copy_(p, non_blocking=True) for k, p in zip(kept, pinned)],
    }


if __name__ == "__main__":
    main()
