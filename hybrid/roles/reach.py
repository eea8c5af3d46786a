"""How far the tokens of a layer see, and the masks of packed segments that follow from it.

transformers describes a layer's mask by a size and a kind. The packed attention keeps that description and no N x N table: positions
count from the start of each sequence, and a sequence is a prompt with one of its responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from hybrid.config.architectures import ANOTHER
from hybrid.errors import NotExact
from hybrid.roles.packing import Segment


@dataclass(frozen=True)
class Reach:
    """A token sees the last `size` tokens, itself among them; where `chunked`, those before it in its own chunk of `size` tokens."""

    size: int
    chunked: bool = False

    def cuts(self, length: int) -> bool:
        """Whether a sequence of `length` tokens has one that does not see all before it."""
        return length > self.size

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Booleans for positions of queries and keys that broadcast; future keys are not hidden here. As `sliding_window_overlay` and
        `chunked_overlay` of transformers."""
        return key // self.size == query // self.size if self.chunked else key > query - self.size


def reach_of_mask(
    *, config: Any, local_size: int | None = None, use_vmap: bool = False, mask_function: Any = None, **kwargs: Any
) -> Reach | None:
    """Stands for transformers' mask functions: what the attention of a layer then gets as its mask. None: all tokens before it.

    Raises `NotExact` for masks that are not causal, or that a model composes itself.
    """
    if use_vmap or "allow_is_bidirectional_skip" in kwargs:
        kind = "an attention mask of its own" if use_vmap else "attention in both directions"
        raise NotExact(f"{config.model_type} has {kind}, which packed attention does not compute. {ANOTHER}")
    if local_size is None:
        return None
    slides, chunks = (getattr(config, name, None) == local_size for name in ("sliding_window", "attention_chunk_size"))
    if slides and chunks:
        raise NotExact(
            f"{config.model_type} has windows and chunks of one size, {local_size}, which packed attention cannot tell apart. {ANOTHER}"
        )
    return Reach(local_size, chunked=chunks)


@lru_cache(maxsize=64)
def segment_mask(segment: Segment, reach: Reach | None, device: torch.device) -> torch.Tensor:
    """S x S booleans: a token sees itself, what came before it in its own response, and its prompt, as far as `reach`."""
    owner = [0] * segment.prompt
    position = list(range(segment.prompt))
    for number, length in enumerate(segment.responses, start=1):
        owner += [number] * length
        position += range(segment.prompt, segment.prompt + length)
    owner_S = torch.tensor(owner, device=device)
    causal_SS = torch.ones(len(owner), len(owner), dtype=torch.bool, device=device).tril()
    mask_SS = causal_SS & ((owner_S[None, :] == 0) | (owner_S[None, :] == owner_S[:, None]))
    if reach is None:
        return mask_SS
    position_S = torch.tensor(position, device=device)
    return mask_SS & reach.sees(position_S[:, None], position_S[None, :])


def own_mask(before: int, length: int, reach: Reach | None, device: torch.device) -> torch.Tensor:
    """L x (before + L) booleans for the last L tokens of a sequence."""
    mask_LK = torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
    if reach is None:
        return mask_LK
    position_K = torch.arange(before + length, device=device)
    return mask_LK & reach.sees(position_K[before:, None], position_K[None, :])
