"""A reward function under supervision: called once per batch, with a deadline, sync or async."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hybrid.errors import RewardError


@dataclass(frozen=True)
class RewardFunction:
    """`call(prompts=, responses=, labels=, **columns)` gives a score per sample, within `timeout_s` seconds."""

    name: str
    call: Callable[..., Any]
    timeout_s: float

    def __call__(
        self, prompts: list[str], responses: list[str], labels: list[Any], columns: dict[str, list[Any]]
    ) -> Any:
        """What the function returned, unchecked. Raises `RewardError` when it raises or does not end in time."""
        arguments = {"prompts": prompts, "responses": responses, "labels": labels, **self._accepted(columns)}
        outcome: dict[str, Any] = {}

        def run() -> None:
            try:
                outcome["value"] = self._run(arguments)
            except BaseException as error:
                outcome["error"] = error

        # A daemon: a function that hangs cannot be killed, but it must not keep the process from ending.
        thread = threading.Thread(target=run, name=f"reward {self.name}", daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if "error" in outcome:
            error = outcome["error"]
            raise RewardError(f"Reward {self.name} raised {type(error).__name__}: {error}") from error
        if "value" not in outcome:
            raise RewardError(
                f"Reward {self.name} did not end within reward.timeout_s={self.timeout_s:g} s for {len(responses)} samples. "
                "Raise the limit, or give its slow parts a timeout of their own."
            )
        return outcome["value"]

    def _run(self, arguments: dict[str, Any]) -> Any:
        value = self.call(**arguments)
        return asyncio.run(_await(value)) if inspect.isawaitable(value) else value

    def _accepted(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """The columns that the function names, or all when it takes `**columns`."""
        parameters = inspect.signature(self.call).parameters.values()
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
            return columns
        names = {p.name for p in parameters}
        return {name: values for name, values in columns.items() if name in names}


async def _await(value: Any) -> Any:
    return await value
