"""One vLLM engine in a process of its own, behind the few calls that the trainer needs.

The engine keeps a state of its own beside vLLM's: which parts are on the device, which weights are in it and whether they are whole. vLLM
answers an illegal move with a log line and goes on, and generates from missing weights without a word; here both are errors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from hybrid.config.paths import local_model
from hybrid.errors import RolloutError
from hybrid.garbage import resume_gc
from hybrid.memory.probe import PeakSampler, held_and_shared, process_bytes
from hybrid.rollout import vllm_setup
from hybrid.rollout.checkpoint_names import HEADS, check_bucket, check_complete, checkpoint_shapes
from hybrid.rollout.requests import Completion, EngineOptions, GenerateRequest, SamplingOptions, tokens_held_at_most
from hybrid.rollout.residency import MOVABLE, PARTS, check_come, check_leave, moved_rows
from hybrid.rollout.stepping import Finished, finished, settle
from hybrid.rollout.texts import decodes_at_end
from hybrid.rollout.traces import take_traces
from hybrid.telemetry.torch_trace import OpTrace


class Engine:
    """Made cheaply in its process, started by `start`, driven by one caller at a time."""

    def __init__(self, options: EngineOptions):
        self.options = options
        self.resident: set[str] = set()
        self.weight_version: int | None = None
        """Version of the weights in the engine, 0 after loading; None while they are missing or incomplete."""
        self._received: set[str] | None = None
        """Names that the open weight update has brought; None when none is open."""
        self._unused: set[str] = set()
        """Names in the checkpoint that vLLM does not load."""
        self._whole = False
        """Every weight of the model is in the engine, all from the same source."""
        self._kv_cache_share: float | None = None
        """Tokens of the last `generate` over those that fit in the KV cache; None when it was told."""

    def start(self) -> dict[str, Any]:
        """Load the model, without what is no part of it, and allocate the KV cache. Returns `stats()`. Raises `RolloutError` when vLLM
        refuses the options."""
        os.environ.update(vllm_setup.environment(self.options))
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only, and it would override our bytes
        try:
            with vllm_setup.without_strays(self.options.model_path) as folder:
                self.llm = vllm_setup.build(self.options, folder)
        except Exception as error:  # vLLM raises whatever its models raise
            said = f"{'' if isinstance(error, ValueError) else type(error).__name__ + ': '}{error}"
            hint = vllm_setup.foreign_variables(self.options, os.environ)
            raise RolloutError(f"vLLM refuses to start with {self.options}: {said}{hint}") from error
        self._expected = checkpoint_shapes(local_model(self.options.model_path), self.options.left_out)
        self.resident, self.weight_version, self._whole = set(PARTS), 0, True
        self._peak = PeakSampler("cpu", children=True)
        resume_gc()
        vllm_setup.give_back(self.llm, self.options.device)
        return self.stats()

    def generate(
        self,
        requests: list[GenerateRequest],
        sampling: SamplingOptions,
        required_version: int | None = None,
        seed: int | None = None,
    ) -> list[list[Completion]]:
        """`sampling.n` completions of each request, one of a greedy one, in order, from one pass over all of them; see `stream`."""
        portions = self.stream(requests, sampling, required_version, seed)
        completions = dict(pair for portion in portions for pair in portion)
        return [completions[i] for i in range(len(requests))]

    def stream(
        self,
        requests: list[GenerateRequest],
        sampling: SamplingOptions,
        required_version: int | None = None,
        seed: int | None = None,
    ) -> Iterator[list[Finished]]:
        """What `generate` returns, as (number of the request, its completions), whenever some are finished.

        `seed` seeds the engine's own generator, for requests without a seed. Raises `RolloutError` when weights or KV cache are away, when
        the weights are not those of `required_version`, when a prompt and its response exceed `max_model_len`, or when weights are broken.
        """
        self._check_ready(required_version)
        longest = max(len(r.token_ids) for r in requests)
        if longest + sampling.max_new_tokens > self.options.max_model_len:
            raise RolloutError(
                f"A prompt of {longest} tokens and {sampling.max_new_tokens} new ones exceed max_model_len={self.options.max_model_len}, "
                f"which is data.max_prompt_tokens + rollout.max_new_tokens. Set data.max_prompt_tokens={longest}, or leave the prompt out."
            )
        if any(r.seed is not None for r in requests):
            self.llm.reset_prefix_cache()  # a cached prefix changes the shapes of the pass, and with them the last bits
        if seed is not None:
            self.llm.collective_rpc("hybrid_seed", args=(seed,))
        tokenizer = self.llm.get_tokenizer()
        at_end = decodes_at_end(sampling, tokenizer)
        drawn = [sampling.greedy() if r.greedy else sampling for r in requests]
        names = self.llm.enqueue(
            [{"prompt_token_ids": r.token_ids} for r in requests],
            [vllm_setup.sampling_params(s, r.seed, not at_end) for s, r in zip(drawn, requests, strict=True)],
            use_tqdm=False,
        )
        lengths: list[int] = []
        for portion in finished(self.llm, names, self.weight_version, tokenizer if at_end else None):
            lengths += [len(requests[i].token_ids) + len(c.token_ids) for i, group in portion for c in group]
            yield portion
        settle(self.llm)
        vllm_setup.give_back(self.llm, self.options.device)
        held = tokens_held_at_most(lengths, self.options.max_num_seqs)
        self._kv_cache_share = held / self.llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens

    def _check_ready(self, required_version: int | None) -> None:
        if self.resident != set(PARTS):
            raise RolloutError(
                f"The engine cannot generate: {sorted(set(PARTS) - self.resident)} asleep. Wake them first."
            )
        if self.weight_version is None:
            raise RolloutError(
                "The engine cannot generate: no complete weight sync followed the last sleep or sync. Sync first."
            )
        if required_version is not None and required_version != self.weight_version:
            raise RolloutError(
                f"The engine holds weights of version {self.weight_version}, but version {required_version} was asked for. "
                "Sync the trainer's weights before generating."
            )

    def leave(self, parts: list[str]) -> list[dict[str, Any]]:
        """Take `parts` ("weights", "kv_cache") off the device without keeping their bytes. Returns a row per part, see `_moved`.

        Raises `MemoryScheduleError` for an illegal move. Weights that left are invalid until a complete weight update.
        """
        check_leave(parts, self.resident, self.options.device)
        counted = self._counted_bytes()

        def move() -> None:
            if "weights" in parts:
                self.weight_version = None
                self._whole = False
                self.llm.sleep(level=2)
            else:
                self.llm.sleep(level=0)
                self.llm.release_kv_cache_memory()
            self.resident -= set(parts)

        return self._moved(parts, move, counted)

    def come(self, parts: list[str]) -> list[dict[str, Any]]:
        """Give `parts` their memory back; contents are undefined. Rows and errors as `leave`."""
        check_come(parts, self.resident, self.options.device)

        def move() -> None:
            self.llm.wake_up(tags=list(parts))
            self.resident |= set(parts)

        return self._moved(parts, move)

    def _moved(
        self, parts: list[str], move: Callable[[], None], counted: dict[str, int] | None = None
    ) -> list[dict[str, Any]]:
        """Do `move` and describe it, see `moved_rows`."""
        self.llm.collective_rpc("hybrid_release_free_memory")
        before = self._measured_bytes()
        started = time.perf_counter()
        move()
        seconds = time.perf_counter() - started
        after = self._measured_bytes()
        return moved_rows(parts, counted or self._counted_bytes(), seconds, before, after)

    def movable_parts(self) -> tuple[str, ...]:
        """Parts that `leave` and `come` accept on this platform."""
        return MOVABLE[self.options.device]

    def init_weight_transfer_engine(self, request: Any) -> None:
        """First step of the transfer protocol, once."""
        self._update_step("init_weight_transfer_engine", init_info=_field(request, "init_info"))

    def start_weight_update(self) -> None:
        """Open a weight update; from here on the old weights are gone. A broken earlier one is closed first."""
        if "weights" not in self.resident:
            raise RolloutError("Weight sync: the engine's weights are asleep; wake part `weights` before the sync.")
        if self._received is not None:
            self._update_step("hybrid_abort_weight_update")
        self._received = set()
        self._whole = False
        self.weight_version = None
        self._update_step("start_weight_update")

    def update_weights(self, request: Any) -> None:
        """Load one bucket. Raises `RolloutError` when it holds a name or shape that the model has not, or does not load."""
        info = _field(request, "update_info")
        if self._received is None:
            raise RolloutError("Weight sync: update_weights without start_weight_update.")
        check_bucket(self._expected, self._received, info["names"], info["shapes"])
        self._update_step("update_weights", update_info=info)
        self._received |= set(info["names"])

    def finish_weight_update(self) -> None:
        """Close the update. Raises `RolloutError` when weights are missing or a layer did not take them. Cached prefixes are dropped."""
        if self._received is None:
            raise RolloutError("Weight sync: finish_weight_update without start_weight_update.")
        unasked = set(self._expected) - self._received - self._unused - set(HEADS if self._ties_head() else ())
        needed = self._taken(sorted(unasked)) if unasked else set()
        check_complete(self._expected, self._received, needed)
        self._unused |= unasked
        self._update_step("hybrid_finish_weight_update")
        if not self.llm.reset_prefix_cache():
            raise RolloutError(
                "Weight sync: vLLM could not drop cached prefixes of the old weights; requests are still running."
            )
        self._received = None
        self._whole = True

    def _ties_head(self) -> bool:
        """Whether the head follows the embeddings. vLLM takes a checkpoint's copy of it for a head of its own until the two are compared;
        transformers compares them too, and a head that differs is sent."""
        config = self.llm.model_config
        return config.word_embeddings_untied_by_checkpoint or getattr(
            config.hf_text_config, "tie_word_embeddings", False
        )

    def _taken(self, names: list[str]) -> set[str]:
        """Return those of the checkpoint's `names` that some worker's model would load. Call it in an open update, which breaks where
        there are any."""
        shapes = [list(self._expected[name]) for name in names]
        return {name for worker in self._update_step("hybrid_takes", names=names, shapes=shapes) for name in worker}

    def set_weight_version(self, version: int) -> None:
        """Name the weights of the update that just finished; only then can the engine generate."""
        if not self._whole:
            raise RolloutError(f"Weight sync: version {version} was announced, but no complete update came before it.")
        self.weight_version = version

    def stats(self) -> dict[str, Any]:
        """Resident parts, weight version, counted bytes of each part and measured bytes, over all processes of the engine."""
        return {
            "resident": sorted(self.resident),
            "weight_version": self.weight_version,
            "counted_bytes": self._counted_bytes(),
            "measured_bytes": self._measured_bytes(),
        }

    def take_peak(self) -> dict[str, Any]:
        """Highest memory of the engine's processes since this was last asked, what they hold and what of the KV cache was used meanwhile:
        the fields of a `RankPeak`."""
        if self.options.device == "cpu":
            peak, (held, shared) = self._peak.take(), held_and_shared("cpu", children=True)
        else:
            peak, held = (
                sum(of_workers) for of_workers in zip(*self.llm.collective_rpc("hybrid_take_peak"), strict=True)
            )
            shared = 0
        share, self._kv_cache_share = self._kv_cache_share, None
        return {"peak_bytes": peak, "held_bytes": held, "shared_bytes": shared, "kv_cache_share": share}

    def start_ops(self) -> None:
        """Record torch's operations of vLLM's workers until `stop_ops`."""
        self.llm.start_profile(str(os.getpid()))

    def stop_ops(self) -> list[OpTrace]:
        """What was recorded, one of each worker. Raises `RolloutError` when vLLM recorded nothing."""
        self.llm.stop_profile()
        return take_traces(self.options.trace_dir, str(os.getpid()))

    def stop(self) -> None:
        """End vLLM and its worker processes."""
        self.llm.llm_engine.engine_core.shutdown()

    def _counted_bytes(self) -> dict[str, int]:
        """Bytes of each resident part, over the engine's workers."""
        workers = self.llm.collective_rpc("hybrid_counted_bytes")
        return {part: sum(w[part] for w in workers) for part in PARTS if part in self.resident}

    def _measured_bytes(self) -> int:
        """Bytes that the engine's processes hold: PSS, or on CUDA bytes of its GPUs."""
        if self.options.device == "cuda":
            return sum(self.llm.collective_rpc("hybrid_held_bytes"))
        return process_bytes(children=True).pss

    def _update_step(self, method: str, **kwargs) -> list[Any]:
        try:
            return self.llm.collective_rpc(method, kwargs=kwargs)
        except Exception as error:  # vLLM raises whatever its layers raise
            raise RolloutError(f"Weight sync: vLLM failed in `{method}`: {error}") from error


def _field(request: Any, name: str) -> Any:
    """A field of a request of the transfer protocol: vLLM's clients send objects, ours dicts."""
    return request[name] if isinstance(request, dict) else getattr(request, name)
