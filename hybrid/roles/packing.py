"""Rows to packed micro-batches: no padding, the prompt of a group encoded once, logits only where a response token is predicted.

A packed batch is one sequence of N tokens made of segments. A segment is a prompt followed by the responses to it; every response
continues the positions of its prompt and sees only the prompt and itself. With one response per segment this is ordinary varlen packing,
which flash attention runs; with several it is the shared-prefix layout, which `attention.py` runs.

The last token of a response predicts nothing that is used, so it is not fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Row:
    """One sample as the trainer sees it."""

    group: int
    """Rows with equal group have the same prompt."""
    prompt: Sequence[int] | np.ndarray
    response: Sequence[int] | np.ndarray
    """Token ids."""


@dataclass(frozen=True)
class Segment:
    """A prompt and its responses inside the packed sequence."""

    start: int
    prompt: int
    """Prompt tokens."""
    responses: tuple[int, ...]
    """Tokens fed of each response."""

    @property
    def length(self) -> int:
        return self.prompt + sum(self.responses)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: the prompt with one response."""
        return self.prompt + max(self.responses, default=0)


@dataclass
class PackedBatch:
    """R is the number of response tokens of all rows, in row order."""

    input_ids_N: torch.Tensor
    position_ids_N: torch.Tensor
    segments: list[Segment]
    predict_R: torch.Tensor
    """Index into N of the token whose hidden state predicts each response token."""
    targets_R: torch.Tensor
    row_lengths: list[int]
    """Response tokens of each row; they sum to R."""

    def to(self, device: torch.device) -> PackedBatch:
        tensors = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("input_ids_N", "position_ids_N", "predict_R", "targets_R")
        }
        return PackedBatch(**tensors, segments=self.segments, row_lengths=self.row_lengths)

    def positions_R(self) -> torch.Tensor:
        """How many tokens of its response come before each response token."""
        return torch.cat([torch.arange(n) for n in self.row_lengths]).to(self.targets_R.device)

    def varlen_kwargs(self) -> dict:
        """Arguments with which flash attention reads the segments as separate sequences (one response each)."""
        ends = [0, *(s.start + s.length for s in self.segments)]
        cu = torch.tensor(ends, dtype=torch.int32, device=self.input_ids_N.device)
        longest = max(s.length for s in self.segments)
        return {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}


def pack(rows: list[Row], share_prompts: bool) -> PackedBatch:
    """Pack `rows` in their order of first appearance by group; results keep the order of `rows`."""
    groups: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group if share_prompts else index, []).append(index)
    ids: list[Sequence[int] | np.ndarray] = []
    positions: list[np.ndarray] = []
    segments: list[Segment] = []
    predict: list[np.ndarray] = [np.empty(0)] * len(rows)
    end = 0
    for members in groups.values():
        prompt = rows[members[0]].prompt
        start, end = end, end + len(prompt)
        last_of_prompt = end - 1
        ids.append(prompt)
        positions.append(np.arange(len(prompt)))
        fed_lengths = []
        for index in members:
            response = rows[index].response
            fed = response[:-1]
            predict[index] = np.append(last_of_prompt, np.arange(end, end + len(fed)))[: len(response)]
            ids.append(fed)
            positions.append(np.arange(len(prompt), len(prompt) + len(fed)))
            fed_lengths.append(len(fed))
            end += len(fed)
        segments.append(Segment(start, len(prompt), tuple(fed_lengths)))
    return PackedBatch(
        input_ids_N=_joined(ids),
        position_ids_N=_joined(positions),
        segments=segments,
        predict_R=_joined(predict),
        targets_R=_joined([row.response for row in rows]),
        row_lengths=[len(row.response) for row in rows],
    )


def _joined(parts: Sequence[Sequence[int] | np.ndarray]) -> torch.Tensor:
    """int64 of `parts`, one after another."""
    return torch.from_numpy(np.concatenate([np.asarray(part, np.int64) for part in parts]))


def to_rows(values_R: torch.Tensor, row_lengths: list[int], width: int) -> torch.Tensor:
    """Values of response tokens, R, as a B x T tensor (T = `width`), zero beyond each row's end. Keeps the graph."""
    mask_BT = lengths_mask(row_lengths, width, values_R.device)
    out_BT = values_R.new_zeros(mask_BT.shape)
    return out_BT.masked_scatter(mask_BT, values_R)


def column(rows: Sequence, name: str, batch: PackedBatch) -> torch.Tensor:
    """Attribute `name` of `rows`, one float per response token each, as a B x T tensor on the batch's device."""
    values_R = torch.from_numpy(np.concatenate([getattr(row, name) for row in rows])).to(batch.targets_R.device)
    return to_rows(values_R, batch.row_lengths, max(batch.row_lengths))


def lengths_mask(lengths: list[int], width: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """B x `width` booleans, True on the first `lengths[b]` columns of row b."""
    lengths_B = torch.tensor(lengths, device=device)
    return torch.arange(width, device=device)[None, :] < lengths_B[:, None]
