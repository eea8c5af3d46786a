"""vLLM asleep and awake, and weights that reach it from the trainer."""

from __future__ import annotations

import multiprocessing
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.doctor.check import Check, Figures, Setting, beside, expect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hybrid.doctor.full.engine_process import EngineProcess
    from hybrid.rollout.requests import EngineOptions
    from hybrid.rollout.sender import Sender, WeightSource

MIB = 2**20
BOTH = ["weights", "kv_cache"]
BUCKET_BYTES = 2**31
ROUNDS = 3
WITHIN_S = 120


def _options(setting: Setting, model: Path) -> EngineOptions:
    from hybrid.rollout.requests import EngineOptions

    return EngineOptions(
        str(model),
        "bfloat16",
        setting.device,
        kv_cache_bytes=setting.size(1024 * MIB, 16 * MIB),
        max_model_len=256,
        max_num_seqs=16,
        tensor_parallel_size=setting.world,
        enforce_eager=setting.device == "cpu",
        gpu_ids=setting.gpus if setting.world > 1 else None,
    )


def _greedy(engine: EngineProcess) -> list[list[int]]:
    from hybrid.rollout.requests import GenerateRequest, SamplingOptions

    requests = [GenerateRequest(list(range(20 + i, 60 + i)), greedy=True) for i in range(8)]
    return [group[0].token_ids for group in engine.generate(requests, SamplingOptions(max_new_tokens=32))]


def _source(setting: Setting, model: Path) -> WeightSource:
    """The weights of `model` as an actor holds them; on several GPUs partitioned by ZeRO-3."""
    import torch

    from hybrid.roles.models import ModelOptions, load_policy
    from hybrid.roles.weights import WeightBuckets
    from hybrid.roles.zero import FrozenModel, load_deepspeed, load_partitioned

    stage = 3 if setting.world > 1 else 0
    load_deepspeed()
    device = setting.torch_device if stage == 0 else None
    options = ModelOptions(str(model), torch.bfloat16, "sdpa")
    policy = load_partitioned(stage, torch.bfloat16, lambda: load_policy(options, device))
    return WeightBuckets(FrozenModel(policy, stage, torch.bfloat16).module.hf, stage, BUCKET_BYTES)


def _sender(setting: Setting, engine: EngineProcess | None) -> Sender:
    from hybrid.rollout.sender import make_sender
    from hybrid.rollout.vllm_setup import BACKEND

    return make_sender(BACKEND[setting.device], setting.rank, [engine] if engine else [], BUCKET_BYTES)


def sleep_gives_memory_back(setting: Setting) -> Figures:
    """Rounds of sleep level 2, staged wake and sync; in the second another process allocates while the engine sleeps."""
    from hybrid.doctor.core.decoder import join
    from hybrid.doctor.full.engine_process import EngineProcess
    from hybrid.doctor.full.model import make_model

    model = make_model(setting, setting.folder / "model")
    join(setting)
    source = _source(setting, model)
    figures: Figures = {"asleep_bytes": []}
    with EngineProcess(_options(setting, model)) as engine:
        sender = _sender(setting, engine)
        tokens = _greedy(engine)
        for number in range(ROUNDS):
            if setting.device == "cuda":
                with _other_tenant(number == 1):
                    _sleep(engine, BOTH, figures)
                engine.come(["weights"])
                sender.send(source, number)
                engine.come(["kv_cache"])
            else:
                _sleep(engine, ["kv_cache"], figures)
                engine.come(["kv_cache"])
                sender.send(source, number)
            figures["asleep_bytes"].append(figures["held_asleep_bytes"])
            expect(_greedy(engine) == tokens, f"after round {number + 1} it generates other tokens", figures)
        if setting.device == "cuda":
            grown = figures["asleep_bytes"][-1] - figures["asleep_bytes"][0]
            expect(grown <= 32 * MIB, f"asleep it holds {grown / MIB:.0f} MiB more than in the first round", figures)
    return figures


def _sleep(engine: EngineProcess, parts: list[str], figures: Figures) -> None:
    from hybrid.memory.probe import device_bytes

    on_cuda = "weights" in parts
    before = device_bytes("cuda")[0] if on_cuda else 0
    rows = engine.leave(parts)
    counted = sum(row["counted_bytes"] for row in rows)
    fell = rows[0]["before_bytes"] - rows[-1]["after_bytes"]
    figures |= {"fell_bytes": beside(fell, counted), "held_asleep_bytes": rows[-1]["after_bytes"]}
    expect(fell >= 0.9 * counted, f"memory fell by {fell} bytes of {counted}", figures)
    if on_cuda:
        device_fell = before - device_bytes("cuda")[0]
        figures.setdefault("device_fell_bytes", beside(device_fell, counted))


@contextmanager
def _other_tenant(wanted: bool) -> Iterator[None]:
    """Another process that opens its context and takes memory inside, where `wanted`."""
    if not wanted:
        yield
        return
    context = multiprocessing.get_context("spawn")
    started, ended = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(2048 * MIB, started, ended))
    other.start()
    try:
        yield
        expect(started.wait(WITHIN_S), "another process did not get its memory", {})
    finally:
        ended.set()
        other.join(WITHIN_S)
        other.kill()


def _hold(size: int, started, ended) -> None:
    import torch

    block = torch.ones(size, dtype=torch.uint8, device="cuda")
    started.set()
    ended.wait(WITHIN_S)
    del block


def sync_is_exact(setting: Setting, tied: bool) -> Figures:
    """Hashes of the engine's tensors as loaded, and after its weights were lost and sent anew, several times."""
    import torch
    import torch.distributed as dist

    from hybrid.doctor.core.decoder import join
    from hybrid.doctor.full.model import make_model
    from hybrid.memory.probe import measured_bytes, release_free_memory

    join(setting)
    model = setting.folder / "model"
    if setting.rank == 0:
        make_model(setting, model, tied)
    meet = dist.new_group(backend="gloo")
    dist.barrier(meet)
    source = _source(setting, model)
    figures: Figures = {"trainer_bytes": []}
    with _on_first_rank(setting, model) as engine:
        dist.barrier(meet)
        sender = _sender(setting, engine)
        if engine:
            loaded, tokens = engine.checksums(), _greedy(engine)
            _lose_weights(setting, engine)
            if setting.device == "cpu":
                expect(engine.checksums() != loaded, "weights set to zero have the hashes of those loaded", figures)
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in source.names_shapes()]
        for version in range(1, ROUNDS + 1):
            before = _restart_peak(setting)
            sender.send(source, version)
            if setting.device == "cuda":
                peak = torch.cuda.max_memory_allocated() - before
                figures["buffer_bytes"] = beside(peak, min(BUCKET_BYTES, sum(sizes)))
            release_free_memory(setting.device)
            figures["trainer_bytes"].append(measured_bytes(setting.device))
        if engine:
            if setting.device == "cuda":
                engine.come(["kv_cache"])
            sent = engine.checksums()
            figures |= {"tensors": len(loaded), "gpus": setting.world}
            other = sorted(name for name in loaded if sent.get(name) != loaded[name])
            expect(not other, f"{len(other)} tensors differ, such as {', '.join(other[:2])}", figures)
            expect(_greedy(engine) == tokens, "it generates other tokens", figures)
        if setting.device == "cuda":
            # ZeRO-3 gathers a bucket beside the buffer.
            most = (1.1 if setting.world == 1 else 2.2) * figures["buffer_bytes"]["planned"] + 8 * MIB
            expect(figures["buffer_bytes"]["measured"] <= most, "a sync takes more than a bucket or the model", figures)
            held = figures["trainer_bytes"]
            expect(held[-1] <= held[0] + 2 * MIB, "the trainer holds more after each sync", figures)
        dist.barrier(meet)
    return figures


@contextmanager
def _on_first_rank(setting: Setting, model: Path) -> Iterator[EngineProcess | None]:
    from hybrid.doctor.full.engine_process import EngineProcess

    if setting.rank > 0:
        yield None
        return
    with EngineProcess(_options(setting, model)) as engine:
        yield engine


def _restart_peak(setting: Setting) -> int:
    """Bytes that are allocated now, from which the next peak is told; 0 on a CPU."""
    import torch

    if setting.device == "cpu":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _lose_weights(setting: Setting, engine: EngineProcess) -> None:
    if setting.device == "cuda":
        engine.leave(BOTH)
        engine.come(["weights"])
    else:
        engine.zero_weights()


ENGINE = [
    Check(
        "engine/sleep",
        "Asleep at level 2 an engine gives its weights and KV cache back to the GPU, whatever other processes do meanwhile; after a staged "
        "wake and a sync it generates the same tokens.",
        "Engines would keep memory that trainers were promised, or generate from garbage: use memory.policy=resident, and send the report.",
        sleep_gives_memory_back,
        part="full",
        process_role="actor",
        deadline_s=900.0,
    ),
    *(
        Check(
            name,
            f"Weights sent from the trainer reach an engine bit by bit{beyond}.",
            "Engines would sample from other weights than those that are trained: do not train, and send the report.",
            partial(sync_is_exact, tied=tied),
            part="full",
            gpus=gpus,
            everywhere=True,
            least_gpus=gpus,
            process_role="actor",
            deadline_s=900.0,
        )
        for name, tied, gpus, beyond in (
            ("sync/plain", False, 1, ""),
            ("sync/tied", True, 1, ", where the head is tied to the embeddings"),
            ("sync/tp2", True, 2, ", from ZeRO-3 on two GPUs to one engine over both, with a tied head"),
        )
    ),
]
