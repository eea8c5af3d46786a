"""What a run tells: metrics, samples, wandb and the console, behind one object."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.data.samples import Sample
from hybrid.reports.markdown import short_form
from hybrid.reports.write import write_report
from hybrid.telemetry.console import Console
from hybrid.telemetry.gpu import GpuUtilization
from hybrid.telemetry.metrics import MetricsWriter, metric_keys
from hybrid.telemetry.samples import SamplesWriter
from hybrid.telemetry.spans import Spans
from hybrid.telemetry.summary import SummaryData, count_of, shown_path
from hybrid.telemetry.timeline import FILE as TRACE
from hybrid.telemetry.wandb import start_wandb

Metrics = dict[str, float | None]

OTHER_TIMES = ("time/step", "time/score_overlapped")
"""Seconds that phases and transitions hold already."""


class Reporter:
    """A context manager around a run; keeps what the closing table needs."""

    def __init__(self, cfg: RunConfig, run_dir: Path):
        self.cfg, self.run_dir = cfg, run_dir
        self.console = Console(cfg.logging.progress)
        self.metrics = MetricsWriter(run_dir / "metrics.jsonl", metric_keys())
        self.samples = SamplesWriter(run_dir / "samples.jsonl", cfg.logging.samples_per_step)
        self.gpu = GpuUtilization()
        self.spans = Spans()
        """Of the driver, for the timeline."""
        self.wandb = None
        self._stack = ExitStack()
        self._started = time.monotonic()
        self._first: Metrics = {}
        self._told_full = False
        self._first_token: float | None = None
        self._summary = SummaryData(title=_title(cfg), seconds=0.0)

    def __enter__(self) -> Reporter:
        self._stack.enter_context(self.console)
        self.console.start(self._summary.title, self.run_dir, self.cfg.train.steps)
        self._stack.callback(self.metrics.close)
        self._stack.callback(self.samples.close)
        self._stack.enter_context(self.gpu)
        self.wandb = start_wandb(self.cfg, self.run_dir, self.console.warn)
        if self.wandb is not None:
            self._stack.callback(self.wandb.finish)
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            report = self._write_report()
            if report is not None:
                self.console.note(f"memory report: {shown_path(report[0])}")
        self._stack.__exit__(*error)

    def stage(self, text: str) -> None:
        """A slow part of the start."""
        self.console.stage(text)

    def cluster_is_up(self, dashboard_url: str | None) -> None:
        """Ray answers: say where to watch it."""
        if dashboard_url is not None:
            self.console.note(f"Ray dashboard: {dashboard_url}")

    def first_token(self) -> None:
        """The engines have generated for the first time: say how long the user waited for that."""
        self._first_token = _seconds_since_start()
        self.console.note(f"first token after {self._first_token:.0f} s")

    def phase(self, name: str) -> None:
        self.console.phase(name)

    def note(self, text: str) -> None:
        self.console.note(f"note: {text}")

    def warn(self, text: str) -> None:
        self.console.warn(text)

    def training_starts(self, evaluation: Metrics, totals: Mapping[str, float]) -> None:
        """The start is over: its evaluation and its times go into the first step's line."""
        self._add_times(totals)
        self._first = evaluation | {key: totals[key] for key in ("time/init", "time/evaluate") if key in totals}
        self._first |= {"time/first_token": self._first_token}
        self._summary.accuracy_start = evaluation.get("eval/accuracy")

    def step(self, step: int, metrics: Metrics, samples: Sequence[Sample]) -> None:
        """Write a step's line everywhere."""
        self._add_times(metrics)
        row = self.metrics.write(self._first | metrics | {"step": step, "gpu/utilization": self.gpu.take()})
        if self.metrics.waits and not self._told_full:
            self._told_full = True
            self.console.warn(
                f"the disk of {self.run_dir} is full: records wait in memory and are lost if it stays full. Free some of it."
            )
        self._first = {}
        self._summary.rewards.append(row["reward/mean"])
        self._summary.accuracy_end = metrics.get("eval/accuracy")
        for key, value in row.items():
            if key.startswith("memory/peak/") and value is not None:
                role = key.removeprefix("memory/peak/")
                self._summary.peak_bytes[role] = max(self._summary.peak_bytes.get(role, 0), int(value))
        self.samples.write(step, samples)
        if self.wandb is not None:
            self.wandb.log(step, row)
        self.console.step(row)

    def finish(self, exported: Path | None) -> None:
        """The closing table."""
        self._summary.seconds = time.monotonic() - self._started
        self._summary.written = {
            "run folder": self.run_dir,
            "metrics": self.run_dir / "metrics.jsonl",
            "samples": self.run_dir / "samples.jsonl",
            "memory ledger": self.run_dir / "memory.jsonl",
        }
        report = self._write_report()
        if report is not None:
            self._summary.written["memory report"], text = report
            self.console.note(f"\n{text}")
        if (self.run_dir / TRACE).is_file():
            self._summary.written["timeline"] = self.run_dir / TRACE
        if exported is not None:
            self._summary.written["model"] = exported
        self._summary.next_commands = _next_commands(self.cfg, self.run_dir)
        self.console.summary(self._summary)

    def _write_report(self) -> tuple[Path, str] | None:
        """The page's path and its short form. A report that cannot be made or written is a warning: the run is what counts."""
        ledger = self.run_dir / "memory.jsonl"
        if not ledger.is_file() or not ledger.stat().st_size:
            return None  # ended before anything was in memory
        try:
            page, _, doc = write_report(self.run_dir)
        except Exception as error:
            self.console.warn(
                f"the memory report was not made: {error!r}. `hybrid report {_quoted(self.run_dir)}` tries again."
            )
            return None
        return page, short_form(doc)

    def _add_times(self, totals: Mapping[str, float | None]) -> None:
        for key, seconds in totals.items():
            if key.startswith("time/") and key not in OTHER_TIMES and seconds is not None:
                name = key.removeprefix("time/")
                self._summary.phase_seconds[name] = self._summary.phase_seconds.get(name, 0.0) + seconds


def _seconds_since_start() -> float:
    """Since this process was started, the interpreter's own start and all imports included."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _title(cfg: RunConfig) -> str:
    algorithm = {"gae": "PPO", "group_norm": "GRPO"}.get(cfg.algorithm.advantage, cfg.algorithm.advantage)
    gpus = count_of(cfg.world_size, "logical GPU" if cfg.cluster.device == "cpu" else "GPU")
    return f"{algorithm} on {cfg.data.train}, {gpus}, ZeRO-{cfg.actor.zero_stage}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))


def _next_commands(cfg: RunConfig, run_dir: Path) -> list[tuple[str, str]]:
    again = f"hybrid train {_quoted(run_dir / 'profile.yaml')} logging.name=null"
    if cfg.rollout.record is not None:
        again += " rollout.record=null"
    longer = [(f"{again} train.steps={2 * cfg.train.steps}", "train twice as long")] if cfg.uses_engines else []
    return [
        (f"tail -n 4 {_quoted(run_dir / 'samples.jsonl')}", "read the last rollouts"),
        *longer,
        (f"{again} memory.policy=swap_all", "compare with all moving that can"),
    ]
