"""What an engine is told and what it answers: plain data, importable without vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

BLOCK_TOKENS = {"cpu": 32, "cuda": 16}
"""Tokens of a KV-cache block by device: vLLM's own on CUDA, on CPU the least that its attention runs well on. Samples of a prompt share its
whole blocks: with vLLM's own 128 most prompts on CPU have few or none, and are encoded anew for every sample."""


@dataclass(frozen=True)
class EngineOptions:
    """How one engine is built."""

    model_path: str
    """Hugging Face folder (or cached hub name) with safetensors weights."""
    dtype: str
    """bfloat16 or float32: the dtype the trainer computes with, else their log-probs part."""
    device: str
    """cpu or cuda."""
    kv_cache_bytes: int
    """Bytes of KV cache on each GPU of the engine."""
    max_model_len: int
    """Prompt and response together, in tokens."""
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    """Sequences generated at the same time."""
    enforce_eager: bool = True
    """No CUDA graphs and no compilation."""
    custom_all_reduce: bool = True
    """Let vLLM's own all-reduce add up what the GPUs of an engine computed."""
    seed: int = 0
    threads: int = 1
    """CPU threads of each worker process."""
    gpu_ids: tuple[str, ...] | None = None
    """The engine's GPUs on its node; used on CUDA when it spans several, else Ray has set the one."""
    trust_remote_code: bool = False
    left_out: tuple[str, ...] = ()
    """Names of tensors of the checkpoint that are no part of the model; see `checkpoint_names.unused_tensors`."""
    trace_dir: str | None = None
    """Folder through which vLLM hands over torch's record of a step; None where none will be asked for."""


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn. Temperature 0 is greedy and ignores the rest; top_k 0, top_p 1 and min_p 0 are off."""

    max_new_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = field(default_factory=tuple)
    keep_special_tokens: bool = False
    """Special tokens, but for the end token, stay in the text."""

    def greedy(self) -> SamplingOptions:
        """One response of the likeliest tokens, of the same lengths and stops."""
        return replace(self, n=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt. `seed` fixes the draws of its n responses, whatever else is in the batch. `greedy`: one greedy response in place of n
    draws."""

    token_ids: list[int]
    seed: int | None = None
    greedy: bool = False


@dataclass(frozen=True)
class Completion:
    """One response."""

    token_ids: list[int]
    """As sampled, with the end token when the model produced one."""
    logprobs: list[float]
    """Of each token under the distribution it was drawn from: after temperature, top_k, top_p and min_p."""
    text: str
    """Without the end token, and without other special tokens unless they were asked for."""
    finish_reason: str
    """"stop" (end token or stop string) or "length"."""
    weight_version: int

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def tokens_held_at_most(lengths: list[int], max_num_seqs: int) -> int:
    """Tokens in the KV cache at most, for sequences of `lengths` tokens (prompt and response): the `max_num_seqs` longest together, none
    sharing a prefix. vLLM keeps no high-water mark of its own.
    """
    return sum(sorted(lengths, reverse=True)[:max_num_seqs])
