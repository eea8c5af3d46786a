"""Measure a process's GPU memory beside its tensors, how torch's allocator behaves, and the residue after rounds of moving."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from importlib import import_module
from typing import Any

import torch

from hybrid.doctor.check import Check, Figures, Setting, beside, expect
from hybrid.doctor.core.decoder import join, make_decoder, share_of_loss
from hybrid.doctor.core.swap import LEARNING_RATE, new_swap
from hybrid.errors import HybridError
from hybrid.memory.probe import device_bytes, measured_bytes, release_free_memory
from hybrid.memory.swap import Part, come_parts, leave_parts

MIB = 2**20
ROUNDS = 20
MARGIN = 1.25
"""A plan covers a figure up to this multiple of its constant."""
SLACK = 64 * MIB

OPENS_CONTEXT = """
import json, sys, torch
def report(**more):
    print(json.dumps({"reserved": torch.cuda.memory_reserved()} | more), flush=True)
    sys.stdin.readline()
torch.ones(1, device="cuda"); torch.cuda.synchronize(); report(step="context")
a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
for _ in range(3):
    (torch.nn.functional.gelu(a @ a).float().softmax(-1) @ a.float()).sum().backward()
torch.cuda.synchronize(); report(step="kernels")
"""
"""A process that opens a context, then loads cuBLAS and some kernels; it waits for a line after each, and says what it has allocated."""


def plan_constant(name: str) -> Any:
    """A constant of `hybrid.planning.facts`; None where what that needs (pydantic, PyYAML) is not installed."""
    try:
        return getattr(import_module("hybrid.planning.facts"), name, None)
    except ImportError:
        return None


def planned_context() -> int | None:
    """Return the bytes that a plan counts for a context on this kind of GPU."""
    try:
        from hybrid.planning.known_gpus import find_gpu

        return find_gpu(torch.cuda.get_device_name()).context_bytes
    except (ImportError, HybridError):  # no PyYAML, or a GPU that is not in the list
        return plan_constant("CUDA_CONTEXT")


def context_is_planned(setting: Setting) -> Figures:
    """Device memory in use before and after another process opens a context there, without what it allocated."""
    torch.ones(1, device="cuda")
    before, total = device_bytes("cuda")
    figures: Figures = {"gpu_bytes": total}
    command = [sys.executable, "-c", OPENS_CONTEXT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8") as other:
        for line in other.stdout:
            said = json.loads(line)
            taken = device_bytes("cuda")[0] - before - said["reserved"]
            planned = planned_context() if said["step"] == "kernels" else None
            figures[f"{said['step']}_bytes"] = beside(taken, planned)
            other.stdin.write("\n")
            other.stdin.flush()
    expect("kernels_bytes" in figures, f"the other process ended with {other.returncode}", figures)
    expect_planned("a process with its kernels takes", figures["kernels_bytes"], figures)
    return figures


def expect_planned(what: str, figure: dict, figures: Figures) -> None:
    measured, planned = figure["measured"], figure["planned"]
    said = f"{what} {measured / MIB:.0f} MiB, planned are {(planned or 0) / MIB:.0f}"
    expect(planned is None or measured <= MARGIN * planned + SLACK, said, figures)


def allocator_keeps_little(setting: Setting, planned: str) -> Figures:
    """A pass's tensors of many sizes come and go; then what is reserved beyond what was ever allocated at once."""
    generator = torch.Generator().manual_seed(0)
    unit = setting.size(MIB, 2**10)
    for _ in range(6):
        sizes = torch.randint(unit, 48 * unit, (64,), generator=generator).tolist()
        held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        del held[::2]
        held += [torch.empty(2 * size, dtype=torch.uint8, device="cuda") for size in sizes[::2]]
        del held
    stats = torch.cuda.memory_stats()
    allocated, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    share = reserved / allocated - 1
    figures = {
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "allocator_share": beside(share, plan_constant(planned)),
    }
    expect(share <= 0.25, f"torch's allocator holds {share:.0%} more than was allocated at once", figures)
    return figures


def freed_pieces_serve_a_whole(setting: Setting) -> Figures:
    """Half of 32 blocks of 32 MiB is freed, every second one; then one block of all their bytes is allocated."""
    large = [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda") for _ in range(32)]
    kept = large[::2]
    del large
    torch.cuda.empty_cache()
    whole = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    figures = {
        "held_bytes": whole.nbytes + sum(each.nbytes for each in kept),
        "reserved_bytes": torch.cuda.memory_reserved(),
    }
    expect(
        figures["reserved_bytes"] <= 1.1 * figures["held_bytes"], "freed pieces do not serve a larger tensor", figures
    )
    return figures


def exported_memory_is_cudas_own(setting: Setting) -> Figures:
    """A tensor is exported over CUDA IPC, as the actor's buffer is; its segment must not be expandable."""
    from torch.multiprocessing.reductions import reduce_tensor

    reduce_tensor(torch.ones(2**20, device="cuda"))
    kinds = sorted({str(segment["is_expandable"]) for segment in torch.cuda.memory_snapshot()})
    expect(kinds == ["False"], "the actor's segments are expandable", {"expandable": kinds})
    return {"expandable": kinds}


def nothing_stays(setting: Setting) -> Figures:
    """Rounds of a step, leaving and coming: what this process and the device hold is the same in each, asleep and awake."""
    from hybrid.roles.zero import TrainedModel, ZeroOptions, load_deepspeed

    load_deepspeed()
    join(setting)
    options = ZeroOptions(2, torch.bfloat16, (0.9, 0.95), 1e-8, 0.0, 1.0)
    model, swap = TrainedModel(make_decoder(setting, torch.bfloat16), options), new_swap(setting)
    asleep, awake, of_device = [], [], []
    for step in range(ROUNDS):
        model.step([share_of_loss(setting, step)], LEARNING_RATE, lambda: None)
        model.drop_caches()
        parts = {name: Part(found, keep_bytes=name != "gradients") for name, found in model.storages().items()}
        leave_parts(swap, parts, setting.rank, "here")
        release_free_memory(setting.device)
        asleep.append(measured_bytes(setting.device))
        of_device.append(device_bytes(setting.device)[0])
        come_parts(swap, list(parts), setting.rank, "here")
        awake.append(measured_bytes(setting.device))
    figures: Figures = {"asleep_bytes": asleep, "awake_bytes": awake}
    if setting.device == "cuda":
        figures |= {"device_bytes": of_device, "pinned_bytes": swap.tier.pinned_bytes}
    grown = {"asleep": asleep[-1] - asleep[2], "awake": awake[-1] - awake[2]}
    # On a CPU the interpreter's own memory is in the figures.
    slack = 2 * MIB if setting.device == "cuda" else 24 * MIB
    for kind, growth in grown.items():
        expect(growth <= slack, f"{kind}, the process holds {growth / MIB:.1f} MiB more after {ROUNDS} rounds", figures)
    return figures


MEMORY = [
    Check(
        "memory/context",
        "A process takes no more of a GPU beside its tensors than the plan counts for it.",
        "Plans are too tight by the difference for each process on a GPU: lower memory.device_bytes by it.",
        context_is_planned,
        on_cpu=False,
    ),
    *(
        Check(
            name,
            f"torch's allocator keeps little beyond what is in use at once, where segments are {kind}.",
            "Plans are too tight by this share of a pass: lower memory.device_bytes by it.",
            partial(allocator_keeps_little, planned=planned),
            process_role=role,
            on_cpu=False,
        )
        for name, kind, planned, role in (
            ("memory/expandable", "expandable", "EXPANDABLE_SHARE", "critic"),
            ("memory/fixed", "fixed, as in the actor", "ALLOCATOR_SHARE", "actor"),
        )
    ),
    Check(
        "memory/pieces",
        "In roles that export nothing, memory that was freed in pieces serves a larger tensor (expandable segments).",
        "The process was not given PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or this driver lacks them: fragments stay.",
        freed_pieces_serve_a_whole,
        on_cpu=False,
    ),
    Check(
        "memory/exports",
        "The actor exports memory that CUDA itself allocated, whatever the user's settings say.",
        "Weight sync would end in containers: something sets PYTORCH_CUDA_ALLOC_CONF after hybrid has.",
        exported_memory_is_cudas_own,
        process_role="actor",
        on_cpu=False,
    ),
    Check(
        "memory/residue",
        f"After {ROUNDS} rounds of training, leaving and coming, a process holds what it held after the first ones.",
        "Long runs would end for want of memory: send the report, its figures are the bytes of each round.",
        nothing_stays,
        gpus=None,
        everywhere=True,
        deadline_s=600.0,
    ),
]
