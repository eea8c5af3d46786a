"""Memory and time of `chunked_logprobs` over the plain computation: forward and backward, gradients of hidden states and head.

    python tests/benchmarks/chunked_logprobs.py [--vocabulary 150000] [--tokens 4096] [--hidden 576] [--rounds 3]

Plain: the head once over all tokens, `log_softmax`, `gather`; with entropy, `-(p log p)` summed. Memory is the highest above what the
process held before (resident on CPU, allocated on CUDA). Time is the least of the rounds, the two taking turns: other work on the
machine only adds. The bounds are those of the project: a third of the memory, 1.25 x the time. Exits with status 1 beyond them.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import psutil
import torch
from torch import nn

from hybrid.algorithms.logprobs import chunked_logprobs, tokens_per_chunk

MOST_MEMORY, MOST_TIME = 1 / 3, 1.25


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("vocabulary", 150_000), ("tokens", 4096), ("hidden", 576), ("rounds", 3)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    options = arguments.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    head = nn.Linear(options.hidden, options.vocabulary, bias=False, device=device)
    hidden_NH = torch.randn(options.tokens, options.hidden, device=device, requires_grad=True)
    targets_N = torch.randint(options.vocabulary, (options.tokens,), device=device)
    beyond = False
    for with_entropy in (False, True):
        runs = {
            name: partial(function, head, hidden_NH, targets_N, with_entropy)
            for name, function in (("plain", _plain), ("chunked", _chunked))
        }
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                head.weight.grad = hidden_NH.grad = None
                figures[name].append(_measure(run, device))
        seconds = {name: min(t for t, _ in rows) for name, rows in figures.items()}
        memory = {name: max(m for _, m in rows) for name, rows in figures.items()}
        time_ratio, memory_ratio = (of["chunked"] / of["plain"] for of in (seconds, memory))
        beyond |= time_ratio > MOST_TIME or memory_ratio > MOST_MEMORY
        print(
            f"{'with' if with_entropy else 'without'} entropy: plain {seconds['plain']:.2f} s, {memory['plain'] / 2**30:.2f} GiB; chunked "
            f"{seconds['chunked']:.2f} s, {memory['chunked'] / 2**30:.2f} GiB; time {time_ratio:.2f} x, memory {memory_ratio:.2f} x",
            flush=True,
        )
    sys.exit(beyond)


def _plain(head, hidden_NH, targets_N, with_entropy) -> None:
    log_softmax_NV = head(hidden_NH).float().log_softmax(-1)
    loss = log_softmax_NV.gather(-1, targets_N[:, None]).sum()
    if with_entropy:
        loss = loss - 0.01 * (log_softmax_NV.exp() * log_softmax_NV).sum()
    loss.backward()


def _chunked(head, hidden_NH, targets_N, with_entropy) -> None:
    chunk = tokens_per_chunk(head.out_features, hidden_NH.element_size())
    logprobs_N, entropies_N = chunked_logprobs(hidden_NH, head, targets_N, 1.0, chunk, with_entropy=with_entropy)
    loss = logprobs_N.sum()
    if with_entropy:
        loss = loss + 0.01 * entropies_N.sum()
    loss.backward()


def _measure(run: Callable[[], None], device: str) -> tuple[float, float]:
    """Seconds and the highest bytes above those at the start."""
    peak = _CudaPeak() if device == "cuda" else _ResidentPeak()
    started = time.perf_counter()
    run()
    return time.perf_counter() - started, peak.stop()


class _CudaPeak:
    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()

    def stop(self) -> float:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.before


class _ResidentPeak:
    def __init__(self) -> None:
        self.process = psutil.Process()
        self.before = self.highest = self.process.memory_info().rss
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while not self.done.wait(0.005):
            self.highest = max(self.highest, self.process.memory_info().rss)

    def stop(self) -> float:
        self.done.set()
        self.thread.join()
        return self.highest - self.before


if __name__ == "__main__":
    main()
