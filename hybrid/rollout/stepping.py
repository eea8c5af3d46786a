"""Driving vLLM step by step: what `LLM.generate` does, but each request is told of as soon as it is finished."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hybrid.errors import RolloutError
from hybrid.rollout.requests import Completion
from hybrid.rollout.texts import response_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from vllm import LLM

MAX_SETTLING_STEPS = 16

Finished = tuple[int, list[Completion]]
"""Number of a request in its batch, and its completions."""


def finished(
    llm: LLM, names: list[str], version: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[list[Finished]]:
    """Step until the requests `names`, as `LLM.enqueue` called them, have ended; whenever some have, those. `tokenizer` makes their texts;
    None where vLLM did.

    All of them have ended also when this raises: `RolloutError` for a response that is broken, by weights of `version`.
    """
    numbers = {
        name.split("-")[0]: i for i, name in enumerate(names)
    }  # outputs lack what vLLM adds to a request's number
    engine = llm.llm_engine
    try:
        while engine.has_unfinished_requests():
            done = [output for output in engine.step() if output.finished]
            if done:
                yield [
                    (numbers[o.request_id], [_completion(c, version, o, tokenizer) for c in o.outputs]) for o in done
                ]
    except Exception:
        engine.abort_request(names, internal=True)
        raise


def settle(llm: LLM) -> None:
    """Step until vLLM's workers know of the requests that finished last: it tells them with the next batch only, and until then takes
    itself for busy and refuses to give up its KV cache.
    """
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(MAX_SETTLING_STEPS):
        if not core.scheduler.has_requests() and not core.batch_queue:
            return
        llm.llm_engine.step()
    raise RolloutError(f"vLLM still has requests {MAX_SETTLING_STEPS} steps after the last response.")


def _completion(output: Any, version: int, request: Any, tokenizer: PreTrainedTokenizerBase | None) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise RolloutError(f"vLLM ended a response with `{output.finish_reason}` after {len(output.token_ids)} tokens.")
    ids = list(output.token_ids)
    logprobs = [at[token].logprob for token, at in zip(ids, output.logprobs, strict=True)]
    if not math.isfinite(sum(logprobs)):
        raise RolloutError(f"A log-prob is not finite: weights of version {version} are broken, or the KV cache is.")
    text = output.text
    if tokenizer is not None:  # no text ends a response then, so one that stopped has its end token
        text = response_text(tokenizer, request.prompt_token_ids, ids, output.finish_reason == "stop")
    return Completion(ids, logprobs, text, output.finish_reason, version)
