"""`auto` and null become values. Pure but for looking at the machine; the same profile resolves alike on every node of
a kind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hybrid.config import machine
from hybrid.config.architectures import text_config
from hybrid.config.known_models import known_models
from hybrid.config.kv_cache import kv_token_bytes
from hybrid.config.paths import model_source, resolve_path
from hybrid.config.run import SECTIONS, RunConfig
from hybrid.config.sections import Critic, Reference, TrainedRole

LOGICAL_GPUS = 2
"""GPUs per node that a machine without GPUs stands in for."""
GPU_SHARE = 0.95
"""Of a GPU's memory, what a plan may fill: predictions have errors, and a run that does not fit ends hours later."""
KV_SHARE = 0.25
"""Share of a GPU's memory that `rollout.kv_cache: auto` takes where the model's config.json does not say what is useful."""
MICRO_BATCH_TOKENS = {"cuda": 16384, "cpu": 4096}
"""Where `train.micro_batch_tokens: auto` starts."""
TIER_SHARES = {"pinned": 0.8, "file": 0.9}
"""Share of a node's RAM, or of its free disk, that `memory.tier_bytes: auto` gives to what leaves."""


def resolve(cfg: RunConfig, run_dir: Path | None = None) -> RunConfig:
    """`cfg` with every `auto` replaced, defaults of other sections filled in, and paths that exist made absolute.

    `run_dir` becomes logging.runs_dir and logging.name; None: the folder that a run started now would get. What could
    not be had is left: 0 GPUs for the rules to report; `memory.device_bytes` and `tier_bytes`, and with them perhaps
    `rollout.kv_cache`, at auto for GPUs that are not here, which happens in dry runs and plans only. `rollout.kv_cache`
    and `train.micro_batch_tokens` are the most that is of use, optimizers are on the device and no heap is kept:
    `hybrid.planning` may choose anew. `notes` says what the user should know, `autos` which keys were auto.
    """
    wished = ["memory.keep_heap"] if cfg.memory.keep_heap is True else []
    autos = tuple(dict.fromkeys((*cfg.autos, *auto_keys(cfg), *wished)))
    run_dir = run_dir or default_run_dir(cfg)
    notes: list[str] = []
    cfg = _update(cfg, cluster=_cluster(cfg))
    cfg = _update(cfg, model=_model(cfg, notes), memory=_memory(cfg, run_dir), reward=_reward(cfg), data=_data(cfg))
    if cfg.uses_critic:
        critic = cfg.critic or Critic()
        path = model_source(cfg, critic.path) if critic.path else cfg.model.path
        cfg = cfg.model_copy(update={"critic": critic.model_copy(update={"path": path})})
        autos = tuple(dict.fromkeys((*autos, *auto_keys(cfg))))
        cfg = _update(cfg, critic={"optimizer": _optimizer(cfg.critic)})
    cfg = _update(cfg, actor={"optimizer": _optimizer(cfg.actor)})
    if cfg.uses_reference:
        reference = cfg.reference or Reference()
        path = model_source(cfg, reference.path) if reference.path else cfg.model.path
        cfg = cfg.model_copy(update={"reference": reference.model_copy(update={"path": path})})
    cfg = _update(cfg, train={"prompts_per_update": cfg.train.prompts_per_update or cfg.train.prompts_per_step})
    cfg = _update(cfg, train={"micro_batch_tokens": _micro_batch_tokens(cfg), "overlap_comm": _overlap_comm(cfg)})
    cfg = _update(cfg, rollout=_rollout(cfg))
    if cfg.rollout.kv_cache == "auto":
        cfg = _update(cfg, rollout={"kv_cache": _kv_cache(cfg)})
    if cfg.algorithm.correction != "none" and cfg.distribution_is_cut:
        notes.append(
            f"algorithm.correction={cfg.algorithm.correction} is biased here: rollout.top_p, top_k or min_p cut the distribution, and "
            "the sampler's log-probs are higher than the trainer's for the same tokens."
        )
    cfg = in_folder(cfg, run_dir)
    return cfg.model_copy(update={"notes": tuple(notes), "autos": autos})


def in_folder(cfg: RunConfig, run_dir: Path) -> RunConfig:
    """`cfg` as the run whose folder is `run_dir`."""
    return _update(cfg, logging={"runs_dir": str(run_dir.parent), "name": run_dir.name})


def auto_keys(cfg: RunConfig) -> list[str]:
    """Every `section.key` whose value is auto, for `resolve` to replace; memory.policy says how to plan."""
    sections = {name: getattr(cfg, name) for name in SECTIONS if getattr(cfg, name) is not None}
    keys = [f"{name}.{key}" for name, section in sections.items() for key, value in section if value == "auto"]
    return [key for key in keys if key != "memory.policy"]


def default_run_dir(cfg: RunConfig) -> Path:
    """Absolute folder of a run that starts now: `<runs_dir>/<name>`, the name being the profile's and the local
    time."""
    runs = Path(cfg.logging.runs_dir or "runs").expanduser().absolute()
    return runs / (cfg.logging.name or f"{cfg.profile.stem}-{time.strftime('%Y%m%d-%H%M%S')}")


def _update(cfg: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """`cfg` with some keys of some sections changed."""
    changed = {name: getattr(cfg, name).model_copy(update=keys) for name, keys in sections.items()}
    return cfg.model_copy(update=changed)


def _cluster(cfg: RunConfig) -> dict[str, Any]:
    cluster = cfg.cluster
    device = cluster.device
    if device == "auto":
        device = "cuda" if machine.visible_gpus() else "cpu"
    gpus = cluster.gpus_per_node
    if gpus == "auto":
        gpus = machine.visible_gpus() if device == "cuda" else LOGICAL_GPUS
    threads = cluster.threads_per_process
    if threads == "auto":
        threads = max(1, machine.cpu_cores() // max(1, gpus))
    bind = device == "cuda" if cluster.bind_numa == "auto" else cluster.bind_numa
    return {"device": device, "gpus_per_node": gpus, "threads_per_process": threads, "bind_numa": bind}


def _model(cfg: RunConfig, notes: list[str]) -> dict[str, Any]:
    on_cpu = cfg.cluster.device == "cpu"
    dtype = cfg.model.dtype
    if dtype == "auto":
        dtype = "bfloat16"
        if not (machine.cpu_has_bf16() if on_cpu else machine.gpu_has_bf16()):
            dtype = "float32"
            notes.append(f"This {'CPU' if on_cpu else 'GPU'} has no bf16: model.dtype is float32, twice the memory.")
    path, attention = model_source(cfg, cfg.model.path), cfg.model.attention
    if attention == "auto":
        attention = "sdpa" if on_cpu or dtype == "float32" or not machine.gpu_has_bf16() else _cuda_attention(path)
        if not on_cpu and attention == "sdpa":
            notes.append(
                "CUDA's attention kernels take bf16 only: model.attention is sdpa, slower on packed sequences."
            )
    return {"path": path, "dtype": dtype, "attention": attention}


def _cuda_attention(path: str) -> str:
    """model.attention of the model at `path` in bf16. Soft caps are in flash-attn only; a rule says so where it is missing."""
    has_caps = (model_config(path) or {}).get("attn_logit_softcapping") is not None
    return "flash_attention_2" if has_caps and machine.has_flash_attention() else "varlen"


def _memory(cfg: RunConfig, run_dir: Path) -> dict[str, Any]:
    on_cpu = cfg.cluster.device == "cpu"
    memory = cfg.memory
    size = memory.device_bytes
    if size == "auto" and on_cpu:
        size = int(0.8 * machine.ram_bytes() / cfg.cluster.gpus_per_node)
    elif size == "auto":
        size = int(GPU_SHARE * (machine.gpu_bytes() or 0)) or "auto"
    tier = memory.tier if memory.tier != "auto" else "file" if on_cpu else "pinned"
    swap_dir = Path(memory.swap_dir).expanduser().absolute() if memory.swap_dir else None
    room = memory.tier_bytes
    if room == "auto" and (on_cpu or machine.gpu_bytes()):
        room = int(
            TIER_SHARES[tier]
            * (machine.ram_bytes() if tier == "pinned" else machine.free_disk_bytes(swap_dir or run_dir))
        )
    return {
        "tier": tier,
        "swap_dir": str(swap_dir) if swap_dir else None,
        "device_bytes": size,
        "tier_bytes": room,
        "keep_heap": False,
    }


def _micro_batch_tokens(cfg: RunConfig) -> int:
    """Tokens of a rank's share of an update, all sequences at full length, up to MICRO_BATCH_TOKENS; at least one sequence."""
    if cfg.train.micro_batch_tokens != "auto":
        return cfg.train.micro_batch_tokens
    sequences = -(-cfg.train.prompts_per_update * cfg.rollout.samples_per_prompt // max(1, cfg.world_size))
    useful = min(MICRO_BATCH_TOKENS[cfg.cluster.device], sequences * cfg.max_sequence_tokens)
    return max(useful, cfg.max_sequence_tokens)


def _overlap_comm(cfg: RunConfig) -> bool:
    """On CPU there are no streams, and with one GPU nothing is exchanged."""
    given = cfg.train.overlap_comm
    return cfg.cluster.device == "cuda" and cfg.world_size > 1 if given == "auto" else given


def _optimizer(role: TrainedRole) -> str:
    return "device" if role.optimizer == "auto" else role.optimizer


def _reward(cfg: RunConfig) -> dict[str, Any]:
    return {
        "function": absolute_function(cfg, cfg.reward.function),
        "model": model_source(cfg, cfg.reward.model) if cfg.reward.model else None,
        "extra": {absolute_function(cfg, name): weight for name, weight in cfg.reward.extra.items()},
    }


def _data(cfg: RunConfig) -> dict[str, Any]:
    scorer = cfg.data.eval_function or cfg.reward.function
    return {
        "train": model_source(cfg, cfg.data.train),
        "eval": model_source(cfg, cfg.data.eval) if cfg.data.eval else None,
        "eval_function": absolute_function(cfg, scorer),
    }


def absolute_function(cfg: RunConfig, function: str | None) -> str | None:
    """`rewards.py:score` with the file's absolute path; built-in names and None as they are."""
    if function is None or ":" not in function:
        return function
    file, _, name = function.rpartition(":")
    return f"{resolve_path(cfg, file)}:{name}"


def _rollout(cfg: RunConfig) -> dict[str, Any]:
    on_cpu = cfg.cluster.device == "cpu"
    rollout = cfg.rollout
    engines = rollout.engines
    if engines == "auto":
        engines = max(1, cfg.world_size // rollout.tensor_parallel_size)
    bucket = rollout.weight_bucket
    return {
        "engines": engines,
        "repeatable": on_cpu if rollout.repeatable == "auto" else rollout.repeatable,
        "enforce_eager": on_cpu if rollout.enforce_eager == "auto" else rollout.enforce_eager,
        "weight_bucket": (256 * 2**20 if on_cpu else 2 * 2**30) if bucket == "auto" else bucket,
        "replay": str(resolve_path(cfg, rollout.replay)) if rollout.replay else None,
        "record": str(Path(rollout.record).expanduser().absolute()) if rollout.record else None,
    }


def _kv_cache(cfg: RunConfig) -> int | str:
    """Bytes per GPU for the sequences that an engine has at a time, in MiB steps; see KV_SHARE where that is not known."""
    most = kv_bytes(cfg, cfg.sequences_at_once(max(cfg.samples_per_step, cfg.data.eval_size)))
    if most is None and cfg.memory.device_bytes != "auto":
        most = int(KV_SHARE * cfg.memory.device_bytes)
    return "auto" if most is None else max(1, -(-most // 2**20)) * 2**20


def kv_bytes(cfg: RunConfig, sequences: int) -> int | None:
    """Bytes per GPU of the KV cache of `sequences` sequences at full length, with two spare blocks of 128 tokens each; None without a
    config.json at hand."""
    config = model_config(cfg.model.path)
    if config is None:
        return None
    element = 2 if cfg.model.dtype == "bfloat16" else 4
    per_token = kv_token_bytes(config, cfg.rollout.tensor_parallel_size, element)
    return per_token * sequences * (cfg.max_sequence_tokens + 256)


def model_config(path: str) -> dict[str, Any] | None:
    """The keys in config.json about the language model of a folder, with today's names of the keys, or what is known of a hub name; None
    for other hub names, or without a usual transformer's keys."""
    config = config_json(path)
    if config is None:
        return None
    config = text_config(config)
    usual = ("num_attention_heads", "hidden_size", "num_hidden_layers")
    return config if all(isinstance(config.get(key), int) and config[key] > 0 for key in usual) else None


def config_json(path: str) -> dict[str, Any] | None:
    """config.json of a model folder as it is, or what is known of a hub name; None where neither is here, or it is no JSON object."""
    file = Path(path) / "config.json"
    return json_object(file) if file.is_file() else known_models().get(path)


def json_object(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is none that can be read, which a rule reports where it matters."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
