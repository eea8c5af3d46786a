"""The loop: generate, score, forward, advantages, train critic, train actor, sync.

Every phase is entered through the memory scheduler, which first moves out what the phase does not need and then brings what it does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from hybrid import closing, phases
from hybrid.algorithms.rewards import Moments
from hybrid.collect import collect
from hybrid.data.groups import Group
from hybrid.data.prompts import left_out
from hybrid.data.samples import Sample
from hybrid.experience import make_experience, sample_rows, update_batches
from hybrid.preparation import Prepared
from hybrid.profiling import profiled
from hybrid.session import Session, open_session
from hybrid.telemetry.updates import over_updates


@dataclass
class Progress:
    """Where the run is; with the prompt stream's position, all that the loop itself remembers."""

    step: int = 0
    update: int = 0
    """Optimizer steps asked for so far, skipped ones included: what schedules count."""
    weight_version: int = 0
    skipped: int = 0
    skipped_in_a_row: dict[str, int] = field(default_factory=dict)
    """By role: a critic that learns does not excuse an actor that diverges."""
    kl_coef: float = 0.0
    """As adapted so far."""
    reward_moments: Moments = field(default_factory=Moments)
    """Of all raw scores so far, where they are normalised."""
    leftovers: list[Group] = field(default_factory=list)
    """Scored prompts that dynamic sampling accepted and no step has used yet."""


def train(ready: Prepared, run_dir: Path) -> None:
    """Train to the end of the run, in `run_dir`.

    Raises `HybridError`: what was wrong, and the fix. Whatever happens, no process of the run stays.
    """
    with open_session(ready, run_dir) as s:
        cfg = s.cfg
        progress = Progress(kl_coef=cfg.algorithm.kl_coef)
        if s.engines is not None:
            s.report.stage("comparing the engines with the trainer")
        phases.sync(s, progress)
        phases.self_test(s, progress)
        if s.held_out:
            s.report.stage(f"answering {len(s.held_out)} held-out problems")
        s.report.training_starts(phases.evaluate(s, progress), s.ledger.take_step_totals())
        exported = None
        for step in range(1, cfg.train.steps + 1):
            progress.step = s.ledger.step = step
            with profiled(s, step):
                metrics, samples = train_step(s, progress)
                if step == cfg.train.steps:
                    with closing.exported_whatever_happens(s, progress):
                        metrics |= phases.evaluate(s, progress)
                    exported = closing.export(s)
            s.report.step(step, metrics | s.take_step_totals(), samples)
            phases.guard_kl(s, metrics)
        if s.prompts is not None and (said := left_out(s.cfg, s.prompts)):
            s.report.note(said)
        s.report.finish(exported and Path(exported.folder))
        closing.check_export(exported)


def train_step(s: Session, progress: Progress) -> tuple[dict[str, float | None], list[Sample]]:
    """One rollout and the training on it. Returns the step's metrics and its samples, scored."""
    started = time.perf_counter()
    rollout = collect(s, progress)
    samples = rollout.samples
    rows = sample_rows(samples)
    forward = phases.forward(s, rows)
    version = progress.weight_version if s.cfg.uses_engines else None
    experience = make_experience(
        s.cfg, samples, forward, kl_coef=progress.kl_coef, greedy=rollout.greedy, version=version
    )
    phases.check_rollout(s, experience)

    updates = []
    for groups in update_batches(s.cfg, progress.step):
        chosen = [i for i, sample in enumerate(samples) if sample.group in groups]
        plan = phases.plan_rows(s, rows, chosen)
        update = phases.train_critic(s, progress, experience, rows, plan)
        if progress.step > s.cfg.algorithm.critic_only_steps:
            update |= phases.train_actor(s, progress, experience, rows, plan)
        updates.append(update)
        progress.update += 1
    phases.sync(s, progress)

    metrics = over_updates(updates) | experience.metrics | rollout.metrics | {"kl/coef": progress.kl_coef or None}
    phases.adapt_kl(s, progress, metrics)
    seconds = time.perf_counter() - started
    metrics |= {"time/step": seconds, "tokens/per_second": metrics["tokens/generated"] / seconds}
    return metrics, samples
