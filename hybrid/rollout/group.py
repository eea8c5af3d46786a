"""All engines of a run, driven as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hybrid.data.samples import Prompt, Sample
from hybrid.errors import RolloutError
from hybrid.memory.tenants import RankMoved, RankPeak, Tenant
from hybrid.pool import Holder, Pool
from hybrid.rollout.dispatch import assign, engine_seed, request_seed
from hybrid.rollout.engine import Engine
from hybrid.rollout.requests import Completion, EngineOptions, GenerateRequest, SamplingOptions
from hybrid.rollout.residency import MOVABLE, PARTS
from hybrid.rollout.self_test import self_test_tokens
from hybrid.supervision import Call, Worker

ROLE = "rollout"

ScoreFn = Callable[[list[list[int]], list[list[int]]], list[list[float]]]
"""(prompts, responses) as token ids -> the trainer's log-prob of every response token, at temperature 1."""


class EngineGroup:
    """One engine on every `tensor_parallel_size` consecutive bundles of the pool. Implements `memory.tenants.Mover`.

    The engine's process lives in its first bundle; small holders keep its share of the others.
    """

    def __init__(self, pool: Pool, options: EngineOptions, *, repeatable: bool, seed: int, call_timeout_s: float):
        """`repeatable`: seed every request, so that a run repeats whatever the batching (slower sampling on CUDA); else seed each engine
        once a step. `seed` is the run's.
        """
        self.pool, self.options, self.repeatable, self.seed = pool, options, repeatable, seed
        self.call_timeout_s = call_timeout_s
        self.engines: list[Worker] = []
        self._counted: dict[str, int] = {}

    @property
    def handles(self) -> list[Any]:
        """Ray handles of the engines, for the actor's senders."""
        return [engine.handle for engine in self.engines]

    def start(self, timeout_s: float) -> None:
        """Start all engines at once. Raises `DeadlineExceeded` when one is not ready within `timeout_s` seconds."""
        size = self.options.tensor_parallel_size
        for rank in range(len(self.pool.bundles) // size):
            bundles = self.pool.bundles[rank * size : (rank + 1) * size]
            options = replace(self.options, gpu_ids=tuple(b.gpu_id for b in bundles))
            env = {"OMP_NUM_THREADS": str(options.threads)}  # read when the process starts; Ray would set 1
            self.engines.append(
                self.pool.spawn(Engine, role=ROLE, rank=rank, bundle=bundles[0], gpus=size, env=env, args=(options,))
            )
            for bundle in bundles[1:]:
                self.pool.spawn(Holder, role=f"{ROLE}-holder", rank=bundle.rank, bundle=bundle)
        stats = self._all("start", what="starting the engines", timeout_s=timeout_s)
        self.pool.note_shared()
        self._counted = {part: max(s["counted_bytes"][part] for s in stats) for part in PARTS}

    def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingOptions,
        *,
        step: int,
        version: int,
        round_: int = 0,
        with_greedy: bool = False,
        arrived: Callable[[list[Sample]], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Sample]:
        """`sampling.n` samples of each prompt, group by group in the prompts' order, made by weights of `version`; `with_greedy` one
        greedy answer more, the last of its group, from the same pass. `arrived` is called with each group as soon as it is whole, in no
        fixed order; `check` now and then, and what it raises ends the wait.

        Which engine answers what and with which seeds depends on (run seed, step, `round_` within the step, prompt index) only. Raises
        what `Engine.generate` and `Pool.wait` raise.
        """
        shares = assign([len(p.token_ids) for p in prompts], len(self.engines), step)
        busy = [(engine, share) for engine, share in zip(self.engines, shares, strict=True) if share]
        calls: dict[Call, list[int]] = {}
        for engine, share in busy:
            requests = [self._request(prompts[i], step) for i in share]
            if with_greedy:
                requests += [GenerateRequest(prompts[i].token_ids, greedy=True) for i in share]
            seed = None if self.repeatable else engine_seed(self.seed, step, engine.rank, round_)
            method = "generate" if arrived is None else "stream"
            calls[engine.submit(method, requests, sampling, version, seed)] = share
        answers: list[dict[bool, list[Sample]]] = [{} for _ in prompts]
        groups: dict[int, list[Sample]] = {}

        def take(call: Call, finished: list[tuple[int, list[Completion]]]) -> None:
            share = calls[call]
            for number, completions in finished:
                i, greedy = share[number % len(share)], number >= len(share)
                answers[i][greedy] = [_sample(prompts[i], i, c, greedy) for c in completions]
                if len(answers[i]) == 1 + with_greedy:
                    groups[i] = [*answers[i][False], *answers[i].get(True, [])]
                    if arrived is not None:
                        arrived(groups[i])

        if arrived is None:
            per_engine = self.pool.wait(list(calls), "generate", self.call_timeout_s)
            for call, answer in zip(calls, per_engine, strict=True):
                take(call, list(enumerate(answer)))
        else:
            self.pool.stream(list(calls), "generate", self.call_timeout_s, take, check)
        return [sample for i in range(len(prompts)) for sample in groups[i]]

    def _request(self, prompt: Prompt, step: int) -> GenerateRequest:
        return GenerateRequest(
            prompt.token_ids, request_seed(self.seed, step, prompt.index) if self.repeatable else None
        )

    def tenants(self) -> list[Tenant]:
        """Weights and KV cache; what cannot move on this platform says so."""
        movable = MOVABLE[self.options.device]
        return [Tenant(ROLE, part, part in movable, self._counted.get(part)) for part in PARTS]

    def leave(self, parts: Sequence[str], deadline_s: float) -> list[RankMoved]:
        """See `Engine.leave`; all engines at once."""
        return self._move("leave", parts, deadline_s)

    def come(self, parts: Sequence[str], deadline_s: float) -> list[RankMoved]:
        """See `Engine.come`; all engines at once."""
        return self._move("come", parts, deadline_s)

    def _move(self, method: str, parts: Sequence[str], deadline_s: float) -> list[RankMoved]:
        answers = self._all(method, list(parts), what=f"{method} of {ROLE}/{'+'.join(parts)}", timeout_s=deadline_s)
        return [RankMoved(e.rank, e.node, **row) for e, rows in zip(self.engines, answers, strict=True) for row in rows]

    def peaks(self, timeout_s: float) -> list[RankPeak]:
        """Each engine's highest memory, all its processes together, since this was last asked."""
        peaks = self._all("take_peak", what="memory peaks of the engines", timeout_s=timeout_s)
        return [RankPeak(ROLE, engine.rank, **peak) for engine, peak in zip(self.engines, peaks, strict=True)]

    def stats(self, timeout_s: float) -> list[dict[str, Any]]:
        """`Engine.stats` of every engine."""
        return self._all("stats", what="state of the engines", timeout_s=timeout_s)

    def self_test(self, score: ScoreFn, prompts: list[list[int]], *, bound: float, version: int) -> float:
        """Generate greedily on every engine and let the trainer score the tokens; returns the mean absolute log-prob difference in nats.

        Generating, and not only scoring prompts, is the point: a stale or moved weight can corrupt decoding alone. Comparing log-probs
        rather than tokens passes over near-ties. Raises `RolloutError` when an engine's mean exceeds `bound`.
        """
        sampling = SamplingOptions(self_test_tokens(self.options.max_model_len), temperature=0.0)
        requests = [GenerateRequest(ids) for ids in prompts]
        answers = self._all("generate", requests, sampling, version, what="self-test", timeout_s=self.call_timeout_s)
        completions = [group[0] for answer in answers for group in answer]
        scored = score(prompts * len(self.engines), [c.token_ids for c in completions])
        means = []
        for engine in self.engines:
            own = slice(engine.rank * len(prompts), (engine.rank + 1) * len(prompts))
            means.append(_mean_difference(completions[own], scored[own]))
            if not means[-1] <= bound:  # NaN fails too
                raise RolloutError(_disagreement(engine, means[-1], bound, completions[own], scored[own]))
        return sum(means) / len(means)

    def stop(self, timeout_s: float = 20) -> None:
        """End vLLM in every engine in an orderly way. The processes themselves end with the pool."""
        self._all("stop", what="stopping the engines", timeout_s=timeout_s)

    def _all(self, method: str, *args, what: str, timeout_s: float) -> list[Any]:
        return self.pool.wait([engine.submit(method, *args) for engine in self.engines], what, timeout_s)


def _sample(prompt: Prompt, group: int, c: Completion, greedy: bool) -> Sample:
    return Sample(prompt, group, c.token_ids, c.logprobs, c.text, c.truncated, c.weight_version, greedy=greedy)


def _mean_difference(completions: list[Completion], scored: list[list[float]]) -> float:
    pairs = [pair for c, row in zip(completions, scored, strict=True) for pair in zip(c.logprobs, row, strict=True)]
    return sum(abs(engine - trainer) for engine, trainer in pairs) / len(pairs)


def _disagreement(
    engine: Worker, mean: float, bound: float, completions: list[Completion], scored: list[list[float]]
) -> str:
    rows = [
        f"  {c.text!r}: engine {[round(x, 2) for x in c.logprobs[:6]]}, trainer {[round(x, 2) for x in row[:6]]}"
        for c, row in zip(completions, scored, strict=True)
    ]
    return "\n".join(
        [
            f"Self-test after the first weight sync: {engine} and the trainer give the same tokens log-probs that differ by {mean:.3f} "
            f"nats on average; the bound is {bound}. First log-probs of each greedy response:",
            *rows,
            "The engine does not compute with the trainer's weights. Try rollout.enforce_eager=true (moved weights under CUDA graphs), "
            "then compare model.dtype and the model's architecture in vLLM with the one in transformers.",
        ]
    )
