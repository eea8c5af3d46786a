"""Starting what a run holds: processes of every role, engines, the scheduler over them, and who loads when."""

from __future__ import annotations

import torch

from hybrid.config import RunConfig, model_source, swap_folder
from hybrid.memory.ledger import Ledger
from hybrid.memory.scheduler import MemoryScheduler
from hybrid.memory.tenants import RankPeak
from hybrid.planning.plan import Plan
from hybrid.pool import Pool
from hybrid.reporting import Reporter
from hybrid.roles.actor import ActorWorker, ReferenceWorker
from hybrid.roles.critic import CriticWorker
from hybrid.roles.group import RoleGroup
from hybrid.roles.models import ModelOptions
from hybrid.roles.reward import RewardWorker
from hybrid.roles.zero import ZeroOptions
from hybrid.rollout.checkpoint_names import unused_tensors
from hybrid.rollout.group import EngineGroup
from hybrid.rollout.requests import EngineOptions
from hybrid.telemetry.summary import count_of

TRAINED_PARTS = ("weights", "gradients", "optimizer")
ROLES = {
    "actor": (ActorWorker, TRAINED_PARTS),
    "critic": (CriticWorker, TRAINED_PARTS),
    "reference": (ReferenceWorker, ("weights",)),
    "reward": (RewardWorker, ("weights",)),
}


def spawn_role(cfg: RunConfig, pool: Pool, role: str) -> RoleGroup:
    cls, parts = ROLES[role]
    threads = cfg.cluster.threads_per_process
    return RoleGroup(
        pool,
        role,
        cls,
        parts,
        cfg.cluster.call_timeout_s,
        env={"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        device=cfg.cluster.device,
        threads=threads,
        tier=cfg.memory.tier,
        swap_dir=str(swap_folder(cfg)),
        keep_heap=cfg.memory.keep_heap,
    )


def engine_group(cfg: RunConfig, pool: Pool) -> EngineGroup:
    path, trust = _source(cfg, cfg.model.path), cfg.model.trust_remote_code
    options = EngineOptions(
        model_path=path,
        dtype=cfg.model.dtype,
        device=cfg.cluster.device,
        kv_cache_bytes=cfg.rollout.kv_cache,
        max_model_len=cfg.max_sequence_tokens,
        tensor_parallel_size=cfg.rollout.tensor_parallel_size,
        max_num_seqs=cfg.rollout.max_num_seqs,
        enforce_eager=cfg.rollout.enforce_eager,
        custom_all_reduce=cfg.rollout.custom_all_reduce,
        seed=cfg.train.seed,
        threads=cfg.cluster.threads_per_process,
        trust_remote_code=trust,
        left_out=tuple(sorted(unused_tensors(path, trust))),
        trace_dir=str(pool.log_dir / "trace") if cfg.logging.profile else None,
    )
    return EngineGroup(
        pool, options, repeatable=cfg.rollout.repeatable, seed=cfg.train.seed, call_timeout_s=cfg.cluster.call_timeout_s
    )


def make_scheduler(
    plan: Plan, ledger: Ledger, report: Reporter, groups: dict[str, RoleGroup], engines: EngineGroup | None
) -> MemoryScheduler:
    cfg = plan.cfg

    def peaks() -> list[RankPeak]:
        timeout = cfg.memory.barrier_timeout_s
        of_roles = [peak for group in groups.values() for peak in group.call("take_peak")]
        return of_roles + (engines.peaks(timeout) if engines else [])

    return MemoryScheduler(
        {},
        residency=plan.residency,
        ledger=ledger,
        device=cfg.cluster.device,
        residue_tolerance=cfg.memory.residue_tolerance,
        residue_slack=cfg.memory.residue_slack,
        barrier_timeout_s=cfg.memory.barrier_timeout_s,
        peaks=peaks,
        tidy=lambda: [group.call("tidy") for group in groups.values()],
        warn=report.warn,
        span=report.spans.span,
    )


def load_all(
    cfg: RunConfig,
    report: Reporter,
    scheduler: MemoryScheduler,
    groups: dict[str, RoleGroup],
    engines: EngineGroup | None,
) -> None:
    if engines is not None:
        report.stage(f"starting {count_of(cfg.rollout.engines, 'engine')}")
        engines.start(cfg.cluster.call_timeout_s)
        scheduler.adopt("rollout", engines)
    for role, group in groups.items():
        report.stage(f"loading the {role}")
        group.load(*_load_arguments(cfg, role))
        if role == "actor" and engines is not None:
            group.call("connect", engines.handles, cfg.rollout.weight_bucket, cfg.cluster.call_timeout_s)
        scheduler.adopt(role, group)


def _load_arguments(cfg: RunConfig, role: str) -> tuple:
    dtype = getattr(torch, cfg.model.dtype)
    if role == "reward":
        trust = cfg.model.trust_remote_code
        return _source(cfg, cfg.reward.model), dtype, _source(cfg, cfg.model.path), cfg.reward.batch_tokens, trust
    section = getattr(cfg, role)
    options = ModelOptions(
        path=_source(cfg, getattr(section, "path", None) or cfg.model.path),
        dtype=dtype,
        attention=cfg.model.attention,
        gradient_checkpointing=cfg.model.gradient_checkpointing and role in ("actor", "critic"),
        trust_remote_code=cfg.model.trust_remote_code,
        dropout=cfg.model.dropout == "config",
        seed=cfg.train.seed,
    )
    if role == "reference":
        return options, section.zero_stage, cfg.train.overlap_comm
    adamw = section.betas, section.eps, section.weight_decay
    on_cpu = section.optimizer == "cpu"
    overlap = cfg.train.overlap_comm
    return options, ZeroOptions(section.zero_stage, dtype, *adamw, section.max_grad_norm, on_cpu, overlap)


def _source(cfg: RunConfig, path: str) -> str:
    return str(model_source(cfg, path))
