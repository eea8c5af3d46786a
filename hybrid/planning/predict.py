"""A resolved config and facts about a machine become a `Prediction`. Pure: needs no GPU, loads no weights, starts nothing."""

from __future__ import annotations

from math import prod

import torch

from hybrid.config import RunConfig
from hybrid.errors import ConfigError
from hybrid.planning.allocator import with_rounding
from hybrid.planning.engine import engine_weights, first_pass, kv_cache, reloading_bytes, sampling_bytes
from hybrid.planning.facts import MachineFacts
from hybrid.planning.heap import on_heap, with_kept_heaps
from hybrid.planning.machine_use import host_use, overhead
from hybrid.planning.micro_batch import Workload, workload
from hybrid.planning.model_state import frozen_bytes, partition, trained_state
from hybrid.planning.passes import packed_pass, padded_pass
from hybrid.planning.prediction import LOADING, KVCache, PhaseUse, Prediction, TenantSize
from hybrid.planning.shapes import ModelShapes, read_config, shapes
from hybrid.planning.training import Parts, adds_up_on_arrival, forward_parts, gathered_bytes, train_parts
from hybrid.planning.working_set import Trace

__all__ = ["MachineFacts", "predict"]

SLAB = 256 * 2**20
"""Pinned host memory comes in slabs (`memory.tiers.PinnedTier`)."""


def predict(cfg: RunConfig, machine: MachineFacts) -> Prediction:
    """What a run holds, from its resolved config and the config.json of its models.

    Raises `ConfigError` when a config.json is not here, or when `rollout.kv_cache` is still `auto` because no size of the GPU is known.
    """
    plan = _Run(cfg, machine)
    tenants, forward = plan.tenants(), plan.forward_by_role()
    phases = [
        PhaseUse("init", plan.loading()),
        PhaseUse("generate", plan.sampling(cfg.samples_per_step)),
        PhaseUse("score", plan.scoring()),
        PhaseUse("forward", plan.forward(forward)),
        *([PhaseUse("train_critic", plan.training("critic"))] if cfg.uses_critic else []),
        PhaseUse("train_actor", plan.training("actor")),
        PhaseUse("sync", plan.sync()),
        *([PhaseUse("checkpoint", plan.export())] if cfg.checkpoint.export else []),
        *([PhaseUse("evaluate", plan.sampling(cfg.data.eval_size))] if plan.evaluates() else []),
    ]
    if cfg.cluster.device == "cpu":
        phases = [on_heap(use) for use in phases]
        phases = with_kept_heaps(phases, cfg) if cfg.memory.keep_heap else phases
    else:
        there = [t for t in tenants if not (t.part == "optimizer" and plan.offloaded(t.role))]
        phases = with_rounding(phases, forward, there, machine)
    return Prediction(
        tuple(tenants),
        tuple(phases),
        overhead(cfg, machine) | plan.engine_reserve(),
        host_use(cfg, plan.export_on_host()),
        cfg.cluster.gpus_per_node,
        plan.kv_cache() if cfg.uses_engines else None,
    )


class _Run:
    """One config, looked at from each side."""

    def __init__(self, cfg: RunConfig, machine: MachineFacts):
        self.cfg, self.machine = cfg, machine
        self.dtype = getattr(torch, cfg.model.dtype)
        self.element = self.dtype.itemsize
        self.on_cpu = cfg.cluster.device == "cpu"
        self.tp = cfg.rollout.tensor_parallel_size

    def evaluates(self) -> bool:
        return self.cfg.uses_engines and (
            self.cfg.data.eval is not None or self.cfg.data.train.startswith("reasoning_gym:")
        )

    def path(self, role: str) -> str:
        section = {"critic": self.cfg.critic, "reference": self.cfg.reference}.get(role)
        return self.cfg.reward.model if role == "reward" else (section and section.path) or self.cfg.model.path

    def stage(self, role: str) -> int:
        section = getattr(self.cfg, role)
        return getattr(section, "zero_stage", 0) if section is not None else 0

    def offloaded(self, role: str) -> bool:
        return getattr(getattr(self.cfg, role), "optimizer", None) == "cpu"

    def model(self, role: str) -> ModelShapes:
        kind = {"critic": "critic", "reward": "reward"}.get(role, "policy")
        return shapes(self.path(role), kind, self.cfg.model.trust_remote_code)

    def tenants(self) -> list[TenantSize]:
        found: list[TenantSize] = []
        for role in self.cfg.roles:
            stage, model = self.stage(role), self.model(role)
            if role in ("reference", "reward"):
                size = frozen_bytes(model, self.cfg.world_size, stage, self.element)
                # Never written to: copied out once, so a departure costs nothing.
                found.append(TenantSize(role, "weights", size, True, 0, size, self._in_tier(size, stage < 3)))
                continue
            decay, offloaded = getattr(self.cfg, role).weight_decay > 0, self.offloaded(role)
            state = trained_state(model, self.cfg.world_size, stage, self.element, decay, offloaded)
            found += [
                self._moved(role, "weights", state.weights, stage < 3),
                TenantSize(role, "gradients", state.gradients),  # no state between steps: comes back as zeros
                self._moved(role, "optimizer", state.optimizer),
            ]
        if self.cfg.uses_engines:
            config = self.engine_config()
            weights = engine_weights(self.model("actor"), config, self.tp, self.element, self.cfg.cluster.device)
            found.append(TenantSize("rollout", "weights", weights, movable=not self.on_cpu))
            found.append(TenantSize("rollout", "kv_cache", self.kv_cache().bytes))
        return found

    def _moved(self, role: str, part: str, size: int, replicated: bool = False) -> TenantSize:
        return TenantSize(role, part, size, True, size, size, self._in_tier(size, replicated))

    def _in_tier(self, size: int, replicated: bool) -> int:
        """Per GPU; of what is the same on all GPUs a node keeps one copy."""
        copy = -(-size // SLAB) * SLAB if self.cfg.memory.tier == "pinned" else size
        return -(-copy // self.cfg.cluster.gpus_per_node) if replicated else copy

    def engine_config(self):
        return read_config(self.cfg.model.path, self.cfg.model.trust_remote_code)

    def kv_cache(self) -> KVCache:
        size = self.cfg.rollout.kv_cache
        if size == "auto":
            raise ConfigError(
                "rollout.kv_cache: auto needs the size of the GPU. Name it with --gpu, or set memory.device_bytes."
            )
        tokens = self.cfg.max_sequence_tokens
        batched = self.machine.batched_tokens
        return kv_cache(self.engine_config(), self.tp, self.element, self.cfg.cluster.device, size, tokens, batched)

    def engine_reserve(self) -> Parts:
        """What an engine keeps on a CUDA device, asleep or not."""
        has_graphs = self.cfg.uses_engines and not self.cfg.rollout.enforce_eager
        return {"CUDA graphs": self.machine.graphs} if has_graphs and self.machine.graphs else {}

    def sampling(self, sequences: int) -> Parts:
        """On CUDA any pass that vLLM's scheduler may make; the engine gives back what it took (`rollout.engine.Engine`)."""
        if not self.cfg.uses_engines:
            return {}
        if not self.on_cpu:
            most = self.cfg.rollout.max_num_seqs
            tokens = min(self.machine.batched_tokens, most * self.cfg.max_sequence_tokens)
            return first_pass(self.engine_config(), self.tp, self.element, most, tokens)
        at_a_time = self.cfg.sequences_at_once(sequences)
        tokens = at_a_time * self.cfg.max_sequence_tokens
        return sampling_bytes(self.engine_config(), self.tp, self.element, at_a_time, tokens)

    def scoring(self) -> Parts:
        if not self.cfg.uses_reward_model:
            return {}
        width = self.cfg.max_sequence_tokens
        samples = -(-self.cfg.samples_per_step // self.cfg.world_size)
        rows = min(samples, max(1, self.cfg.reward.batch_tokens // width))
        trust = self.cfg.model.trust_remote_code
        return forward_parts(
            padded_pass(
                self.path("reward"),
                rows,
                width,
                dtype=self.dtype,
                device=self.cfg.cluster.device,
                trust_remote_code=trust,
            ),
            0,
            0,
        )

    def forward_by_role(self) -> dict[str, Parts]:
        """What each role takes that runs forward."""
        work = workload(self.cfg, self.cfg.train.prompts_per_step)
        found = {}
        for role in (role for role in ("actor", "reference", "critic") if role in self.cfg.roles):
            gathered = gathered_bytes(self.model(role), self.stage(role), self.element, self.cfg.cluster.device)
            found[role] = forward_parts(self._pass(role, work, backward=False), *gathered)
        return found

    def forward(self, by_role: dict[str, Parts]) -> Parts:
        """Roles run one after another; on CUDA each process keeps in its allocator what it has used, so they add up."""
        if self.on_cpu:
            return max(by_role.values(), key=lambda parts: sum(parts.values()))
        names = {name: None for parts in by_role.values() for name in parts}
        return {name: sum(parts.get(name, 0) for parts in by_role.values()) for name in names}

    def training(self, role: str) -> Parts:
        section = getattr(self.cfg, role)
        work = workload(self.cfg, self.cfg.train.prompts_per_update)
        model = self.model(role)
        cut = partition(model, self.cfg.world_size, section.zero_stage, section.weight_decay > 0)
        traced, device = self._pass(role, work, backward=True), self.cfg.cluster.device
        offloaded, overlap = self.offloaded(role), self.cfg.train.overlap_comm
        return train_parts(traced, model, cut, self.element, work.micro_batches, device, offloaded, overlap)

    def _pass(self, role: str, work: Workload, backward: bool) -> Trace:
        checkpointing = self.cfg.model.gradient_checkpointing and role in ("actor", "critic")
        algorithm, trains_policy = self.cfg.algorithm, backward and role == "actor"
        return packed_pass(
            self.path(role),
            "critic" if role == "critic" else "policy",
            work.rows,
            dtype=self.dtype,
            implementation=self.cfg.model.attention,
            checkpointing=checkpointing and backward,
            backward=backward,
            device=self.cfg.cluster.device,
            trust_remote_code=self.cfg.model.trust_remote_code,
            dropout=self.cfg.model.dropout == "config",
            fp32_gradients=backward and adds_up_on_arrival(self.stage(role), self.element, self.offloaded(role)),
            temperature=self.cfg.rollout.temperature,
            with_entropy=trains_policy and (algorithm.entropy_metric or algorithm.entropy_coef > 0),
            entropy_gradient=trains_policy and algorithm.entropy_coef > 0,
        )

    def sync(self) -> Parts:
        """A bucket on its way (shared memory on CPU, the packed buffer of CUDA IPC, of which vLLM's worker makes a copy on the same GPU),
        what ZeRO-3 gathers for it, and the layer that vLLM puts together, of which earlier buckets may have brought a part."""
        if not self.cfg.uses_engines:
            return {}
        model = self.model("actor")
        whole, largest = model.elements * self.element, max(model.sizes) * self.element
        bucket = min(whole, max(self.cfg.rollout.weight_bucket, largest))
        layer, waiting = reloading_bytes(model, self.tp, self.element)
        parts = {"weight bucket": bucket, "layer in transfer": layer}
        if not self.on_cpu:
            parts["copy of the bucket"] = bucket
            if whole > bucket:
                parts["layer across buckets"] = min(waiting, whole - bucket)
        if joined := sum(prod(shape) for _, shape in model.parameters if len(shape) > 2) * self.element:
            parts["experts taken apart"] = min(bucket, joined)
        return parts | ({"gathered parameters": 2 * bucket} if self.stage("actor") == 3 else {})

    def export(self) -> Parts:
        """The writer keeps the whole model in host memory, which on CPU is the device."""
        from hybrid.roles.actor import EXPORT_BUCKET_BYTES

        parts = self.export_on_host() if self.on_cpu else {}
        if self.stage("actor") == 3:
            whole = self.model("actor").elements * self.element
            parts["gathered parameters"] = 2 * min(whole, EXPORT_BUCKET_BYTES)
        return parts

    def export_on_host(self) -> Parts:
        """The whole model, and the pieces of one tensor of joined experts, which are cut before it is dropped."""
        model = self.model("actor")
        parts = {"exported weights": model.elements * self.element}
        if joined := max((prod(shape) for _, shape in model.parameters if len(shape) > 2), default=0) * self.element:
            parts["experts taken apart"] = joined
        return parts

    def loading(self) -> Parts:
        """Beside the tenants of the role that loads: DeepSpeed flattens the weights while it has the loaded ones; a partitioned model
        is never whole, but for the parameter that is read. transformers first takes a block as large as a model that it reads straight
        to a GPU (`caching_allocator_warmup`), which then becomes the model. vLLM makes its first pass.
        """
        parts = {}
        for role in [*self.cfg.roles, *(["rollout"] if self.cfg.uses_engines else [])]:
            model = self.model("actor" if role == "rollout" else role)
            flattened = role in ("actor", "critic") and self.stage(role) in (1, 2)
            parts[f"{LOADING}{role}"] = (model.elements if flattened else max(model.sizes)) * self.element
        if self.cfg.uses_engines and not self.on_cpu:
            first = sum(self.sampling(self.cfg.samples_per_step).values())
            parts[f"{LOADING}rollout"] = max(parts[f"{LOADING}rollout"], first)
        return parts
