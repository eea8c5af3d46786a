"""What a person sees of a run: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TextIO

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hybrid.telemetry.stream import QuietStream
from hybrid.telemetry.summary import SummaryData, clock, shown_path, summary_parts
from hybrid.waiting import Ticker

SPINNER_HZ = 4
RECENT_STEPS = 10
"""Steps that the time left is judged by."""


class Console:
    """Shows a run, from `stage`s before the first step to `summary`. A context manager: the terminal is left as it was found.

    `mode`: "bar", "lines", or "auto" for a bar where `file` (stdout) is a terminal that can move its cursor. Never raises because
    nobody can read it.
    """

    def __init__(
        self, mode: Literal["auto", "bar", "lines"] = "auto", file: TextIO | None = None, width: int | None = None
    ):
        stream = QuietStream(sys.stdout if file is None else file)
        force = True if mode == "bar" else None
        self._out = rich.console.Console(
            file=stream, force_terminal=force, highlight=False, soft_wrap=True, width=width
        )
        self._began = self._since = time.monotonic()
        self._doing = self._stage = ""
        self._steps, self._step = 0, 0
        self._metrics: Mapping[str, float | None] = {}
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._spinner = Spinner("dots" if self._out.encoding.startswith("utf") else "line", style="cyan")
        movable = self._out.is_terminal and not self._out.is_dumb_terminal
        self._live: Live | None = None
        self._ticker: Ticker | None = None
        """Says now and then that a stage lasts, where no bar shows it."""
        if mode != "lines" and movable:
            self._live = Live(get_renderable=self._render, console=self._out, refresh_per_second=SPINNER_HZ)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Freeze the bar and give the cursor back. May be called twice; anything shown later is plain."""
        self._end_ticker()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def start(self, title: str, run_dir: Path, steps: int, dashboard_url: str | None = None) -> None:
        """Say what runs, where it writes and where to look; `steps` is the length of the bar."""
        self._steps = steps
        self._print(Text(title, style="bold"))
        self._print(f"  run folder     {shown_path(run_dir)}")
        if dashboard_url:
            self._print(f"  Ray dashboard  {dashboard_url}")

    def stage(self, text: str) -> None:
        """A slow part of the start, such as "starting 2 engines". It lasts until the next stage or phase."""
        self._end_stage()
        self._do(text)
        self._stage = text
        if self._live is None:
            self._print(f"{text} ...")
            self._ticker = Ticker(lambda seconds: self._print(f"{text} ... {seconds:.0f} s"))

    def phase(self, name: str) -> None:
        """What the run does from now on; only a bar shows it."""
        self._end_stage()
        self._do(name)

    def step(self, metrics: Mapping[str, float | None]) -> None:
        """A step ended; `metrics` is its line of metrics.jsonl."""
        self._step, self._metrics = int(metrics["step"]), metrics
        self._recent.append(metrics["time/step"])
        at_start = self._step == 1 != self._steps  # Measured before the step, though written with it.
        held_out = _held_out(metrics, "before training" if at_start else f"after step {self._step}")
        lines = [None if self._live else self._step_line(metrics), held_out]
        for line in reversed(lines) if at_start else lines:
            if line is not None:
                self._print(line)

    def note(self, text: str) -> None:
        """Something worth knowing."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Something that may be wrong; the run goes on."""
        self._print(Text.assemble(("warning: ", "bold yellow"), text))

    def error(self, text: str) -> None:
        """Why the run ended; to stderr."""
        self.stop()
        stderr = rich.console.Console(file=QuietStream(sys.stderr), highlight=False, soft_wrap=True)
        stderr.print(Text.assemble(("error: ", "bold red"), text))

    def summary(self, data: SummaryData) -> None:
        """The closing table, in the bar's place."""
        self._end_stage()
        if self._live is not None:
            self._live.transient = True
        self.stop()
        for part in summary_parts(data, self._out.width):
            self._out.print(part)

    def _do(self, what: str) -> None:
        self._doing, self._since = what, time.monotonic()
        if self._live is not None and not self._live.is_started:
            self._live.start()

    def _end_stage(self) -> None:
        self._end_ticker()
        if self._stage and self._live is not None:
            self._print(Text.assemble(f"{self._stage}  ", (f"{time.monotonic() - self._since:.0f} s", "dim")))
        self._stage = ""

    def _end_ticker(self) -> None:
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None

    def _print(self, content: str | Text) -> None:
        # As Text: a message may hold brackets, which are not markup.
        self._out.print(Text(content) if isinstance(content, str) else content)

    def _left(self) -> str:
        if not self._recent:
            return "-"
        return clock((self._steps - self._step) * sum(self._recent) / len(self._recent))

    def _step_line(self, metrics: Mapping[str, float | None]) -> str:
        width = len(str(self._steps))
        return "  ".join(
            [
                f"step {self._step:{width}}/{self._steps}",
                *_figures(metrics),
                f"{self._recent[-1]:.1f} s",
                f"left {self._left()}",
            ]
        )

    def _render(self) -> Table | Spinner:
        """The live part: a bar, and what happens now."""
        now = time.monotonic()
        self._spinner.update(text=Text.assemble((self._doing, "bold"), f"  {now - self._since:.0f} s"))
        if self._stage or not self._steps:
            return self._spinner
        top = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None):
            top.add_column(ratio=ratio, no_wrap=True)
        times = f"{clock(now - self._began)} elapsed, {self._left()} left"
        top.add_row(f"step {self._step}/{self._steps}", ProgressBar(self._steps, self._step), times)
        bottom = Table.grid(padding=(0, 2), expand=True)
        bottom.add_column(ratio=1, no_wrap=True)
        bottom.add_column(no_wrap=True)
        bottom.add_row(self._spinner, "  ".join(_figures(self._metrics)))
        grid = Table.grid(expand=True)
        grid.add_row(top)
        grid.add_row(bottom)
        return grid


def _figures(metrics: Mapping[str, float | None]) -> list[str]:
    shown = {
        "reward/mean": "reward {:.3f}",
        "response/length_mean": "length {:.1f}",
        "tokens/per_second": "{:,.0f} tokens/s",
    }
    return [form.format(metrics[key]) for key, form in shown.items() if metrics.get(key) is not None]


def _held_out(metrics: Mapping[str, float | None], when: str) -> str | None:
    accuracy, reward = metrics.get("eval/accuracy"), metrics.get("eval/reward")
    if accuracy is None:
        return None
    of_reward = "" if reward is None else f", reward {reward:.3f}"
    return f"held-out accuracy {when}: {accuracy:.3f}{of_reward}"
