"""The reward model: one score per prompt and response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from hybrid.roles.models import load_reward_model
from hybrid.roles.packing import Row
from hybrid.roles.worker import ModelWorker
from hybrid.roles.zero import FrozenModel
from hybrid.tokenizer import load_tokenizer

NO_TOKEN = -1
"""A pad id that equals no token."""


class RewardWorker(ModelWorker):
    """A sequence-classification model with one label, run on padded rows: it may be any architecture, encoders included."""

    read_only = True
    pads = True
    """Whether rows of unlike length may share a batch; see `padding_is_exact`."""

    def load(
        self, path: str, dtype: torch.dtype, actor_path: str, token_budget: int, trust_remote_code: bool
    ) -> dict[str, int]:
        """Load and return the bytes of each part. Text is re-encoded when the tokenizers of actor and reward model differ."""
        model = load_reward_model(path, dtype, trust_remote_code, self.device)
        self.tokenizer = load_tokenizer(path, trust_remote_code, "reward.model")
        self.actor_tokenizer = load_tokenizer(actor_path, trust_remote_code)
        self.same_tokens = self.tokenizer.get_vocab() == self.actor_tokenizer.get_vocab()
        self.token_budget = token_budget
        self.model = FrozenModel(model.to(self.device), 0, dtype)
        self.pads = padding_is_exact(self.model, self.device, dtype)
        return self.settle()

    def score(self, micros: Iterable[Sequence[Row]]) -> np.ndarray:
        """float32 score of each row, prompt and response in the actor's tokens, in the order of `micros`; how they are cut is of no
        matter."""
        sequences = [np.concatenate([row.prompt, row.response]).tolist() for rows in micros for row in rows]
        rows = sequences if self.same_tokens else self._reencode(sequences)
        scores = [0.0] * len(rows)
        for batch in by_length([len(row) for row in rows], self.token_budget, mixed=self.pads):
            for index, value in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                scores[index] = value
        return np.array(scores, np.float32)

    def _forward(self, rows: list[list[int]]) -> list[float]:
        return score_rows(self.model, rows, self.device)

    def _reencode(self, sequences: list[list[int]]) -> list[list[int]]:
        texts = self.actor_tokenizer.batch_decode(sequences, skip_special_tokens=False)
        return [self.tokenizer(text, add_special_tokens=False)["input_ids"] or [0] for text in texts]


def score_rows(model: FrozenModel, rows: list[list[int]], device: torch.device) -> list[float]:
    """The score of each row, read by the model's own pooling at the last token of the row, from one padded pass.

    Decoders find that token by its id, as the last that differs from the pad id, though the pad token is often the end token of the row.
    Rows are therefore padded on the right with an id that none of them has.
    """
    width = max(len(row) for row in rows)
    config = model.module.config.get_text_config()
    pad = NO_TOKEN
    if any(len(row) < width for row in rows):
        used = {token for row in rows for token in row}
        pad = next((token for token in range(config.vocab_size) if token not in used), NO_TOKEN)
        if pad == NO_TOKEN:  # the rows have all tokens there are
            return [score_rows(model, [row], device)[0] for row in rows]
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for line, row in enumerate(rows):
        ids[line, : len(row)] = torch.tensor(row)
        mask[line, : len(row)] = 1
    config.pad_token_id = pad
    logits = model.forward(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
    return logits[:, 0].float().tolist()


def padding_is_exact(model: FrozenModel, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a row's score in a padded batch is its score alone: not so where a model reads the last column, or averages over padding.

    Found by trying, as neither config nor class says it. Where it is not, rows of one length are scored together.
    """
    size = model.module.config.get_text_config().vocab_size
    rows = [[(7 * i + 3) % size for i in range(length)] for length in (3, 5, 12)]
    alone = torch.tensor([score_rows(model, [row], device)[0] for row in rows])
    together = torch.tensor(score_rows(model, rows, device))
    bound = 1e-3 if dtype == torch.float32 else 5e-2  # of the scores' size: shapes of a pass change its last bits
    return bool(((alone - together).abs() <= bound * alone.abs().max()).all())


def by_length(lengths: list[int], token_budget: int, mixed: bool = True) -> list[list[int]]:
    """Indices of rows in batches whose padded size keeps to `token_budget`; a longer row comes alone.

    `mixed`: lengths in a batch are similar; else they are equal.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        fits = batches and (len(batches[-1]) + 1) * lengths[index] <= token_budget
        if fits and (mixed or lengths[batches[-1][0]] == lengths[index]):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
