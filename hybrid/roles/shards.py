"""Rows on their way to a rank and numbers on their way back: flat arrays, so that what travels is the numbers and little more.

A tensor or array that is a view must never be sent: pickling it pickles all that it is a view of.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch

from hybrid.data.batches import Plan
from hybrid.roles.packing import Row

WORD = np.dtype(np.int32)
"""Every number takes 4 bytes: ids and counts as int32, floats as float32."""
COUNTS = ("micros", "groups", "prompt_starts", "prompt_of", "response_starts", "is_fresh")
"""Columns of which there is a number for each micro-batch, prompt or row, not for each token."""


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of one rank in one call: iterating gives its micro-batches. A prompt that rows of a group share is in it once.

    All columns lie one after another in one buffer, which Ray copies once, from here into its store; a rank's rows are views of it.
    """

    kind: type
    """The type of the rows: `Row`, `PolicyRow` or `ValueRow`."""
    lengths: dict[str, int]
    """Numbers in each column, in the order of `words`."""
    words: np.ndarray
    """int32; a column of floats is float32 in the same place."""

    def __iter__(self) -> Iterator[list[Any]]:
        """The rows of each micro-batch. Their arrays are read-only where Ray delivered them."""
        columns = self.columns()
        floats = {name: columns[name] for name in float_columns(self.kind) if name in columns}
        counts = {name: columns[name].tolist() for name in COUNTS if name in columns}
        micros, prompt_starts, starts = counts["micros"], counts["prompt_starts"], counts["response_starts"]

        def row(b: int) -> Any:
            p, tokens = counts["prompt_of"][b], slice(starts[b], starts[b + 1])
            prompt = columns["prompts"][prompt_starts[p] : prompt_starts[p + 1]]
            row = Row(counts["groups"][p], prompt, columns["responses"][tokens])
            if self.kind is Row:
                return row
            flags = {"is_fresh": bool(counts["is_fresh"][b])} if "is_fresh" in counts else {}
            return self.kind(row=row, **{name: column[tokens] for name, column in floats.items()}, **flags)

        for first, end in pairwise(micros):
            yield [row(b) for b in range(first, end)]

    def columns(self) -> dict[str, np.ndarray]:
        """Views of `words` by name."""
        floats = float_columns(self.kind)
        ends = np.cumsum(list(self.lengths.values()))
        parts = zip(self.lengths, np.split(self.words, ends[:-1]), strict=True)
        return {name: part.view(np.float32) if name in floats else part for name, part in parts}


@cache
def float_columns(kind: type) -> tuple[str, ...]:
    """Fields of a row that hold one float per response token."""
    return () if kind is Row else tuple(f.name for f in fields(kind) if f.name not in ("row", "is_fresh"))


def flatten(micros: Sequence[Sequence[Any]]) -> Shard:
    """The rows of `micros`, all of one kind, as they are sent."""
    trained = list(chain.from_iterable(micros))
    kind = type(trained[0]) if trained else Row
    rows: list[Row] = trained if kind is Row else [r.row for r in trained]
    prompts = {row.group: row.prompt for row in rows}
    number = {group: p for p, group in enumerate(prompts)}
    columns: dict[str, list] = {
        "micros": [_starts(micros)],
        "groups": [list(prompts)],
        "prompt_starts": [_starts(prompts.values())],
        "prompt_of": [[number[row.group] for row in rows]],
        "response_starts": [_starts([row.response for row in rows])],
        "prompts": list(prompts.values()),
        "responses": [row.response for row in rows],
    }
    for name in float_columns(kind):
        if getattr(trained[0], name) is not None:
            columns[name] = [getattr(row, name) for row in trained]
    if "is_fresh" in {f.name for f in fields(kind)}:
        columns["is_fresh"] = [[row.is_fresh for row in trained]]
    lengths = {name: sum(map(len, parts)) for name, parts in columns.items() if name not in float_columns(kind)}
    lengths |= {name: lengths["responses"] for name in columns if name in float_columns(kind)}
    shard = Shard(kind, lengths, np.empty(sum(lengths.values()), WORD))
    for name, column in shard.columns().items():
        if not len(column):
            continue
        if name in float_columns(kind):
            torch.cat(columns[name], out=torch.from_numpy(column))
        else:
            np.concatenate([np.asarray(part, WORD) for part in columns[name]], out=column)
    return shard


def shard(plan: Plan, rows: Sequence[Any]) -> Iterator[Shard]:
    """`rows` as `plan` lays them out, a shard for each rank. Each is made when it is asked for: where each is sent at once, only one is
    in this process."""
    return (flatten([[rows[i] for i in micro] for micro in rank]) for rank in plan)


def flat(values: Sequence[torch.Tensor]) -> np.ndarray:
    """float32 of `values`, one after another: what a rank answers with."""
    return torch.cat([torch.empty(0), *values]).numpy()


def unshard(plan: Plan, lengths: Sequence[int], answers: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Ranks' flat answers to a call of `shard`, as a float32 tensor of `lengths[i]` numbers for each row i: views, to be read only."""
    rows: list[torch.Tensor] = [torch.empty(0)] * len(lengths)
    for rank, answer in zip(plan, answers, strict=True):
        numbers = list(chain.from_iterable(rank))
        sizes = [lengths[i] for i in numbers]
        if sum(sizes) != len(answer):
            raise ValueError(f"A rank answered {len(answer)} numbers to rows of {sum(sizes)}.")
        for i, part in zip(numbers, _tensor(answer).split(sizes), strict=True):
            rows[i] = part
    return rows


def _tensor(answer: np.ndarray) -> torch.Tensor:
    """`answer` without a copy. It lies in Ray's store, where numpy calls it read-only; torch would warn of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(answer)


def _starts(parts: Any) -> np.ndarray:
    return _starts_of([len(part) for part in parts])


def _starts_of(lengths: Sequence[int]) -> np.ndarray:
    """Where each part begins in the flat array, and where the last ends."""
    return np.cumsum([0, *lengths])
