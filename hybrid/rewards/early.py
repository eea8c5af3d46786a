"""Scoring that starts while the engines still generate."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from hybrid.data.groups import Group, by_prompt
from hybrid.data.samples import Sample
from hybrid.rewards.function import RewardFunction
from hybrid.rewards.score import score

THREAD = "hybrid-early-scores"


class EarlyScores:
    """Scores of `functions` for groups as they are done, made in a thread beside the one that waits for the engines.

    Whole groups only, so that functions with `by_group` return what they would for all samples at once. Groups that are done while a
    call is under way go into the next one together. After an error nothing more is scored.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ):
        self.functions = list(functions)
        self._span = span
        self._scores: list[dict[int, list[float]]] = [{} for _ in self.functions]
        self._calls: list[list[float]] = []
        self._error: BaseException | None = None
        self._done: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        # A daemon: a function that hangs must not keep the run from ending.
        self._thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
        self._thread.start()

    def add(self, group: Group) -> None:
        """Score all samples of a prompt, soon."""
        self._done.put(group)

    def check(self) -> None:
        """Raise the `RewardError` that ended the scoring, if one did."""
        if self._error is not None:
            raise self._error

    def seconds(self) -> float:
        """Time that scoring has taken so far."""
        now = time.perf_counter()
        return sum((call[1] if len(call) > 1 else now) - call[0] for call in self._calls)

    def close(self) -> None:
        """No group will come any more: the thread ends when it has scored those that it has."""
        self._done.put(None)

    def of(self, function: RewardFunction, samples: Sequence[Sample]) -> list[float]:
        """One score per sample of groups that were added, after `close`. Waits for the rest, call by call within the function's deadline.

        Raises `RewardError` as `score` does.
        """
        self._thread.join()
        self.check()
        scores = self._scores[self.functions.index(function)]
        values = {id(x): value for group in by_prompt(list(samples)) for x, value in zip(group, scores[group[0].group])}
        return [values[id(sample)] for sample in samples]

    def _work(self) -> None:
        more = True
        while more:
            groups = [self._done.get()]
            while not self._done.empty():
                groups.append(self._done.get())
            more = None not in groups
            groups = [group for group in groups if group is not None]
            try:
                self._score(groups)
            except BaseException as error:
                self._error = error
                return

    def _score(self, groups: list[Group]) -> None:
        if not groups:
            return
        samples = [sample for group in groups for sample in group]
        for function, scores in zip(self.functions, self._scores):
            self._calls.append(call := [time.perf_counter()])
            with self._span(f"score {len(groups)} groups"):
                values = iter(score(function, samples))
            call.append(time.perf_counter())
            scores |= {group[0].group: [next(values) for _ in group] for group in groups}
