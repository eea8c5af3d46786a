"""Rules about the models that a profile names: each trains exactly, or is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid.config import machine
from hybrid.config.architectures import ANOTHER, NOT_ON_CPU, kernel_refusal, refusal
from hybrid.config.resolve import config_json, model_config
from hybrid.config.rules import Finding, rule
from hybrid.config.run import RunConfig

FLASH_KERNELS = ("varlen", "flash_attention_2")
"""Values of model.attention whose kernels run on some GPUs only, and in bf16 only."""


@rule("model.path", "rollout.max_new_tokens", "data.max_prompt_tokens")
def policies_train_exactly(cfg: RunConfig) -> Finding | None:
    return _exact(cfg, "model.path", cfg.model.path, cfg.uses_engines)


@rule("critic", "reference", "model.path", "rollout.max_new_tokens", "data.max_prompt_tokens")
def other_packed_models_are_exact(cfg: RunConfig) -> Iterable[Finding]:
    for key, path in _other_paths(cfg).items():
        if path and path != cfg.model.path and (found := _exact(cfg, key, path, sampled=False)):
            yield found


def _other_paths(cfg: RunConfig) -> dict[str, str | None]:
    """Models that the run packs rows for, beside its policy, by their keys."""
    return {
        "critic.path": cfg.critic.path if cfg.uses_critic and cfg.critic else None,
        "reference.path": cfg.reference.path if cfg.uses_reference and cfg.reference else None,
    }


def _exact(cfg: RunConfig, key: str, path: str, sampled: bool) -> Finding | None:
    config = config_json(path)
    if config is None or not isinstance(config.get("model_type"), str):
        return None  # other rules say so
    found = refusal(config, cfg.max_sequence_tokens, sampled)
    return found and (f"{key}: {path} is invalid: {found.why}", found.fix)


@rule("model.path", "model.attention", "cluster.device", "critic", "reference")
def kernels_compute_the_attention(cfg: RunConfig) -> Finding | None:
    for key, path in {"model.path": cfg.model.path, **_other_paths(cfg)}.items():
        config = config_json(path) if path else None
        if config and (found := kernel_refusal(config, cfg.model.attention, cfg.cluster.device)):
            return f"{key}: {path} is invalid: {found.why}", found.fix
    return None


@rule("model.attention", "cluster.device")
def flash_kernels_need_cuda(cfg: RunConfig) -> Finding | None:
    if cfg.model.attention in FLASH_KERNELS and cfg.cluster.device == "cpu":
        return f"model.attention {cfg.model.attention} with cluster.device cpu", "Set model.attention to auto or sdpa."


@rule("model.attention", "model.dtype")
def flash_kernels_need_bf16(cfg: RunConfig) -> Finding | None:
    if cfg.model.attention in FLASH_KERNELS and cfg.model.dtype == "float32":
        return f"model.attention {cfg.model.attention} with model.dtype float32: it computes in bf16 only", (
            "Set model.attention=sdpa or model.dtype=bfloat16."
        )


@rule("model.attention", "cluster.device", "cluster.address")
def flash_kernels_need_ampere(cfg: RunConfig) -> Finding | None:
    here = cfg.cluster.device == "cuda" and cfg.cluster.address is None
    if cfg.model.attention in FLASH_KERNELS and here and not machine.gpu_has_bf16():
        return (
            f"model.attention: {cfg.model.attention} is invalid: its kernel needs a GPU of compute capability 8.0 (Ampere) or more",
            "Set model.attention=sdpa.",
        )


@rule("model.path", "model.dtype", "cluster.device")
def latent_attention_on_cpu_is_bf16(cfg: RunConfig) -> Finding | None:
    config = model_config(cfg.model.path) or {}
    if config.get("kv_lora_rank") and cfg.model.dtype == "float32" and cfg.cluster.device == "cpu" and cfg.uses_engines:
        return (
            f"model.dtype: float32 is invalid: vLLM computes the latent attention (kv_lora_rank) of {cfg.model.path} in bf16 only on CPU",
            "Set model.dtype=bfloat16.",
        )


@rule("model.path", "cluster.device")
def vllm_on_cpu_runs_the_model(cfg: RunConfig) -> Finding | None:
    found = NOT_ON_CPU.get(str((config_json(cfg.model.path) or {}).get("model_type")))
    if found and cfg.cluster.device == "cpu" and cfg.uses_engines:
        return f"model.path: {cfg.model.path} is invalid: vLLM on CPU {found}", ANOTHER


@rule("model.path", "rollout.tensor_parallel_size")
def engines_split_keys_and_values(cfg: RunConfig) -> Finding | None:
    config, tp = model_config(cfg.model.path), cfg.rollout.tensor_parallel_size
    heads = config and (config.get("num_key_value_heads") or config["num_attention_heads"])
    if not heads or config["num_attention_heads"] % tp or config.get("kv_lora_rank"):
        return None
    if heads % tp and tp % heads:
        return (
            f"rollout.tensor_parallel_size: {tp} is invalid: {cfg.model.path} has {heads} heads of keys and values, and neither number "
            "divides the other",
            f"Use 1, or a divisor or a multiple of {heads}.",
        )
