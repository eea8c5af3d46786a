"""Seconds of a GRPO step by us over those of TRL (extra `test`): the same model, prompts, tokens and threads, steps taking turns.

    python tests/benchmarks/step_vs_trl.py [--workload default|long-prompt] [--steps 6] [--threads N] [--eager]

Both: SmolLM2-135M (launch/quickstart.sh makes it), weights and passes in bf16, one process group of one (logical) GPU, all cores for
whoever has its turn, beta 0, one optimizer step per rollout, answers of exactly so many tokens, the reward their length in characters.
Ours also keeps fp32 masters and moments; TRL's AdamW works on the bf16 weights. TRL generates with transformers: its vLLM mode fails on
CPU when it loads weights into the engine, whose layers have packed theirs. Ours is the loop of `hybrid train`, records and all, with
rollout.enforce_eager=false: the engine compiles for a minute or two before the first step, which is not measured and pays after some 50
such steps. --eager leaves that at its default on CPU: where compiled took 0.38 of TRL's time, eager took 0.48.

The first step of each warms up. The last line is the median of ours over the median of TRL's; at most 0.45 is wanted. On a machine with
other work compare CPU seconds instead, with `--threads 1`: threads that wait for each other spin.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
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

from hybrid.config.machine import cpu_cores


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--workload", choices=WORKLOADS, default="default")
    arguments.add_argument("--steps", type=int, default=6, help="measured, beside one that warms up")
    arguments.add_argument("--threads", type=int, default=cpu_cores(), help="of each process; all cores if not given")
    arguments.add_argument("--eager", action="store_true", help="do not compile our engine")
    options = arguments.parse_args()
    try:
        import trl  # noqa: F401
    except ImportError:
        sys.exit("TRL is not installed: pip install 'hybrid[test]'.")
    if not MODEL.is_dir():
        sys.exit(f"{MODEL} is not there: launch/quickstart.sh makes it.")
    workload = WORKLOADS[options.workload]
    engine = "eager" if options.eager else "compiled"
    print(f"{workload}; bf16, on our side with fp32 masters; our engine {engine}", flush=True)
    asked = questions(workload, load_tokenizer(), workload.prompts * (options.steps + 1))
    sections = {"cluster": {"threads_per_process": options.threads}, "rollout": {"enforce_eager": options.eager}}
    with tempfile.TemporaryDirectory() as folder, our_run(workload, asked, Path(folder), **sections) as ours:
        turns = run_trl(workload, asked, Path(folder) / "trl", ours, options.threads)
    show(turns[1:])


@dataclass(frozen=True)
class Turn:
    """A step of TRL and the step of ours after it. `cpu` are CPU seconds: of TRL's process in TRL's step, of ours and the driver in ours;
    `idle` is the share of a core that our waiting processes took in TRL's step."""

    seconds: float
    tokens: int
    ours: Step
    cpu: tuple[float, float]
    idle: float


class Turns:
    """What TRL's callback and reward note."""

    def __init__(self, run: OurRun):
        self.run = run
        self.done: list[Turn] = []
        self.tokens = 0
        self.begin()

    def begin(self) -> None:
        self.started, self.own_cpu, self.their_cpu = time.perf_counter(), time.process_time(), cpu_seconds_of_children()

    def reward(self, completions, completion_ids, **_) -> list[float]:
        self.tokens = sum(map(len, completion_ids))
        return [float(len(completion[0]["content"])) for completion in completions]

    def turn(self) -> None:
        """TRL has ended a step: ours is next."""
        seconds, own, children = time.perf_counter() - self.started, time.process_time(), cpu_seconds_of_children()
        step = self.run.step()
        our_cpu = time.process_time() - own + cpu_seconds_of_children() - children
        idle = (children - self.their_cpu) / seconds
        self.done.append(Turn(seconds, self.tokens, step, (own - self.own_cpu, our_cpu), idle))
        print(f"TRL {seconds:.2f} s, ours {step.seconds:.2f} s", flush=True)
        self.begin()


def run_trl(workload: Workload, asked: list[str], folder: Path, run: OurRun, threads: int) -> list[Turn]:
    """TRL's training; after each of its steps, one of ours."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
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
    return turns.done


def show(turns: list[Turn]) -> None:
    theirs = statistics.median(turn.seconds for turn in turns)
    ours = statistics.median(turn.ours.seconds for turn in turns)
    cpu = [statistics.median(turn.cpu[which] for turn in turns) for which in (0, 1)]
    names = dict.fromkeys(name for turn in turns for name in turn.ours.phases)
    spent = {name: statistics.median(turn.ours.phases.get(name, 0.0) for turn in turns) for name in names}
    print(
        "ours by phase: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items() if seconds > 0.005)
    )
    print(f"our processes while TRL steps: {statistics.median(turn.idle for turn in turns):.1%} of a core")
    print(f"TRL   median {theirs:.2f} s a step ({cpu[0]:.1f} CPU seconds), {turns[0].tokens} tokens generated in each")
    print(
        f"ours  median {ours:.2f} s a step ({cpu[1]:.1f} CPU seconds), {turns[0].ours.tokens} tokens generated in each"
    )
    print(f"ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
