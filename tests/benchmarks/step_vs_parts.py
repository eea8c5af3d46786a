"""Seconds of our whole step over the sum of its bare parts, which do the same work without us.

    python tests/benchmarks/step_vs_parts.py [--workload default|long-prompt] [--steps 6]

GRPO with a KL to a reference, SmolLM2-135M in bf16 with fp32 masters, one logical GPU, all cores for whoever has its turn. The parts:
`vllm.LLM.generate` on the same prompts with the same settings; on the tokens that our step packed, a forward pass without a graph (the
reference's) and a forward and backward pass (the actor's) of the bare model, with log-probs and their gradient; torch's fused AdamW on
fp32 tensors. Each part runs in a process without Ray, DeepSpeed and scheduler, and has neither weight sync nor metrics: those, and
whatever else a step needs, are what the ratio shows. Step and parts take turns; the first of each warms up. The last line is the ratio
of the medians; at most 1.2 is wanted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo_step import WORKLOADS, load_tokenizer, our_run, questions

from hybrid.config import RunConfig
from hybrid.data.batches import lengths_of, plan_micro_batches
from hybrid.experience import sample_rows
from hybrid.roles.packing import Row

PARTS = ("generate", "forward", "forward_backward", "adamw")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--workload", choices=WORKLOADS, default="default")
    arguments.add_argument("--steps", type=int, default=6, help="measured, beside one that warms up")
    options = arguments.parse_args()
    workload = WORKLOADS[options.workload]
    print(f"{workload}; bf16 with fp32 masters", flush=True)
    asked = questions(workload, load_tokenizer(), workload.prompts * (options.steps + 1))
    rounds = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = stack.enter_context(our_run(workload, asked, Path(folder), algorithm={"kl_coef": 0.01}))
        cfg = run.session.cfg
        engine, model = (stack.enter_context(Apart(cls, cfg)) for cls in (BareEngine, BareModel))
        for _ in range(options.steps + 1):
            step = run.step()
            prompts = [sample.prompt.token_ids for sample in step.samples[:: workload.samples]]
            rows = sample_rows(step.samples)
            plan = plan_micro_batches(lengths_of(rows), 1, cfg.train.micro_batch_tokens, share_prompts=True)
            micros = [[rows[i] for i in micro] for micro in plan[0]]
            seconds = {"generate": engine.call("generate", prompts)}
            seconds |= {part: model.call(part, micros) for part in PARTS[1:]}
            rounds.append((step, seconds))
            print(f"step {step.seconds:.2f} s, parts {sum(seconds.values()):.2f} s", flush=True)
    show(rounds[1:])


class BareEngine:
    """vLLM as its users start it, with the settings of our engine."""

    def __init__(self, cfg: RunConfig):
        from vllm import LLM

        from hybrid.phases import sampling_options
        from hybrid.rollout.vllm_setup import CUDA_UTILISATION, sampling_params

        self.params = [sampling_params(sampling_options(cfg), seed) for seed in range(cfg.train.prompts_per_step)]
        self.llm = LLM(
            model=cfg.model.path,
            dtype=cfg.model.dtype,
            max_model_len=cfg.max_sequence_tokens,
            max_num_seqs=cfg.rollout.max_num_seqs,
            kv_cache_memory_bytes=cfg.rollout.kv_cache,
            gpu_memory_utilization=CUDA_UTILISATION,
            enforce_eager=cfg.rollout.enforce_eager,
            logprobs_mode="processed_logprobs",
        )

    def generate(self, prompts: list[list[int]]) -> None:
        self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], self.params, use_tqdm=False)


class BareModel:
    """The model that our actor trains, under nothing."""

    def __init__(self, cfg: RunConfig):
        import torch

        from hybrid.roles.models import ModelOptions, load_policy

        torch.set_num_threads(cfg.cluster.threads_per_process)
        self.policy = load_policy(ModelOptions(cfg.model.path, torch.bfloat16, cfg.model.attention))
        self.masters = [p.detach().float() for p in self.policy.parameters()]
        for master in self.masters:
            master.grad = torch.full_like(master, 1e-3)
        self.optimizer = torch.optim.AdamW(self.masters, lr=cfg.actor.learning_rate, fused=True)

    def forward(self, micros: list[list[Row]]) -> None:
        import torch

        with torch.no_grad():
            self._logprobs(micros)

    def forward_backward(self, micros: list[list[Row]]) -> None:
        self.policy.zero_grad()
        for logprobs_R in self._logprobs(micros):
            logprobs_R.mean().backward()

    def adamw(self, micros: list[list[Row]]) -> None:
        self.optimizer.step()

    def _logprobs(self, micros: list[list[Row]]):
        from hybrid.roles.packing import pack

        return [self.policy(pack(rows, share_prompts=True), 1.0)[0] for rows in micros]


class Apart:
    """An object of `cls` in a process of its own, with the threads and settings of ours. `call` returns the seconds that a method took."""

    def __init__(self, cls: type, cfg: RunConfig):
        os.environ.update(
            OMP_NUM_THREADS=str(cfg.cluster.threads_per_process),
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_LOGGING_LEVEL="WARNING",
        )
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, cls, cfg), daemon=True)
        self.process.start()

    def call(self, method: str, argument: Any) -> float:
        self.pipe.send((method, argument))
        return self.pipe.recv()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_error) -> None:
        self.process.kill()


def _serve(pipe, cls: type, cfg: RunConfig) -> None:
    served = cls(cfg)
    while True:
        method, argument = pipe.recv()
        started = time.perf_counter()
        getattr(served, method)(argument)
        pipe.send(time.perf_counter() - started)


def show(rounds: list) -> None:
    names = dict.fromkeys(name for step, _ in rounds for name in step.phases)
    spent = {name: statistics.median(step.phases.get(name, 0.0) for step, _ in rounds) for name in names}
    print("step by phase: " + ", ".join(f"{name} {value:.2f} s" for name, value in spent.items() if value > 0.005))
    bare = {part: statistics.median(seconds[part] for _, seconds in rounds) for part in PARTS}
    print("bare parts: " + ", ".join(f"{part} {value:.2f} s" for part, value in bare.items()))
    whole = statistics.median(step.seconds for step, _ in rounds)
    parts = statistics.median(sum(seconds.values()) for _, seconds in rounds)
    print(f"whole step {whole:.2f} s, sum of the parts {parts:.2f} s")
    print(f"ratio {whole / parts:.2f}")


if __name__ == "__main__":
    main()
