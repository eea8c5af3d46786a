"""Processes of a run, started as a run starts them, to see what they take and how fast they move."""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from hybrid.config import RunConfig, machine
from hybrid.memory.probe import process_bytes
from hybrid.memory.swap import Part, come_parts, leave_parts
from hybrid.planning.facts import CALL_S, ProcessBytes
from hybrid.planning.shapes import read_config
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

    def device_used(self) -> int:
        """Bytes of this rank's GPU in use by anybody; 0 on CPU. Opens no context."""
        return _device_used(self.device.type)

    def communicator(self) -> int:
        """Bytes of this rank's GPU that a process group takes with its first collective on the GPU; 0 for one rank and on CPU."""
        if self.device.type == "cpu" or self.world_size == 1:
            return 0
        group = dist.new_group(backend="nccl")
        before = self.device_used()
        dist.all_reduce(torch.ones(1, device=self.device), group=group)
        torch.cuda.synchronize()
        taken = self.device_used() - before
        dist.destroy_process_group(group)
        return max(0, taken)

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

    def device_used(self) -> int:
        """As `ProbeRole.device_used`."""
        return _device_used(self.options.device)

    def overhead(self, device_before: int) -> dict[str, int]:
        """Bytes beside weights and KV cache: see `_overhead`."""
        return _overhead(self.options.device, sum(self._counted_bytes().values()), device_before)


def _device_used(device: str) -> int:
    """Bytes in use, by anybody, on the GPU that this process sees; 0 on CPU."""
    return 0 if device == "cpu" else machine.gpu_used_bytes()


def _overhead(device: str, counted: int, device_before: int) -> dict[str, int]:
    """CPU: private and shared bytes of this process without what is counted. CUDA: how much more of the GPU is in use than before."""
    if device == "cuda":
        return {"private": max(0, _device_used(device) - device_before - counted), "shared": 0}
    found = process_bytes(os.getpid(), children=True)
    return {"private": max(0, found.private - counted), "shared": found.rss - found.private}


class Measured(NamedTuple):
    """See `Calibration`; rates are of a rank while all ranks move."""

    role: ProcessBytes
    engine: ProcessBytes
    leave_bytes_per_s: float
    come_bytes_per_s: float
    communicator: int
    graphs: int


def measure_processes(cfg: RunConfig, folder: Path, timeout_s: float) -> Measured:
    """Role and engine as `cfg` runs them on this node, with tiny models, each after a pass. Moves go through a tier in `folder`. On CUDA
    further what a process group takes, and an engine's graphs."""
    on_cuda = cfg.cluster.device == "cuda"
    small = make_probe_model(folder / "model", cfg.model.path, cfg.model.trust_remote_code)
    pool = open_pool(
        num_nodes=1,
        gpus_per_node=cfg.cluster.gpus_per_node,
        processes_per_bundle=3 if on_cuda else 2,
        device=cfg.cluster.device,
        log_dir=folder / "logs",
        timeout_s=cfg.cluster.start_timeout_s,
        dashboard=False,
        bind_numa=cfg.cluster.bind_numa,
    )
    try:
        group = _role_group(pool, cfg, folder, timeout_s)
        role, communicator = _measure_role(group, small, cfg)
        if not on_cuda:
            return Measured(
                role, _measure_engine(pool, cfg, small, 0, timeout_s), *_measure_tier(group), communicator, 0
            )
        layers = read_config(cfg.model.path, cfg.model.trust_remote_code).get_text_config().num_hidden_layers
        deep = make_probe_model(folder / "deep", cfg.model.path, cfg.model.trust_remote_code, layers)
        eager = _measure_engine(pool, cfg, deep, 0, timeout_s)
        with_graphs = eager if cfg.rollout.enforce_eager else _measure_engine(pool, cfg, deep, 1, timeout_s, False)
        graphs = max(0, with_graphs.private - eager.private)
        return Measured(role, eager, *_measure_tier(group), communicator, graphs)
    finally:
        pool.stop()


def _role_group(pool: Pool, cfg: RunConfig, folder: Path, timeout_s: float) -> RoleGroup:
    threads = cfg.cluster.threads_per_process
    return RoleGroup(
        pool, "actor", ProbeRole, ("weights",), timeout_s,
        env={"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        device=cfg.cluster.device, threads=threads, tier=cfg.memory.tier, swap_dir=str(folder / "swap"),
    )  # fmt: skip


def _measure_role(group: RoleGroup, model: Path, cfg: RunConfig) -> tuple[ProcessBytes, int]:
    """The rank that takes most, without its communicator, and the largest communicator."""
    before = group.call("device_used")  # each rank looks at its own GPU
    dtype = getattr(torch, cfg.model.dtype)
    group.load(
        ModelOptions(str(model), dtype, cfg.model.attention),
        ZeroOptions(2, dtype, (0.9, 0.95), 1e-8, 0.0, 1.0),
    )
    group.call("logprobs", [[Row(0, PROMPT[0], PROMPT[0])]], 1.0)
    rows = group.call_sharded("overhead", before)
    communicator = max(group.call("communicator"))
    private, shared = (max(row[name] for row in rows) for name in ("private", "shared"))
    return ProcessBytes(max(0, private - communicator), shared), communicator


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


def _measure_engine(
    pool: Pool, cfg: RunConfig, model: Path, rank: int, timeout_s: float, enforce_eager: bool = True
) -> ProcessBytes:
    options = EngineOptions(
        model_path=str(model),
        dtype=cfg.model.dtype,
        device=cfg.cluster.device,
        kv_cache_bytes=KV_BYTES,
        max_model_len=256,
        threads=cfg.cluster.threads_per_process,
        enforce_eager=enforce_eager,
    )
    env = {"OMP_NUM_THREADS": str(options.threads)}
    worker = pool.spawn(ProbeEngine, role="rollout", rank=rank, bundle=pool.bundles[0], env=env, args=(options,))
    (before,) = pool.wait([worker.submit("device_used")], "device_used", timeout_s)
    pool.wait([worker.submit("start")], "starting the engine", timeout_s)
    request = [GenerateRequest(PROMPT[0])]
    pool.wait([worker.submit("generate", request, SamplingOptions(max_new_tokens=8))], "generate", timeout_s)
    return ProcessBytes(**pool.wait([worker.submit("overhead", before)], "overhead", timeout_s)[0])


def make_probe_model(folder: Path, tokenizer_of: str, trust_remote_code: bool, layers: int = 2) -> Path:
    """A causal LM of few parameters for the tokenizer of `tokenizer_of`, with random weights. CUDA graphs grow with the number of kernels,
    and those with `layers`, however narrow."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hybrid.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_of, trust_remote_code)
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
