"""A short run of the command, with what was predicted of each phase's memory beside what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from hybrid.doctor.check import Check, Figures, Setting, beside, expect
from hybrid.doctor.full.model import make_model

STEPS = 3
SUMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
DEADLINE_S = 1200.0
LOG_LINES = 12
MARGIN = 1.15
"""Measured over predicted, up to which a plan holds."""
SLACK = 256 * 2**20


def grpo_stays_in_plan(setting: Setting) -> Figures:
    """GRPO on sums, everything moving between phases, on all GPUs."""
    model, runs = make_model(setting, setting.folder / "model"), setting.folder / "runs"
    tokens = setting.size((512, 256), (256, 8))  # of a prompt and a response: a token is a byte
    profile = {
        "cluster": {"device": setting.device, "gpus_per_node": len(setting.gpus)},
        "model": {"path": str(model)},
        "actor": {"zero_stage": 2, "learning_rate": 1e-5},
        "reward": {"function": "reasoning_gym"},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": tokens[1]},
        "algorithm": {"advantage": "group_norm"},
        "memory": {"policy": "swap_all"},
        "train": {"steps": STEPS, "prompts_per_step": 8 * len(setting.gpus)},
        "data": {"train": "reasoning_gym:chain_sum", "task_args": SUMS, "max_prompt_tokens": tokens[0], "eval_size": 4},
        "logging": {"runs_dir": str(runs), "name": "run"},
    }
    file = setting.folder / "doctor.yaml"  # JSON is YAML
    file.write_text(json.dumps(profile), encoding="utf-8")
    # Its processes set what their roles need; these are for the checks' own processes.
    env = {
        name: value for name, value in os.environ.items() if name not in ("CUBLAS_WORKSPACE_CONFIG", "DS_ACCELERATOR")
    }
    if setting.device == "cpu":
        del env["CUDA_VISIBLE_DEVICES"]
    command = [sys.executable, "-m", "hybrid.cli", "train", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8", timeout=DEADLINE_S - 30)
    lines = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LOG_LINES:])
    expect(done.returncode == 0, f"hybrid train ended with {done.returncode}", {"output": lines})
    return _predicted_and_measured(setting, str(runs / "run"))


def _predicted_and_measured(setting: Setting, run: str) -> Figures:
    from hybrid.reports.read import read_run
    from hybrid.reports.summary import summarize

    figures: Figures = {}
    for line in summarize(read_run(run)).phases:
        if line.measured is not None:
            figures[f"{line.phase}_bytes"] = beside(line.measured, line.predicted)
    expect(bool(figures), "the run's ledger has no measured phase", figures)
    if setting.device == "cuda":
        for name, figure in figures.items():
            measured, planned = figure["measured"], figure["planned"]
            said = f"{name.removesuffix('_bytes')} held {measured} bytes, planned were {planned}"
            expect(planned is None or measured <= MARGIN * planned + SLACK, said, figures)
    return figures


TRAINING = [
    Check(
        "run/grpo",
        "A whole GRPO run on all GPUs ends well, and no phase holds more than was planned.",
        "Where it ended badly its last lines are in the report; where it held more, lower memory.device_bytes by the difference.",
        grpo_stays_in_plan,
        part="full",
        gpus=None,
        deadline_s=DEADLINE_S,
    )
]
