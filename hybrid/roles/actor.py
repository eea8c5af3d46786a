"""The policy that is trained, and the frozen reference it is held close to."""

from __future__ import annotations

from pathlib import Path

import torch

from hybrid.algorithms.kl import kl_estimate
from hybrid.algorithms.losses import policy_loss, reduce_tokens
from hybrid.roles.export import export_model
from hybrid.roles.models import ModelOptions, load_policy
from hybrid.roles.objective import PolicyObjective, PolicyRow, UpdateResult, check_sampler
from hybrid.roles.packing import Row, lengths_mask, to_rows
from hybrid.roles.reduction import Totals
from hybrid.roles.worker import ModelWorker
from hybrid.roles.zero import FrozenModel, TrainedModel, WeightBuckets, ZeroOptions, load_partitioned
from hybrid.rollout.sender import make_sender

EXPORT_BUCKET_BYTES = 2**30


class PolicyForward(ModelWorker):
    """What actor and reference share: log-probs of given responses."""

    def logprobs(self, micros: list[list[Row]], temperature: float) -> list[list[torch.Tensor]]:
        """float32 log-probs of the response tokens, a tensor per row, laid out as `micros`."""
        return self.forward_rows(micros, lambda batch: self.model.forward(batch, temperature)[0])


class ReferenceWorker(PolicyForward):
    """The frozen policy at the start of training."""

    read_only = True

    def load(self, options: ModelOptions, stage: int) -> dict[str, int]:
        """Load and return the bytes of each part."""
        self.share_prompts = options.share_prompts
        policy = load_partitioned(stage, options.dtype, lambda: load_policy(options))
        self.model = FrozenModel(policy.to(self.device) if stage < 3 else policy, stage, options.dtype)
        return self.settle()


class ActorWorker(PolicyForward):
    """The policy under training."""

    def load(self, options: ModelOptions, zero: ZeroOptions) -> dict[str, int]:
        """Load the model under DeepSpeed and return the bytes of each part."""
        self.share_prompts = options.share_prompts
        self.path = options.path
        policy = load_partitioned(zero.stage, options.dtype, lambda: load_policy(options))
        self.model = TrainedModel(policy, zero)
        return self.settle()

    def train(self, micros: list[list[PolicyRow]], objective: PolicyObjective, learning_rate: float) -> UpdateResult:
        """One optimizer step. Raises `TrainingStopped` on all ranks, before the update, when trainer and sampler disagree."""
        totals = Totals()
        losses = [lambda model, rows=rows: self._loss(model, rows, objective, totals) for rows in micros]

        def check() -> None:
            self.counted = self.count()
            totals.all_reduce()
            check_sampler(totals.mean("sampler_diff"), totals.maximum("sampler_diff"), objective.sampler_bound)

        step = self.model.step(losses, learning_rate, check)
        metrics = {
            "loss/policy": totals.sum("loss"),
            "policy/clip_fraction": totals.mean("clip_fraction"),
            "kl/reference": totals.mean("kl"),
            "kl/sampler": totals.mean("sampler_kl"),
            "sampler/logprob_diff_mean": totals.mean("sampler_diff"),
            "sampler/logprob_diff_max": totals.maximum("sampler_diff"),
            "grad_norm/actor": step.grad_norm,
        }
        return UpdateResult(step.applied, metrics, self.counted)

    def _loss(self, model, rows: list[PolicyRow], objective: PolicyObjective, totals: Totals) -> torch.Tensor:
        """This micro-batch's share of the step's loss; zero, with a graph, for an empty one."""
        batch = self.pack([r.row for r in rows])
        logprobs_R, _ = model(batch, objective.temperature)
        if not rows:
            return logprobs_R.sum() * 0.0
        width = max(batch.row_lengths)
        mask_BT = lengths_mask(batch.row_lengths, width, self.device)
        logprobs_BT = to_rows(logprobs_R, batch.row_lengths, width)

        def column(name: str) -> torch.Tensor:
            return to_rows(torch.cat([getattr(r, name) for r in rows]).to(self.device), batch.row_lengths, width)

        rollout_BT = column("rollout_logprobs")
        old_BT = logprobs_BT.detach() if rows[0].old_logprobs is None else column("old_logprobs")
        loss, metrics = policy_loss(
            logprobs_BT,
            old_BT,
            column("advantages"),
            mask_BT,
            kind=objective.kind,
            clip_low=objective.clip_low,
            clip_high=objective.clip_high,
            dual_clip=objective.dual_clip,
            reduction=objective.reduction,
            max_tokens=objective.max_tokens,
            rollout_logprobs=rollout_BT,
            correction="none",
            normalizer=objective.normalizer,
        )
        if rows[0].ref_logprobs is not None:
            kl_BT = kl_estimate(logprobs_BT, column("ref_logprobs"), objective.kl_kind)
            loss = loss + objective.kl_coef * reduce_tokens(
                kl_BT, mask_BT, objective.reduction, objective.max_tokens, objective.normalizer
            )
            totals.add("kl", kl_BT.detach()[mask_BT])
        totals.add("loss", loss.detach()[None])
        totals.add("clip_fraction", metrics["clip_fraction"].detach()[None], weight=int(mask_BT.sum()))
        if rows[0].old_logprobs is None:
            difference_R = (rollout_BT - old_BT)[mask_BT]
            totals.add("sampler_kl", difference_R)
            totals.add("sampler_diff", difference_R.abs())
        return loss

    def connect(self, engines: list, bucket_bytes: int, timeout_s: float) -> None:
        """Learn which engines (Ray handles) take this actor's weights; all ranks at once."""
        backend = "ipc" if self.device.type == "cuda" else "shm"
        self.sender = make_sender(backend, self.rank, engines, bucket_bytes, timeout_s)
        self.weights = WeightBuckets(self.model.module.hf, self.model.options.stage, bucket_bytes)

    def send_weights(self, version: int) -> None:
        """Give every engine the present weights as `version`; all ranks at once."""
        self.sender.send(self.weights, version)

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder from rank 0; all ranks take part."""
        hf = self.model.module.hf
        weights = WeightBuckets(hf, self.model.options.stage, EXPORT_BUCKET_BYTES)
        export_model(hf, weights, self.path, Path(folder), is_writer=self.rank == 0)
