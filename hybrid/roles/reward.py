"""The reward model: one score per prompt and response."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import AutoTokenizer

from hybrid.roles.models import load_reward_model
from hybrid.roles.packing import Row
from hybrid.roles.worker import ModelWorker
from hybrid.roles.zero import FrozenModel, load_partitioned


class RewardWorker(ModelWorker):
    """A sequence-classification model with one label, run on padded rows: it may be any architecture, encoders included."""

    read_only = True

    def load(
        self, path: str, dtype: torch.dtype, actor_path: str, token_budget: int, trust_remote_code: bool
    ) -> dict[str, int]:
        """Load and return the bytes of each part. Text is re-encoded when the tokenizers of actor and reward model differ."""
        model = load_partitioned(0, dtype, lambda: load_reward_model(path, dtype, trust_remote_code))
        self.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        self.actor_tokenizer = AutoTokenizer.from_pretrained(actor_path, trust_remote_code=trust_remote_code)
        self.same_tokens = self.tokenizer.get_vocab() == self.actor_tokenizer.get_vocab()
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        # Sequence classifiers find a row's last token by the pad id, which therefore must not be None.
        model.config.pad_token_id = self.tokenizer.pad_token_id
        self.token_budget = token_budget
        self.model = FrozenModel(model.to(self.device), 0, dtype)
        return self.settle()

    def score(self, micros: Sequence[Sequence[Row]]) -> np.ndarray:
        """float32 score of each row, prompt and response in the actor's tokens, in the order of `micros`; how they are cut is of no
        matter."""
        sequences = [np.concatenate([row.prompt, row.response]).tolist() for rows in micros for row in rows]
        rows = sequences if self.same_tokens else self._reencode(sequences)
        scores = [0.0] * len(rows)
        for batch in by_length([len(row) for row in rows], self.token_budget):
            for index, value in zip(batch, self._forward([rows[i] for i in batch]), strict=True):
                scores[index] = value
        return np.array(scores, np.float32)

    def _forward(self, rows: list[list[int]]) -> list[float]:
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for line, row in enumerate(rows):
            ids[line, : len(row)] = torch.tensor(row)
            mask[line, : len(row)] = 1
        logits = self.model.forward(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits
        return logits[:, 0].float().tolist()

    def _reencode(self, sequences: list[list[int]]) -> list[list[int]]:
        texts = self.actor_tokenizer.batch_decode(sequences, skip_special_tokens=False)
        return [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def by_length(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Indices of rows in batches of similar length whose padded size keeps to `token_budget`; a longer row comes alone."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
