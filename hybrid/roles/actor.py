"""The policy that is trained, and the frozen reference it is held close to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from hybrid.algorithms.logprobs import EndMask
from hybrid.roles.export import Exported, export_model, gather
from hybrid.roles.models import ModelOptions, load_policy
from hybrid.roles.objective import Fed, PolicyObjective, PolicyRow, UpdateResult, check_sampler
from hybrid.roles.packing import Row
from hybrid.roles.policy_step import policy_objective, step_metrics
from hybrid.roles.reduction import Totals
from hybrid.roles.weights import WeightBuckets
from hybrid.roles.worker import ModelWorker
from hybrid.roles.zero import FrozenModel, TrainedModel, ZeroOptions, load_partitioned
from hybrid.rollout.sender import make_sender

EXPORT_BUCKET_BYTES = 2**30


class PolicyForward(ModelWorker):
    """What actor and reference share: log-probs of given responses."""

    def logprobs(self, micros: Iterable[Sequence[Row]], temperature: float, ends: EndMask | None = None) -> np.ndarray:
        """float32 log-probs of the response tokens of all rows, flat, in the order of `micros`."""
        return self.forward_rows(micros, lambda batch: self.model.forward(batch, temperature, ends=ends)[0])


class ReferenceWorker(PolicyForward):
    """The frozen policy at the start of training."""

    read_only = True

    def load(self, options: ModelOptions, stage: int, overlap_comm: bool = False) -> dict[str, int]:
        """Load and return the bytes of each part."""
        self.share_prompts = options.share_prompts
        device = self.device if stage < 3 else None
        policy = load_partitioned(stage, options.dtype, lambda: load_policy(options, device))
        self.model = FrozenModel(policy.to(device) if device else policy, stage, options.dtype, overlap_comm)
        return self.settle()


class ActorWorker(PolicyForward):
    """The policy under training."""

    def load(self, options: ModelOptions, zero: ZeroOptions) -> dict[str, int]:
        """Load the model under DeepSpeed and return the bytes of each part."""
        self.share_prompts = options.share_prompts
        self.path, self.trust_remote_code = options.path, options.trust_remote_code
        policy = load_partitioned(zero.stage, options.dtype, lambda: load_policy(options))
        self.model = TrainedModel(policy, zero)
        return self.settle()

    def train(
        self, micros: Iterable[Sequence[PolicyRow]], objective: PolicyObjective, learning_rate: float
    ) -> UpdateResult:
        """One optimizer step. Raises `TrainingStopped` on all ranks, before the update, when trainer and sampler disagree."""
        totals = Totals()
        fed = Fed()
        losses = [lambda model, rows=rows: self._loss(model, rows, objective, totals, fed) for rows in micros]

        def check() -> None:
            self.counted = self.count()
            totals.all_reduce()
            check_sampler(totals.mean("sampler_diff"), totals.maximum("sampler_diff"), objective.sampler_bound)

        step = self.model.step(losses, learning_rate, check)
        metrics = step_metrics(totals) | {"grad_norm/actor": step.grad_norm}
        return UpdateResult(step.applied, metrics, self.counted, fed)

    def _loss(self, model, rows: list[PolicyRow], objective: PolicyObjective, totals: Totals, fed: Fed) -> torch.Tensor:
        """This micro-batch's share of the step's loss; zero, with a graph, for an empty one."""
        batch = self.pack([r.row for r in rows])
        fed.tokens += len(batch.input_ids_N)
        fed.padding += 0 if rows else len(batch.input_ids_N)
        logprobs_R, entropies_R = model(
            batch, objective.temperature, objective.with_entropy, objective.entropy_coef > 0, objective.ends
        )
        if not rows:
            return logprobs_R.sum() * 0.0
        return policy_objective(rows, batch, logprobs_R, entropies_R, objective, totals)

    def connect(self, engines: list, bucket_bytes: int, timeout_s: float) -> None:
        """Learn which engines (Ray handles) take this actor's weights; all ranks at once."""
        backend = "ipc" if self.device.type == "cuda" else "shm"
        self.sender = make_sender(backend, self.rank, engines, bucket_bytes, timeout_s)
        self.weights = WeightBuckets(self.model.module.hf, self.model.options.stage, bucket_bytes)

    def send_weights(self, version: int) -> None:
        """Give every engine the present weights as `version`; all ranks at once."""
        self.sender.send(self.weights, version)

    def export(self, folder: str, swap_dir: str | None) -> Exported | None:
        """Write a Hugging Face folder from rank 0, which says where it is; all ranks take part. `swap_dir`: where to write it when the
        folder's disk is full.

        Raises `ExportError` when no disk takes the weights.
        """
        hf = self.model.module.hf
        weights = WeightBuckets(hf, self.model.options.stage, EXPORT_BUCKET_BYTES, as_loaded=True)
        state = gather(weights, is_writer=self.rank == 0)
        if self.rank == 0:
            return export_model(hf, state, self.path, Path(folder), swap_dir, self.trust_remote_code)
