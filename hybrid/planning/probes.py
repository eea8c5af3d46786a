"""Processes of a run, started as a run starts them, to see what they take and how fast they move."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

import torch

from hybrid.config import RunConfig, machine
from hybrid.memory.probe import process_bytes
from hybrid.memory.swap import Part, come_parts, leave_parts
from hybrid.planning.facts import CALL_S, ProcessBytes
from hybrid.pool import Pool, open_pool
from hybrid.roles.actor import ActorWorker
from hybrid.roles.group import RoleGroup
from hybrid.roles.models import ModelOptions
from hybrid.roles.packing import Row
from hybrid.roles.zero import ZeroOptions
from hybrid.rollout.engine import Engine
from hybrid.rollout.requests import EngineOptions, GenerateRequest, SamplingOptions

KV_BYTES = 64 * 2**20
PROMPT = [[1] * 32]
MOVED_TENSORS, MOVED_BYTES, ROUNDS = 32, 8 * 2**20, 5
"""What each rank moves, and how often: tensors of a small model's size."""
PAUSE_S = 4.0
"""Between leaving and coming, as in a run: hypervisors take free pages back after seconds, and new ones cost more."""


class ProbeRole(ActorWorker):
    """A rank that says what its process takes, and has memory to move."""

    def overhead(self, device_before: int) -> dict[str, int]:
        """Bytes beside the parts of the model: see `_overhead`."""
        return _overhead(self.device.type, sum(self.count().values()), device_before)

    def hold(self, tensors: int, nbytes: int) -> None:
        """Take memory for `move`."""
        self.held = [torch.ones(nbytes, dtype=torch.uint8, device=self.device) for _ in range(tensors)]

    def move(self, kind: str) -> None:
        """Let what is held "leave" or "come", as a part of a role does."""
        if kind == "leave":
            named = [(f"held {number}", tensor.untyped_storage()) for number, tensor in enumerate(self.held)]
            leave_parts(self.swap, {"held": Part(named)}, self.rank, self.node)
        else:
            come_parts(self.swap, ["held"], self.rank, self.node)


class ProbeEngine(Engine):
    """An engine that says what its process takes."""

    def overhead(self, device_before: int) -> dict[str, int]:
        """Bytes beside weights and KV cache: see `_overhead`."""
        return _overhead(self.options.device, sum(self._counted_bytes().values()), device_before)


def _overhead(device: str, counted: int, device_before: int) -> dict[str, int]:
    """CPU: private and shared bytes of this process without what is counted. CUDA: how much more of the GPU is in use than before."""
    if device == "cuda":
        from hybrid.memory.probe import device_used_bytes

        return {"private": max(0, device_used_bytes() - device_before - counted), "shared": 0}
    found = process_bytes(os.getpid(), children=True)
    return {"private": max(0, found.private - counted), "shared": found.rss - found.private}


def measure_processes(
    cfg: RunConfig, folder: Path, timeout_s: float
) -> tuple[ProcessBytes, ProcessBytes, float, float]:
    """(role, engine, leaving, coming), as `cfg` runs them on this node, with tiny models; one after the other is warmed up by a pass. The
    last two in bytes per second of a rank while all ranks move, through a tier in `folder`."""
    model = make_probe_model(folder / "model", cfg.model.path, cfg.model.trust_remote_code)
    gpus = cfg.cluster.gpus_per_node
    pool = open_pool(
        num_nodes=1,
        gpus_per_node=gpus,
        processes_per_bundle=2,
        device=cfg.cluster.device,
        log_dir=folder / "logs",
        timeout_s=cfg.cluster.start_timeout_s,
        dashboard=False,
        bind_numa=cfg.cluster.bind_numa,
    )
    before = _device_used(cfg)
    try:
        group = _start_role(pool, cfg, model, folder, timeout_s)
        role = _measure_role(group, before)
        return role, _measure_engine(pool, cfg, model, timeout_s), *_measure_tier(group)
    finally:
        pool.stop()


def _start_role(pool: Pool, cfg: RunConfig, model: Path, folder: Path, timeout_s: float) -> RoleGroup:
    threads = cfg.cluster.threads_per_process
    group = RoleGroup(
        pool, "actor", ProbeRole, ("weights",), timeout_s,
        env={"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        device=cfg.cluster.device, threads=threads, tier=cfg.memory.tier, swap_dir=str(folder / "swap"),
    )  # fmt: skip
    dtype = getattr(torch, cfg.model.dtype)
    group.load(
        ModelOptions(str(model), dtype, cfg.model.attention),
        ZeroOptions(2, dtype, (0.9, 0.95), 1e-8, 0.0, 1.0),
    )
    return group


def _measure_role(group: RoleGroup, device_before: int) -> ProcessBytes:
    group.call("logprobs", [[Row(0, PROMPT[0], PROMPT[0])]], 1.0)
    rows = group.call("overhead", device_before)
    return ProcessBytes(*(max(row[name] for row in rows) for name in ("private", "shared")))


def _measure_tier(group: RoleGroup) -> tuple[float, float]:
    """The median round, the first left out; a pass before each, for in a run caches hold other things."""
    group.call("hold", MOVED_TENSORS, MOVED_BYTES)
    seconds: dict[str, list[float]] = {"leave": [], "come": []}
    for _ in range(ROUNDS + 1):
        group.call("logprobs", [[Row(0, PROMPT[0], PROMPT[0])]], 1.0)
        seconds["leave"].append(_timed_move(group, "leave"))
        time.sleep(PAUSE_S)
        seconds["come"].append(_timed_move(group, "come"))
    leave, come = (MOVED_TENSORS * MOVED_BYTES / max(median(rounds[1:]) - CALL_S, 1e-3) for rounds in seconds.values())
    return leave, come


def _timed_move(group: RoleGroup, kind: str) -> float:
    started = time.perf_counter()
    group.call("move", kind)
    return time.perf_counter() - started


def _measure_engine(pool: Pool, cfg: RunConfig, model: Path, timeout_s: float) -> ProcessBytes:
    before = _device_used(cfg)
    options = EngineOptions(
        model_path=str(model),
        dtype=cfg.model.dtype,
        device=cfg.cluster.device,
        kv_cache_bytes=KV_BYTES,
        max_model_len=256,
        threads=cfg.cluster.threads_per_process,
        enforce_eager=True,
    )
    env = {"OMP_NUM_THREADS": str(options.threads)}
    worker = pool.spawn(ProbeEngine, role="rollout", rank=0, bundle=pool.bundles[0], env=env, args=(options,))
    pool.wait([worker.submit("start")], "starting the engine", timeout_s)
    request = [GenerateRequest(PROMPT[0])]
    pool.wait([worker.submit("generate", request, SamplingOptions(max_new_tokens=8))], "generate", timeout_s)
    return ProcessBytes(**pool.wait([worker.submit("overhead", before)], "overhead", timeout_s)[0])


def _device_used(cfg: RunConfig) -> int:
    """Bytes in use on the first visible GPU now, whoever uses them; 0 on CPU."""
    return 0 if cfg.cluster.device == "cpu" else machine.gpu_used_bytes()


def make_probe_model(folder: Path, tokenizer_of: str, trust_remote_code: bool) -> Path:
    """A causal LM of few parameters for the tokenizer of `tokenizer_of`, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hybrid.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_of, trust_remote_code)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
