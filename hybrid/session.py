"""Everything a run holds: the pool, its groups and engines, the scheduler, data, rewards and records.

`open_session` starts everything of a run that is prepared: engines first, then one role after another, of each what does not stay
leaving before the next loads. Processes start, and import, all together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybrid.algorithms.logprobs import EndMask
from hybrid.config import RunConfig, swap_folder
from hybrid.data.end_tokens import end_mask
from hybrid.data.prompts import PromptSource
from hybrid.data.rollouts import RolloutRecorder
from hybrid.data.samples import Prompt, Sample
from hybrid.errors import DataError
from hybrid.memory.ledger import Ledger
from hybrid.memory.node_copy import SUFFIX
from hybrid.memory.scheduler import MemoryScheduler
from hybrid.planning.rows import ledger_row
from hybrid.pool import Pool, open_pool
from hybrid.preparation import Prepared
from hybrid.reporting import Reporter
from hybrid.rewards import RewardFunction
from hybrid.roles.group import RoleGroup
from hybrid.roles.objective import UpdateResult
from hybrid.rollout.group import EngineGroup
from hybrid.rollout.self_test import self_test_prompts
from hybrid.startup import TRAINED_PARTS, engine_group, load_all, make_scheduler, spawn_role


@dataclass
class Session:
    """A run under way. Groups and engines that the config does not ask for are None."""

    cfg: RunConfig
    run_dir: Path
    pool: Pool
    scheduler: MemoryScheduler
    ledger: Ledger
    report: Reporter
    groups: dict[str, RoleGroup]
    engines: EngineGroup | None
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource | None
    held_out: list[Prompt]
    reward: RewardFunction | None
    eval_reward: RewardFunction | None
    recorder: RolloutRecorder | None
    recorded: dict[int, list[Sample]] = field(default_factory=dict)
    extra_rewards: list[tuple[float, RewardFunction]] = field(default_factory=list)
    """(weight, function) of rewards that are added to the first."""
    ends: EndMask | None = None
    """Where the sampler cannot end a response (`rollout.min_new_tokens`)."""
    engine_version: int | None = None
    """Weight version that the engines hold; None before the first sync and after their weights left."""
    counted: dict[str, int] = field(default_factory=dict)
    """Bytes that training counted just before its last update, by metric name."""

    @property
    def actor(self) -> RoleGroup:
        return self.groups["actor"]

    @property
    def critic(self) -> RoleGroup | None:
        return self.groups.get("critic")

    @property
    def reference(self) -> RoleGroup | None:
        return self.groups.get("reference")

    @property
    def reward_model(self) -> RoleGroup | None:
        return self.groups.get("reward")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work of one phase, with its tenants resident."""
        self.report.phase(name)
        with self.scheduler.running(name):
            self.note_lost_weights()
            yield

    def note_lost_weights(self) -> None:
        """Engines whose weights left the device hold no version until the next sync."""
        if ("rollout", "weights") not in self.scheduler.resident:
            self.engine_version = None

    def self_test_prompts(self) -> list[list[int]]:
        """See `hybrid.rollout.self_test`."""
        return self_test_prompts(self.tokenizer, self.cfg.max_sequence_tokens)

    def recorded_step(self, step: int) -> list[Sample]:
        """The recorded rollout of `step`. Raises `DataError` when the recording is shorter."""
        if step not in self.recorded:
            raise DataError(
                f"rollout.replay={self.cfg.rollout.replay} holds {len(self.recorded)} steps, but step {step} was asked for: "
                f"set train.steps={len(self.recorded)}."
            )
        return self.recorded[step]

    def take_step_totals(self) -> dict[str, float | None]:
        """What ledger, training and data know about the step that ended."""
        dropped = None if self.prompts is None else float(self.prompts.dropped)
        return self.ledger.take_step_totals() | self.counted | {"data/dropped_prompts": dropped}

    def note_counted(self, role: str, results: list[UpdateResult]) -> None:
        """Keep what the ranks counted at the height of training, where gradients exist."""
        largest = {part: max(r.counted.get(part, 0) for r in results) for part in TRAINED_PARTS}
        self.counted |= {f"memory/counted/{role}.{part}": size for part, size in largest.items()}
        self.ledger.counted(f"train_{role}", role, largest)


@contextmanager
def open_session(ready: Prepared, run_dir: Path) -> Iterator[Session]:
    """Start everything; whatever happens inside, everything is stopped at the end."""
    started = time.perf_counter()
    cfg, plan, inputs = ready.cfg, ready.plan, ready.inputs
    with ExitStack() as stack:
        report = stack.enter_context(Reporter(cfg, run_dir))
        ledger = Ledger(run_dir / "memory.jsonl")
        stack.callback(ledger.close)
        ledger.plan(ledger_row(plan))
        recorder = RolloutRecorder(cfg.rollout.record) if cfg.rollout.record else None
        if recorder is not None:
            stack.callback(recorder.close)

        stack.callback(_remove_swap_folders, swap_folder(cfg))
        report.stage("reserving the GPUs")
        pool = open_pool(
            num_nodes=cfg.cluster.num_nodes,
            gpus_per_node=cfg.cluster.gpus_per_node,
            processes_per_bundle=cfg.processes_per_gpu,
            device=cfg.cluster.device,
            log_dir=run_dir / "logs",
            address=cfg.cluster.address,
            timeout_s=cfg.cluster.start_timeout_s,
            dashboard=cfg.cluster.dashboard,
            bind_numa=cfg.cluster.bind_numa,
        )
        stack.callback(pool.stop)
        report.cluster_is_up(pool.dashboard_url)
        groups = {role: spawn_role(cfg, pool, role) for role in cfg.roles}
        engines = engine_group(cfg, pool) if cfg.uses_engines else None
        scheduler = make_scheduler(plan, ledger, report, groups, engines)
        load_all(cfg, report, scheduler, groups, engines)
        ledger.phase("init", time.perf_counter() - started, scheduler.peaks())
        yield Session(
            cfg,
            run_dir,
            pool,
            scheduler,
            ledger,
            report,
            groups,
            engines,
            inputs.tokenizer,
            inputs.prompts,
            inputs.held_out,
            inputs.reward,
            inputs.eval_reward,
            recorder,
            inputs.recorded,
            inputs.extra_rewards,
            end_mask(cfg, inputs.tokenizer),
        )


def _remove_swap_folders(folder: Path) -> None:
    """Swap files have no names, so what the ranks of this node leave are empty folders, but for notes of where a node's copy is; folders
    that are not empty then are not ours."""
    for note in folder.glob(f"*/*{SUFFIX}"):
        note.unlink(missing_ok=True)
    for empty in [*folder.glob("*"), folder]:
        with suppress(OSError):
            empty.rmdir()
