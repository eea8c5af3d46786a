"""A user's function `file.py:function`, in processes of its own: what is wrong with it, and its replies."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from hybrid.rewards.function import Batch, Parameter, Reply, accepts, missing
from hybrid.rewards.process import Ended, Hung, Process

START_S = 60.0
"""Seconds that importing a user's file may take at least; `reward.timeout_s` where that is longer."""
OWN_NAMES = ("prompts", "responses", "labels", "token_ids")
"""Arguments that every function may take. A column of the data that is called so is left out."""
FOREIGN = ("completions", "completion", "response", "solution_str", "response_str", "solution_strs", "generated_texts")
"""Names of the responses in other systems."""
GUARD = "Put the code that it runs on import under if __name__ == '__main__'."


class Problem(NamedTuple):
    """Why a function cannot be used."""

    why: str
    fix: str
    ends_program: bool = False
    """The file, on import, ends the program: by sys.exit, os._exit or a signal."""


_running: WeakValueDictionary[tuple[str, int], UserFunction] = WeakValueDictionary()


def user_function(spec: str, count: int = 1, timeout_s: float = START_S) -> UserFunction:
    """The one that runs `spec`, a `file.py:function` with an absolute path, in `count` processes; started where there is none."""
    running = _running.get((spec, count))
    if running is None or running.closed:
        _running[spec, count] = running = UserFunction(spec, count, timeout_s)
    return running


class UserFunction:
    """The function `spec` in `count` processes, which start at once and import the file; each keeps its state between calls.

    One that hangs or crashes in a call is ended and started again with the next.
    """

    def __init__(self, spec: str, count: int = 1, timeout_s: float = START_S):
        file, _, self.function_name = spec.rpartition(":")
        self.spec = spec
        self.file = Path(file).resolve()
        self.count = count
        self.closed = False
        self.parameters: Sequence[Parameter] = ()
        """Known once `problem` was asked."""
        self._start_s = max(START_S, timeout_s)
        self._processes: list[Process | None] = [self._start() for _ in range(count)]

    def problem(self) -> Problem | None:
        """Waits until the file is imported: what is wrong with it or its function, None when nothing is."""
        try:
            abouts = [self._process(i).about() for i in range(self.count)]
        except Hung as hung:
            return Problem(f"importing {self.file.name} did not end within {self._start_s:g} s: {hung}", GUARD)
        except Ended as ended:
            return Problem(f"importing {self.file.name} ends the program: {ended}", GUARD, ends_program=True)
        for about in abouts:
            if "parameters" not in about:
                return self._told(about)
        self.parameters = [Parameter(*p) for p in abouts[0]["parameters"]]
        return self._signature()

    def needs(self) -> list[str]:
        """Parameters that only a column of the data can give."""
        return missing(self.parameters, OWN_NAMES)

    def lacks(self, columns: Collection[str], fields: dict[str, str]) -> Problem | None:
        """The parameter that data with `columns` does not give. `fields`: what the data calls prompts and labels, and their names here."""
        if not (names := missing(self.parameters, [*OWN_NAMES, *columns])):
            return None
        name = names[0]
        given = ", ".join([*OWN_NAMES, *columns])
        if name in fields:
            fix = f"Rename it {fields[name]}."
        elif near := difflib.get_close_matches(name, [*OWN_NAMES, *columns], n=1):
            fix = f"Did you mean {near[0]}?"
        else:
            fix = "Give it a default, or rename it."
        return Problem(
            f"its parameter {name} has no default and is not a column of the data (a batch has {given})", fix
        )

    def ask(self, number: int, positional: list, keywords: Batch, count: int, timeout_s: float) -> Callable[[], Reply]:
        """See `hybrid.rewards.function.Caller`."""
        try:
            process = self._process(number)
            about = process.about()
            if "parameters" not in about:
                raise Ended("started again, it fails: " + " ".join(self._told(about)[:2]))
            process.send(positional, keywords, count, timeout_s)
        except (Hung, Ended) as failed:
            return self._failed(number, failed)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
            told = {"kind": "arguments", "type": type(error).__name__, "text": str(error)}
            return lambda: {"raised": told | {"where": " (its arguments cannot be sent to its process)"}}

        def reply() -> Reply:
            try:
                return process.receive(timeout_s)
            except (Hung, Ended) as failed:
                return self._failed(number, failed)()

        return reply

    def close(self) -> None:
        """End its processes. May be called twice."""
        self.closed = True
        for number, process in enumerate(self._processes):
            if process is not None:
                process.close()
            self._processes[number] = None

    def _start(self) -> Process:
        return Process(str(self.file), self.function_name, self._start_s)

    def _process(self, number: int) -> Process:
        if self.closed:
            raise Ended("the run is over")
        process = self._processes[number] or self._start()
        self._processes[number] = process
        return process

    def _failed(self, number: int, failed: Hung | Ended) -> Callable[[], Reply]:
        if process := self._processes[number]:
            process.close(at_once=True)
        self._processes[number] = None
        kind = "hung" if isinstance(failed, Hung) else "ended"
        return lambda: {kind: str(failed)}

    def _told(self, about: dict[str, Any]) -> Problem:
        if "syntax" in about:
            why = f"{about['file']}, line {about['line']}, is not valid Python ({about['syntax']})"
            return Problem(why, "Correct the file.")
        if "raised" in about:
            error = about["raised"]
            text = f"{error['type']}: {error['text']}{error['where']}"
            if about["ends"]:
                return Problem(f"importing {self.file.name} ends the program: {text}", GUARD, ends_program=True)
            return Problem(f"{self.file} does not run: {text}", "Correct the file, or install what it needs.")
        if "names" in about:
            names = about["names"]
            near = difflib.get_close_matches(self.function_name, names, n=1)
            fix = f"Did you mean {near[0]}?" if near else f"It defines {', '.join(names) or 'nothing'}."
            return Problem(f"{self.file.name} defines no {self.function_name}", fix)
        if "not_function" in about:
            fix = f"Name a function, or an object that can be called, such as the one of {self.function_name}()."
            return Problem(f"{self.function_name} is {about['not_function']}", fix)
        return Problem(f"its parameters cannot be read ({about['no_signature']})", f"Wrap it in {self._example()}.")

    def _signature(self) -> Problem | None:
        shown = ", ".join(p.name for p in self.parameters) or "none"
        if not accepts(self.parameters, "responses"):
            return Problem(f"it does not take responses: its parameters are {shown}", f"Write {self._example()}.")
        named = any(p.name == "responses" for p in self.parameters)
        foreign = [name for name in missing(self.parameters, OWN_NAMES) if name in FOREIGN]
        if foreign and not named:
            why = f"its parameter {foreign[0]} has no default, and the responses are called responses here"
            return Problem(why, f"Rename it, or write {self._example()}.")
        return None

    def _example(self) -> str:
        return f"def {self.function_name}(prompts, responses, labels, **columns)"
