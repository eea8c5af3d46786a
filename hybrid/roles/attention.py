"""Attention over packed segments whose responses share their prompt (`packing.py`).

Registered with transformers under `NAMES`, so any model that uses its attention interface runs packed. The prompt's keys and values are
computed once per group and their gradients add up over the responses, as if each response had had its own copy.

Two ways compute a layer: scaled_dot_product_attention, segment by segment, and on CUDA one call for all (`varlen.py`) where its kernel
takes the layer. For the first, layers that see only near tokens get a mask per segment (`reach.py`). Soft caps and sinks change the
softmax itself, for which neither has an argument: such layers make the table of scores (`scores.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from hybrid.config.architectures import ANOTHER, scores_on_cuda
from hybrid.errors import NotExact
from hybrid.roles.packing import Segment
from hybrid.roles.reach import Reach, own_mask, reach_of_mask, segment_mask
from hybrid.roles.scores import attend_by_scores
from hybrid.roles.varlen import Pieces, attend_varlen, pieces_of, takes

NAMES = {"sdpa": "hybrid_packed", "varlen": "hybrid_packed_varlen"}
"""model.attention -> its name in transformers; all share prompts."""

ONE_CALL_TOKENS = 512
"""Up to this length a segment is one masked call; beyond it the masked-out half would cost more than extra calls."""

UNREAD = ("position_bias", "indices", "block_indices")
"""Arguments of models' attention that change who sees whom, and that the packed path does not compute."""

_ran: list[set[int]] = []
"""Innermost last: the modules whose attention ran packed, by id."""
_planned_device: list[str] = []
"""The device that a pass is planned for, while it is traced on another."""
RECORDED = set(NAMES.values())
"""Attention functions that call `record`."""


def record(module: torch.nn.Module) -> None:
    """Note that the attention of `module` runs packed."""
    if _ran:
        _ran[-1].add(id(module))


@contextmanager
def modules_that_ran() -> Iterator[set[int]]:
    """The ids of the modules whose attention runs packed inside."""
    _ran.append(set())
    try:
        yield _ran[-1]
    finally:
        _ran.pop()


@contextmanager
def planned_for(device: str) -> Iterator[None]:
    """Refuse inside what `device` cannot run, wherever the tensors are."""
    _planned_device.append(device)
    try:
        yield
    finally:
        _planned_device.pop()


def layout(name: str, segments: list[Segment], device: torch.device) -> dict[str, Any]:
    """Arguments of a model whose attention is registered under `name`: who is packed with whom."""
    pieces = {"packed_pieces": pieces_of(segments, device)} if name == NAMES["varlen"] else {}
    return {"packed_segments": segments, **pieces}


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Reach | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    packed_segments: list[Segment] | None = None,
    packed_pieces: Pieces | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """`query` 1 x heads x N x D, `key` 1 x kv_heads x N x D and `value` 1 x kv_heads x N x E; returns 1 x N x heads x E.

    Raises `NotExact` for attention variants that the packed path does not compute.
    """
    if packed_segments is None:
        raise NotExact(
            f"{type(module).__name__} is not told which rows are packed, as its model drops arguments. {ANOTHER}"
        )
    record(module)
    longest = max(segment.longest for segment in packed_segments)
    reach = _reach(module, attention_mask, kwargs, longest)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    by_scores = softcap is not None or sinks is not None
    if by_scores and (_planned_device[-1] if _planned_device else query.device.type) == "cuda":
        raise NotExact(scores_on_cuda("soft caps" if softcap is not None else "sinks"))
    if packed_pieces is not None and not by_scores:
        cut_reach = reach if reach and reach.cuts(longest) else None
        if takes(query, key, value, dropout, cut_reach):
            window = cut_reach.size if cut_reach else None
            return attend_varlen(query, key, value, packed_pieces, window, scaling).contiguous(), None
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) if repeats > 1 else t for t in (key, value))
    # Cut by `split`, whose gradient is one concatenation; that of a slice is as long as the whole batch, for every slice.
    lengths = [segment.length for segment in packed_segments]
    attend = attend_by_scores if by_scores else scaled_dot_product_attention
    options = {"scale": scaling, "dropout_p": dropout} | ({"softcap": softcap, "sinks": sinks} if by_scores else {})
    outputs = []
    for segment, *own in zip(packed_segments, *(t.split(lengths, dim=2) for t in (query, key, value)), strict=True):
        cut = _one_call if segment.length <= ONE_CALL_TOKENS else _call_per_response
        outputs.append(cut(attend, *own, segment, reach if reach and reach.cuts(segment.longest) else None, options))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _reach(module: torch.nn.Module, mask: Reach | None, kwargs: dict, longest: int) -> Reach | None:
    """How far the layer sees, of sequences of at most `longest` tokens."""
    name = type(module).__name__
    if mask is not None and not isinstance(mask, Reach):
        raise NotExact(f"{name} makes an attention mask of its own, which packed attention does not read. {ANOTHER}")
    unread = [argument for argument in UNREAD if kwargs.get(argument) is not None]
    if unread:
        raise NotExact(f"{name} passes {', '.join(unread)}, which packed attention does not read. {ANOTHER}")
    window = kwargs.get("sliding_window")
    if window is not None and window < longest and (mask is None or mask.size != window):
        raise NotExact(f"{name} slides over {window} tokens, but its mask does not. {ANOTHER}")
    return mask


def _one_call(attend, query, key, value, segment: Segment, reach: Reach | None, options: dict):
    if len(segment.responses) <= 1 and reach is None:
        return attend(query, key, value, is_causal=True, **options)
    return attend(query, key, value, attn_mask=segment_mask(segment, reach, query.device), **options)


def _call_per_response(attend, query, key, value, segment: Segment, reach: Reach | None, options: dict):
    lengths = [segment.prompt, *segment.responses]
    (query, *queries), (key, *keys), (value, *values) = (t.split(lengths, dim=2) for t in (query, key, value))
    who = {"is_causal": True} if reach is None else {"attn_mask": own_mask(0, segment.prompt, reach, query.device)}
    outputs = [attend(query, key, value, **who, **options)]
    for own_query, own_key, own_value in zip(queries, keys, values):
        mask = own_mask(segment.prompt, own_query.shape[2], reach, query.device)
        all_keys, all_values = torch.cat([key, own_key], dim=2), torch.cat([value, own_value], dim=2)
        outputs.append(attend(own_query, all_keys, all_values, attn_mask=mask, **options))
    return torch.cat(outputs, dim=2)


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in NAMES.values():
        AttentionInterface.register(name, packed_attention)
        AttentionMaskInterface.register(name, reach_of_mask)


with suppress(ModuleNotFoundError):  # the doctor calls `packed_attention` on machines without transformers
    _register()
