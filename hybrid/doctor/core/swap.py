"""Move plain tensors and DeepSpeed's state of each ZeRO stage off the device and back."""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch

from hybrid.doctor.check import Check, Figures, Setting, beside, expect
from hybrid.doctor.core.decoder import join, make_decoder, share_of_loss
from hybrid.memory.probe import measured_bytes, release_free_memory
from hybrid.memory.storages import as_tensor
from hybrid.memory.swap import Part, StorageSwap, come_parts, leave_parts
from hybrid.memory.tenants import NamedStorage
from hybrid.memory.tiers import PinnedTier, in_memory, make_tier

MIB = 2**20
LEAST_SHARE = 0.5
"""Moving is slow when it reaches less than this share of a plain pinned copy's rate."""
LEARNING_RATE = 1e-3
STEPS = 3


def new_swap(setting: Setting, name: str = "swap") -> StorageSwap:
    tier = make_tier("pinned" if setting.device == "cuda" else "file", setting.folder / f"{name}-{setting.rank}")
    return StorageSwap(tier, setting.device)


def named(**tensors: torch.Tensor) -> list[NamedStorage]:
    return [NamedStorage(name, tensor.untyped_storage()) for name, tensor in tensors.items()]


def tensors_come_back(setting: Setting) -> Figures:
    """Views, odd sizes, work in flight on another stream, and a step that is queued right after coming; of each tier there is."""
    figures: Figures = {}
    for kind in ("pinned", "file") if setting.device == "cuda" else ("file",):
        if kind == "file" and in_memory(setting.folder) and setting.device == "cuda":
            continue  # a folder in memory is no tier
        swap = StorageSwap(make_tier(kind, setting.folder / kind), setting.device)
        _round_trip(swap, kind, setting, figures)
    return figures


def _round_trip(swap: StorageSwap, kind: str, setting: Setting, figures: Figures) -> None:
    device = setting.torch_device
    elements = setting.size(64 * MIB, 4 * MIB)
    flat, half = torch.randn(elements, device=device), torch.randn(elements // 4 + 7, device=device).bfloat16()
    view = flat[1000:2000].view(10, 100)
    kept = [tensor.cpu().clone() for tensor in (flat, view, half)]
    release_free_memory(device)
    before = measured_bytes(device)
    counted = swap.leave("weights", named(flat=flat, half=half)).counted_bytes
    release_free_memory(device)
    fell = before - measured_bytes(device)
    figures[f"{kind}_fell_bytes"] = beside(fell, counted)
    swap.come("weights")
    same = all(torch.equal(now.cpu(), then) for now, then in zip((flat, view, half), kept))
    expect(same, f"{kind}: bytes changed", figures)
    flat[1000] = 7.0
    expect(view[0, 0].item() == 7.0, f"{kind}: a view no longer shares its tensor's memory", figures)
    noise = 0 if setting.device == "cuda" else 4 * MIB  # the interpreter's own, in the figures of a CPU
    expect(fell >= 0.9 * counted - noise, f"{kind}: memory fell by {fell} bytes of {counted}", figures)
    for _ in range(5):
        flat.fill_(1.0)
        swap.leave("weights", named(flat=flat))
        swap.come("weights")
        expect(flat.sum(dtype=torch.float64).item() == elements, f"{kind}: work after coming saw other bytes", figures)
    if setting.device == "cuda":
        _check_streams(swap, flat, figures)


def _check_streams(swap: StorageSwap, tensor: torch.Tensor, figures: Figures) -> None:
    other = torch.cuda.Stream()
    tensor.zero_()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        torch.cuda._sleep(500_000_000)
        tensor.add_(3)
    swap.leave("weights", named(tensor=tensor))
    scribble = torch.full_like(torch.empty(tensor.shape, device="cuda"), -1.0)  # takes the block that was freed
    swap.come("weights")
    arrived = bool(tensor.eq(3).all()) and bool(scribble.eq(-1).all())
    expect(arrived, "a part left before work on another stream had ended", figures)


def pinned_memory_is_kept(setting: Setting) -> Figures:
    """Slabs are pinned once and serve parts in turn; a part that is only read is copied once, one without state never."""
    tier = PinnedTier(slab_bytes=64 * MIB)
    swap = StorageSwap(tier, "cuda")
    first, second = torch.randn(25 * MIB, device="cuda"), torch.randn(20 * MIB, device="cuda")
    kept = first.cpu(), second.cpu()
    for _ in range(3):
        for part, tensor in (("first", first), ("second", second)):
            swap.leave(part, named(tensor=tensor))
            swap.come(part)
    figures: Figures = {"pinned_in_turn_bytes": beside(tier.pinned_bytes, 128 * MIB)}
    for part, tensor in (("first", first), ("second", second)):
        swap.leave(part, named(tensor=tensor))
    figures["pinned_together_bytes"] = beside(tier.pinned_bytes, 256 * MIB)
    swap.come("second")
    swap.come("first")
    same = torch.equal(first.cpu(), kept[0]) and torch.equal(second.cpu(), kept[1])
    expect(same, "two parts that were away together came back mixed up", figures)
    parts = {
        "weights": Part(named(tensor=first), read_only=True),
        "gradients": Part(named(tensor=second), keep_bytes=False),
    }
    copied = []
    for _ in range(2):
        copied.append([row.copied_bytes for row in leave_parts(swap, parts, 0, "here")])
        come_parts(swap, list(parts), 0, "here")
    figures["copied_bytes"] = copied
    expect(copied == [[first.nbytes, 0], [0, 0]], "a part that is only read, or has no state, was copied", figures)
    expect(torch.equal(first.cpu(), kept[0]) and not second.any(), "a part that is only read changed", figures)
    for name in ("pinned_in_turn_bytes", "pinned_together_bytes"):
        expect(figures[name]["measured"] == figures[name]["planned"], "memory was pinned anew", figures)
    return figures


def stage_comes_back(setting: Setting, stage: int) -> Figures:
    """Training that leaves between steps, against training that stays."""
    from hybrid.roles.zero import load_deepspeed

    load_deepspeed()
    join(setting)
    torch.use_deterministic_algorithms(True, warn_only=True)
    figures: Figures = {}
    stayed = _train(setting, stage, None, figures)
    left = _train(setting, stage, new_swap(setting), figures)
    same = len(stayed) == len(left) and all(torch.equal(a, b) for a, b in zip(stayed, left))
    expect(same, "training that leaves between steps ends with other weights", figures)
    if setting.device == "cuda":
        for way in ("leave", "come"):
            share = figures[f"{way}_share_of_plain_copy"]
            expect(share >= LEAST_SHARE, f"to {way} is at {share:.0%} of a plain pinned copy's rate", figures)
    return figures


def _train(setting: Setting, stage: int, swap: StorageSwap | None, figures: Figures) -> list[torch.Tensor]:
    """Whole weights, and what this rank has of the optimizer, after a few steps; on the host."""
    from hybrid.roles.zero import TrainedModel, ZeroOptions

    options = ZeroOptions(stage, torch.bfloat16, (0.9, 0.95), 1e-8, 0.01, 1.0)
    model = TrainedModel(make_decoder(setting, torch.bfloat16), options)
    moves = []
    for step in range(STEPS):
        done = model.step([share_of_loss(setting, step)], LEARNING_RATE, lambda: None)
        expect(done.applied, f"step {step + 1} was not applied: a gradient is not finite", figures)
        if swap is not None:
            moves.append(_leave_and_come(model, swap, setting, figures))
    state = _weights(model) + [_on_host(entry) for entry in model.storages()["optimizer"]]
    if swap is not None and setting.device == "cuda":
        plain = dict(zip(("leave", "come"), plain_copy_rates(), strict=True))
        for way, rate in plain.items():
            # The first round pins memory.
            own = median(move[way] for move in moves[1:])
            figures |= {
                f"{way}_bytes_per_s": own,
                f"plain_{way}_bytes_per_s": rate,
                f"{way}_share_of_plain_copy": own / rate,
            }
    del model
    release_free_memory(setting.device)
    return state


def _weights(model) -> list[torch.Tensor]:
    from deepspeed.runtime.zero import GatheredParameters

    parameters = list(model.module.parameters())
    with GatheredParameters(parameters, modifier_rank=None, enabled=model.stage == 3):
        return [p.detach().cpu().clone() for p in parameters]


def _leave_and_come(model, swap: StorageSwap, setting: Setting, figures: Figures) -> dict[str, float]:
    model.drop_caches()
    storages = model.storages()
    kept = {part: [_on_host(entry) for entry in storages[part]] for part in ("weights", "optimizer")}
    parts = {name: Part(found, keep_bytes=name != "gradients") for name, found in storages.items()}
    left = leave_parts(swap, parts, setting.rank, "here")
    for row in left:
        figures[f"{row.part}_fell_bytes"] = beside(row.before_bytes - row.after_bytes, row.counted_bytes)
        fell = row.before_bytes - row.after_bytes
        expect(
            fell >= 0.9 * row.counted_bytes - 4 * MIB,
            f"{row.part}: memory fell by {fell} of {row.counted_bytes}",
            figures,
        )
    came = come_parts(swap, list(parts), setting.rank, "here")
    same = all(torch.equal(_on_host(e), k) for part, found in kept.items() for e, k in zip(storages[part], found))
    expect(same, "bytes came back changed", figures)
    return {
        way: sum(row.copied_bytes for row in rows) / max(1e-9, sum(row.seconds for row in rows if row.copied_bytes))
        for way, rows in (("leave", left), ("come", came))
    }


def _on_host(entry: NamedStorage) -> torch.Tensor:
    return as_tensor(entry.storage).cpu().clone()


def plain_copy_rates(nbytes: int = 2**30, rounds: int = 5) -> tuple[float, float]:
    """Bytes per second of one copy from the GPU to pinned memory, and back: the median round."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for out in (True, False):
            torch.cuda.synchronize()
            started = time.perf_counter()
            (host if out else device).copy_(device if out else host, non_blocking=True)
            torch.cuda.synchronize()
            seconds[out].append(time.perf_counter() - started)
    return nbytes / median(seconds[True]), nbytes / median(seconds[False])


SWAP = [
    Check(
        "swap/tensors",
        "Tensors and their views leave the device and come back bit by bit, whatever stream still works on them; its memory falls.",
        "Memory scheduling would corrupt weights here: do not train, and send the report.",
        tensors_come_back,
    ),
    Check(
        "swap/pinned",
        "Host memory is pinned once and shared by parts in turn; frozen models are copied out once.",
        "Moving would take more host memory than planned, or more time: send the report.",
        pinned_memory_is_kept,
        on_cpu=False,
    ),
    *(
        Check(
            f"swap/zero-{stage}",
            f"What DeepSpeed holds at ZeRO stage {stage} leaves and comes back bit by bit, and training does not notice; "
            "moving runs at the rate of a plain pinned copy.",
            f"Stage {stage} loses state when it leaves, or moves slower than this machine can: train with another stage, or with "
            "memory.policy=resident, and send the report.",
            partial(stage_comes_back, stage=stage),
            gpus=None,
            everywhere=True,
            deadline_s=600.0,
        )
        for stage in range(4)
    ),
]
