"""Which engine answers which prompt, in what order and with which seed: pure functions, so that a run repeats."""

from __future__ import annotations

import hashlib


def assign(lengths: list[int], engines: int, step: int) -> list[list[int]]:
    """Cut prompts of `lengths` tokens over `engines`: indices of each engine's prompts, ascending.

    Longest first to the engine with the fewest tokens (LPT, Graham 1969: at most 4/3 of the best cut), ties to the one with the fewest
    prompts. Equal engines take turns with the step.
    """
    load = [(0, 0, (e - step) % engines) for e in range(engines)]
    shares: list[list[int]] = [[] for _ in range(engines)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        engine = min(range(engines), key=load.__getitem__)
        tokens, prompts, turn = load[engine]
        load[engine] = (tokens + lengths[index], prompts + 1, turn)
        shares[engine].append(index)
    return [sorted(share) for share in shares]


def request_seed(seed: int, step: int, prompt_index: int) -> int:
    """Seed of one prompt's draws, in [0, 2^62): of its n responses, response i draws with this + i."""
    return _hash("request", seed, step, prompt_index)


def engine_seed(seed: int, step: int, engine: int, round_: int = 0) -> int:
    """Seed of an engine's own generator for one round of a step, in [0, 2^32): cheaper than one per request, but repeats only as
    batching does."""
    return _hash("engine", seed, step, engine, round_) % 2**32


def _hash(*parts) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 2
