"""Verifiers that come with hybrid, in the form of a user's reward function."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from typing import Any

from hybrid.answers import child as child_module
from hybrid.answers.labels import BadLabel, label_text
from hybrid.data.tasks import Task
from hybrid.rewards.function import BadSample

COMPARISON_S = 8.0
"""Seconds after which a comparison's process is killed; it stops by itself after `hybrid.answers.child.LIMIT_S` of processor
time where Python can be interrupted."""
START_S = 60.0
"""Seconds that importing sympy may take on a slow disk."""


class TaskScorer:
    """The scorer of a reasoning-gym task: usually 1.0 for the answer, some share for text around it."""

    def __init__(self, task: Task):
        self._name = task.name
        self._dataset = task.dataset(seed=0, size=100)
        self._warned = False

    def __call__(self, responses: list[str], entry: list[dict[str, Any]]) -> list[float]:
        """`entry`: the reasoning-gym entry of each response."""
        return [
            self._score(i, response.strip(), e) for i, (response, e) in enumerate(zip(responses, entry, strict=True))
        ]

    def _score(self, index: int, response: str, entry: dict[str, Any]) -> float:
        try:
            return self._dataset.score_answer(response, entry)
        except Exception as error:
            return self._unreadable(index, response, entry, error)

    def _unreadable(self, index: int, response: str, entry: dict[str, Any], error: Exception) -> float:
        """Some scorers raise on text that is no answer in the task's notation. That is a wrong answer, provided that the scorer works."""
        try:
            self._dataset.score_answer(entry["answer"], entry)
        except Exception as broken:
            raise BadSample(index, f"{type(broken).__name__}: {broken} (on the task's own answer, too)") from error
        if not self._warned:
            self._warned = True
            message = (
                f"the scorer of reasoning_gym:{self._name} cannot read some responses and they count as 0, such as"
            )
            warnings.warn(f"{message} {response[:200]!r} ({type(error).__name__}: {error})", stacklevel=2)
        return 0.0


class MathVerify:
    """1.0 where the final answer of a response is the label, else 0.0; `hybrid.answers` says how both are read.

    In a process of its own: a response such as 9**9**9**9 may take for ever in code that no signal interrupts. A comparison that is
    too long counts as not equal and is warned of, once.
    Each thread has its own process: a batch that passed its deadline may still be talking to its one.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._warned = False

    def __call__(self, responses: list[str], labels: list[Any]) -> list[float]:
        return [
            self._score(i, response, label) for i, (response, label) in enumerate(zip(responses, labels, strict=True))
        ]

    def unreadable(self, label: Any) -> str | None:
        """Why no response can be found equal to `label`; None for one that can be read. Raises `BadLabel` as `label_text` does."""
        reply = self._ask([label_text(label)])
        return "it takes too long to read" if reply is None or reply["late"] else reply["unreadable"]

    def _score(self, index: int, response: str, label: Any) -> float:
        try:
            text = label_text(label)
        except BadLabel as error:
            raise BadSample(index, f"label {label!r}: {error}") from error
        reply = self._ask([text, response])
        if reply is None or reply["late"]:
            self._warn(response)
            return 0.0
        return 1.0 if reply["equal"] else 0.0

    def _ask(self, request: list[str]) -> dict[str, Any] | None:
        """The reply of this thread's process, or None when it did not come in time."""
        child = getattr(self._local, "child", None)
        if child is None or child.ended():
            child = self._local.child = _Child()
        reply = child.ask(request)
        if reply is None:
            child.kill()
        return reply

    def _warn(self, response: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"math_verify gave up on responses and they count as 0, such as {response[-200:]!r}", stacklevel=3
            )


class _Child:
    """A process of `hybrid/answers/child.py`: a JSON line in, a JSON line out."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        command = [sys.executable, "-P", child_module.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log)
        weakref.finalize(self, _end, self._process, self._log)
        if self._read(START_S) is None:
            self.kill()
            raise RuntimeError(f"math_verify did not start within {START_S:g} s")

    def ask(self, request: list[str]) -> dict[str, Any] | None:
        """The reply, or None when it did not come in time."""
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(COMPARISON_S)

    def ended(self) -> bool:
        """Whether the process was killed, by `kill` or from outside."""
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self, seconds: float) -> dict[str, Any] | None:
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            return None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        status = self._process.wait()
        if status < 0:  # Killed for its memory, or a recursion too deep for the C stack: the response's doing.
            return None
        self._log.seek(0)
        raise RuntimeError(
            f"the process of math_verify ended ({status}): {self._log.read()[-2000:].decode(errors='replace')}"
        )


def _end(process: subprocess.Popen, log: Any) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    log.close()
