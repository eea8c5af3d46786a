"""An `Engine` in a process of its own, without Ray: vLLM allows one engine a process, and checks want several."""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

from hybrid.errors import DeadlineExceeded
from hybrid.leftovers import make_temp_folder, remove, shared_files, tree, use_temp_folder
from hybrid.rollout.engine import Engine
from hybrid.rollout.requests import EngineOptions

ANSWER_WITHIN_S = 300


class ReusedEngine(Engine):
    """An engine that can become another one: a process imports vLLM once for many models."""

    def become(self, options: EngineOptions) -> None:
        """Stop, where it has started, and start with `options`."""
        if hasattr(self, "llm"):
            self.stop()
            del self.llm
            gc.collect()
        Engine.__init__(self, options)
        self.start()

    def checksums(self) -> dict[str, str]:
        """A hash of every tensor of vLLM's model, over all workers; all weights go through host memory."""
        return {
            name: each
            for worker in self.llm.collective_rpc("compute_weight_checksums")
            for name, each in worker.items()
        }

    def zero_weights(self) -> None:
        """Set all weights to zero, so that a sync which brings nothing is found."""
        self.llm.collective_rpc("reset_weights")


class EngineProcess:
    """Has the methods of `Engine`; each runs over there and returns, or raises, what it did. A context manager that ends the process."""

    def __init__(self, options: EngineOptions):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._temp = make_temp_folder()
        self._process = context.Process(target=_serve, args=(theirs, options, str(self._temp)))
        self._process.start()

    def __getattr__(self, method: str) -> Any:
        def call(*args, **kwargs):
            self._pipe.send((method, args, kwargs))
            if not self._pipe.poll(ANSWER_WITHIN_S):
                raise DeadlineExceeded(f"The engine did not answer `{method}` within {ANSWER_WITHIN_S} s.")
            error, value = self._pipe.recv()
            if error is not None:
                raise error
            return value

        return call

    def __enter__(self) -> EngineProcess:
        try:
            self.start()
        except BaseException as error:
            self.__exit__(error)
            raise
        return self

    def __exit__(self, *_error) -> None:
        processes = tree(self._process.pid)
        files = shared_files(processes)
        try:
            if _error == (None, None, None):
                self.stop()
            self._pipe.send(None)
            self._process.join(20)
        finally:
            self._process.kill()
            self._process.join()
            remove(processes, files, self._temp)


def _serve(pipe, options: EngineOptions, temp: str) -> None:
    use_temp_folder(temp)
    engine = ReusedEngine(options)
    while (call := pipe.recv()) is not None:
        method, args, kwargs = call
        try:
            pipe.send((None, getattr(engine, method)(*args, **kwargs)))
        except Exception as error:
            error.__cause__ = None
            pipe.send((error, None))
