"""The tokens that end a response, as vLLM knows them."""

from __future__ import annotations

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from hybrid.algorithms.logprobs import EndMask
from hybrid.config import RunConfig, model_source


def end_mask(cfg: RunConfig, tokenizer: PreTrainedTokenizerBase) -> EndMask | None:
    """The tokens that engines cannot draw before `rollout.min_new_tokens`; None where that is 0."""
    if cfg.rollout.min_new_tokens == 0:
        return None
    path = str(model_source(cfg, cfg.model.path))
    return EndMask(cfg.rollout.min_new_tokens, end_token_ids(path, tokenizer, cfg.model.trust_remote_code))


def end_token_ids(path: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool = False) -> tuple[int, ...]:
    """End tokens of the tokenizer and of the model's generation config, or of its config where it has none, in ascending order.

    The set that vLLM stops at and masks (`SamplingParams.update_from_generation_config`, `ModelConfig.try_get_generation_config`).
    """
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        generation = GenerationConfig.from_model_config(
            AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        )
    found = generation.eos_token_id
    ids = {found} if isinstance(found, int) else set(found or ())
    return tuple(sorted(ids | ({tokenizer.eos_token_id} - {None})))
