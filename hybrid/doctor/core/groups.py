"""Groups of two roles on the same GPUs: results of their collectives, and what a communicator takes."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hybrid.doctor.check import Check, Figures, Setting, beside, expect
from hybrid.doctor.core.decoder import GROUP_TIMEOUT_S, join
from hybrid.doctor.core.memory import expect_planned, plan_constant
from hybrid.memory.probe import device_bytes

ROLES = 2


def groups_work(setting: Setting) -> Figures:
    """Each role in turn, as in a run: its group, its collectives, and the bytes that it adds on the GPU."""
    turn = dist.FileStore(str(setting.folder / "turns"), ROLES * setting.world)
    turn.set_timeout(timedelta(seconds=2 * GROUP_TIMEOUT_S))
    if setting.device == "cuda":
        torch.ones(1, device=setting.torch_device)
    _meet(turn, "contexts", ROLES * setting.world)
    figures: Figures = {"ranks": setting.world}
    for role in range(ROLES):
        if role == setting.role:
            before = device_bytes(setting.device)[0]
            join(setting)
            _collectives(setting, figures)
            if setting.device == "cuda":
                reserved = torch.cuda.memory_reserved()
                planned = plan_constant("NCCL_COMMUNICATOR") if setting.world > 1 else None
                figures["communicator_bytes"] = beside(device_bytes("cuda")[0] - before - reserved, planned)
        _meet(turn, f"role-{role}", ROLES * setting.world)
    _collectives(setting, figures)  # both groups are there, and one works at a time
    if setting.device == "cuda":
        expect_planned("a group over several GPUs takes", figures["communicator_bytes"], figures)
        figures["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return figures


def _meet(store: dist.Store, name: str, processes: int) -> None:
    """Wait until so many processes are here. No GPU spins meanwhile."""
    until = time.monotonic() + 2 * GROUP_TIMEOUT_S
    count = store.add(name, 1)
    while count < processes:
        expect(time.monotonic() < until, f"only {count} of {processes} processes came to {name}", {})
        time.sleep(0.02)
        count = store.add(name, 0)


def _collectives(setting: Setting, figures: Figures) -> None:
    """What ZeRO and weight sync use, on numbers whose results are known."""
    device, world, rank = setting.torch_device, setting.world, setting.rank
    elements = setting.size(16 * 2**20, 1024)
    ones = torch.full((world * elements,), float(rank + 1), device=device)
    total = world * (world + 1) / 2
    dist.all_reduce(ones)
    expect(bool(ones.eq(total).all()), "all_reduce gives other sums", figures)
    own = torch.full((elements,), float(rank), device=device)
    gathered = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(gathered, own)
    expect(all(bool(part.eq(i).all()) for i, part in enumerate(gathered)), "all_gather mixes ranks up", figures)
    if setting.device == "cuda":  # gloo has none
        part = torch.empty(elements, device=device)
        dist.reduce_scatter_tensor(part, torch.ones(world * elements, device=device))
        expect(bool(part.eq(world).all()), "reduce_scatter gives other sums", figures)
    sent = torch.full((elements,), float(rank + 7), device=device)
    dist.broadcast(sent, 0)
    expect(bool(sent.eq(7).all()), "broadcast does not bring what rank 0 sent", figures)
    on_host = torch.tensor([rank])
    dist.all_reduce(on_host, dist.ReduceOp.MAX)
    expect(on_host.item() == world - 1, "gloo gives another maximum", figures)
    found: list = [None] * world
    dist.all_gather_object(found, {"rank": rank})
    expect(found == [{"rank": i} for i in range(world)], "all_gather_object mixes ranks up", figures)


GROUPS = [
    Check(
        "groups",
        "Two roles with a process on each GPU form their own groups, whose collectives give the right numbers; NCCL takes what is planned.",
        "Training would hang or go wrong here: NCCL_DEBUG=INFO says more, and NCCL_P2P_DISABLE=1 shows whether it is PCIe or NVLink.",
        groups_work,
        gpus=None,
        everywhere=True,
        roles=ROLES,
    )
]
