"""Processes of a run, started as a run starts them, to see what they take."""

from __future__ import annotations

import os
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.memory.probe import process_bytes
from hybrid.planning.facts import ProcessBytes
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


class ProbeRole(ActorWorker):
    """A rank that says what its process takes."""

    def overhead(self, device_before: int) -> dict[str, int]:
        """Bytes beside the parts of the model: see `_overhead`."""
        return _overhead(self.device.type, sum(self.count().values()), device_before)


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


def measure_processes(cfg: RunConfig, folder: Path, timeout_s: float) -> tuple[ProcessBytes, ProcessBytes]:
    """(role, engine), as `cfg` runs them on this node, with tiny models; one after the other is warmed up by a pass."""
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
    )
    try:
        role = _measure_role(pool, cfg, model, folder, timeout_s)
        return role, _measure_engine(pool, cfg, model, timeout_s)
    finally:
        pool.stop()


def _measure_role(pool: Pool, cfg: RunConfig, model: Path, folder: Path, timeout_s: float) -> ProcessBytes:
    import torch

    before = _device_used(cfg)
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
    group.call("logprobs", [[Row(0, PROMPT[0], PROMPT[0])]], 1.0)
    rows = group.call("overhead", before)
    return ProcessBytes(*(max(row[name] for row in rows) for name in ("private", "shared")))


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
    """Bytes in use on the first GPU now, whoever uses them; 0 on CPU."""
    if cfg.cluster.device == "cpu":
        return 0
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def make_probe_model(folder: Path, tokenizer_of: str, trust_remote_code: bool) -> Path:
    """A causal LM of few parameters for the tokenizer of `tokenizer_of`, with random weights."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of, trust_remote_code=trust_remote_code)
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
