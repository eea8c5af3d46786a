"""What the step benchmarks share: workloads, the run of ours that works them off step by step, and CPU time of processes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybrid import phases
from hybrid.config import load_run, resolve
from hybrid.data.samples import Sample
from hybrid.preparation import prepared
from hybrid.session import Session, open_session
from hybrid.trainer import Progress, train_step

MODEL = Path("models/SmolLM2-135M-Instruct").resolve()
LEARNING_RATE = 1e-6
REWARD = '''
def length(prompts, responses, labels, **columns):
    """Characters: cheap, and different for answers of equally many tokens."""
    return [float(len(response)) for response in responses]
'''


@dataclass(frozen=True)
class Workload:
    """`prompt_tokens` are those of each prompt, chat template included; every answer has exactly `new_tokens`."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"{self.prompts} prompts of {self.prompt_tokens} tokens x {self.samples} samples of {self.new_tokens}"


WORKLOADS = {"default": Workload(8, 4, 48, 64), "long-prompt": Workload(4, 8, 256, 16)}


@dataclass(frozen=True)
class Step:
    """A step of ours. `phases`: seconds of each phase, and of all ways into them under `transitions`."""

    seconds: float
    phases: dict[str, float]
    samples: list[Sample]

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(len(sample.token_ids) for sample in self.samples)


class OurRun:
    """The loop of `hybrid train`, one step at a time."""

    def __init__(self, session: Session):
        self.session = session
        self.progress = Progress(kl_coef=session.cfg.algorithm.kl_coef)
        phases.sync(session, self.progress)
        phases.self_test(session, self.progress)
        session.report.training_starts({}, session.ledger.take_step_totals())

    def step(self) -> Step:
        """The next step, its records written."""
        started = time.perf_counter()
        self.progress.step = self.session.ledger.step = self.progress.step + 1
        metrics, samples = train_step(self.session, self.progress)
        totals = self.session.take_step_totals()
        self.session.report.step(self.progress.step, metrics | totals, samples)
        seconds = time.perf_counter() - started
        spent = {key.removeprefix("time/"): value for key, value in totals.items() if key.startswith("time/")}
        return Step(seconds, spent, samples)


def load_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def questions(workload: Workload, tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """`count` different user messages that the chat template makes `prompt_tokens` long. They differ from the first word on, so that no
    cached prefix serves two of them."""
    return [_question(i, workload.prompt_tokens, tokenizer) for i in range(count)]


def prompt_ids(question: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    message = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)


def _question(number: int, tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    text = f"{number} is a number. Tell a story about it"
    while (missing := tokens - len(prompt_ids(text + ".", tokenizer))) > 0:
        text += " and the sea" if missing >= 3 else " today" * missing
    if missing:
        raise ValueError(f"no question of {tokens} tokens: {text!r} has {tokens - missing}")
    return text + "."


@contextmanager
def our_run(workload: Workload, questions: list[str], folder: Path, **sections: dict) -> Iterator[OurRun]:
    """A run of ours in `folder`, with as many steps as `questions` suffice for, started as `hybrid train` starts it.

    bf16 with fp32 masters, one logical GPU, all cores for each process, memory.policy and all else as by default; `sections` are laid
    over the profile. Ray would make its processes give way to others, which those that are compared with ours do not.
    """
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (Ray spells it so)
    cfg = resolve(load_run(_profile(workload, questions, folder, sections), []), folder)
    with prepared(cfg) as ready, open_session(ready, folder) as session:
        yield OurRun(session)


def _profile(workload: Workload, questions: list[str], folder: Path, sections: dict[str, dict]) -> Path:
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    (folder / "reward.py").write_text(REWARD)
    profile = {
        "cluster": {"device": "cpu", "gpus_per_node": 1, "dashboard": False},
        "model": {"path": str(MODEL), "dtype": "bfloat16"},
        "actor": {"learning_rate": LEARNING_RATE},
        "reward": {"function": "reward.py:length"},
        "rollout": {
            "samples_per_prompt": workload.samples,
            "max_new_tokens": workload.new_tokens,
            "min_new_tokens": workload.new_tokens,
        },
        "train": {"steps": len(questions) // workload.prompts, "prompts_per_step": workload.prompts},
        "data": {"train": "prompts.jsonl", "max_prompt_tokens": workload.prompt_tokens, "shuffle": False},
        "logging": {"progress": "lines"},
    }
    for name, values in sections.items():
        profile[name] = {**profile.get(name, {}), **values}
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path


def cpu_seconds_of_children() -> float:
    """CPU time so far of all processes that descend from this one and live."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
