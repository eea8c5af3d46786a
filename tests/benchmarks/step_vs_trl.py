"""Seconds of a GRPO step by us over those of TRL (extra `bench`): the same model, prompts, tokens and threads, steps taking turns.

    python tests/benchmarks/step_vs_trl.py [--workload default|long-prompt] [--steps 6]

Both: SmolLM2-135M (launch/quickstart.sh makes it), weights and passes in bf16, one process group of one (logical) GPU, all cores for
whoever has its turn, beta 0, one optimizer step per rollout, answers of exactly so many tokens, the reward their length in characters.
Ours also keeps fp32 masters and moments; TRL's AdamW works on the bf16 weights. TRL generates with transformers: its vLLM mode fails on
CPU when it loads weights into the engine, whose layers have packed theirs. Ours is the loop of `hybrid train`, records and all.

The first step of each warms up. The last line is the median of ours over the median of TRL's; at most 0.45 is wanted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from grpo_step import (
    LEARNING_RATE,
    MODEL,
    WORKLOADS,
    OurRun,
    Step,
    Workload,
    cpu_seconds_of_children,
    load_tokenizer,
    our_run,
    questions,
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--workload", choices=WORKLOADS, default="default")
    arguments.add_argument("--steps", type=int, default=6, help="measured, beside one that warms up")
    options = arguments.parse_args()
    try:
        import trl  # noqa: F401
    except ImportError:
        sys.exit("TRL is not installed: pip install 'hybrid[bench]'.")
    if not MODEL.is_dir():
        sys.exit(f"{MODEL} is not there: launch/quickstart.sh makes it.")
    workload = WORKLOADS[options.workload]
    print(f"{workload}; bf16, on our side with fp32 masters", flush=True)
    asked = questions(workload, load_tokenizer(), workload.prompts * (options.steps + 1))
    with tempfile.TemporaryDirectory() as folder, our_run(workload, asked, Path(folder)) as ours:
        turns = run_trl(workload, asked, Path(folder) / "trl", ours)
    show(turns[1:])


class Turns:
    """What TRL's callback and reward note: a pair of (seconds, tokens) of TRL and our step per turn."""

    def __init__(self, run: OurRun):
        self.run = run
        self.pairs: list[tuple[float, int, Step]] = []
        self.tokens = 0
        self.begin()

    def begin(self) -> None:
        self.cpu_before = cpu_seconds_of_children()
        self.started = time.perf_counter()

    def reward(self, completions, completion_ids, **_) -> list[float]:
        self.tokens = sum(map(len, completion_ids))
        return [float(len(completion[0]["content"])) for completion in completions]

    def turn(self) -> None:
        """TRL has ended a step: ours is next."""
        seconds = time.perf_counter() - self.started
        idle_cpu = (cpu_seconds_of_children() - self.cpu_before) / seconds
        self.pairs.append((seconds, self.tokens, self.run.step()))
        ours = self.pairs[-1][2]
        print(
            f"TRL {seconds:.2f} s, ours {ours.seconds:.2f} s, our processes meanwhile {idle_cpu:.1%} of a core",
            flush=True,
        )
        self.begin()


def run_trl(workload: Workload, asked: list[str], folder: Path, run: OurRun) -> list[tuple[float, int, Step]]:
    """TRL's training; after each of its steps, one of ours."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    turns = Turns(run)

    class TakeTurns(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            turns.begin()

        def on_step_end(self, *args, **kwargs):
            turns.turn()

    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=True,
        model_init_kwargs={"dtype": "bfloat16"},
        gradient_checkpointing=False,
        per_device_train_batch_size=workload.prompts * workload.samples,
        num_generations=workload.samples,
        max_completion_length=workload.new_tokens,
        generation_kwargs={"min_new_tokens": workload.new_tokens},
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        num_iterations=1,
        max_steps=len(asked) // workload.prompts,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=str(MODEL),
        reward_funcs=turns.reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in asked]),
        callbacks=[TakeTurns()],
    )
    trainer.train()
    return turns.pairs


def show(turns: list[tuple[float, int, Step]]) -> None:
    theirs = statistics.median(seconds for seconds, _, _ in turns)
    ours = statistics.median(step.seconds for _, _, step in turns)
    names = dict.fromkeys(name for _, _, step in turns for name in step.phases)
    spent = {name: statistics.median(step.phases.get(name, 0.0) for _, _, step in turns) for name in names}
    print(
        "ours by phase: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items() if seconds > 0.005)
    )
    print(f"TRL   median {theirs:.2f} s a step, {turns[0][1]} tokens generated in each")
    print(f"ours  median {ours:.2f} s a step, {turns[0][2].tokens} tokens generated in each")
    print(f"ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
