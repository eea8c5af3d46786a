"""The step's samples: generated and scored, once, or until enough prompts teach something (dynamic sampling)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid import phases
from hybrid.data.groups import Group, by_prompt, number, prompts_to_draw, teaches
from hybrid.data.samples import Sample

if TYPE_CHECKING:
    from hybrid.session import Session
    from hybrid.trainer import Progress


@dataclass
class Rollout:
    """Scored samples of a step's prompts, numbered from 0."""

    samples: list[Sample]
    """Drawn from the policy: what is trained on."""
    greedy: list[Sample]
    """The greedy answer to each prompt, where the estimator compares with one."""
    metrics: dict[str, float | None]


def collect(s: Session, progress: Progress) -> Rollout:
    """The step's rollout: recorded, or generated and, where the profile records, written down as it is trained on."""
    if s.engines is None:
        groups = by_prompt(s.recorded_step(progress.step))
        phases.score(s, progress, [sample for group in groups for sample in group])
        return _rollout(groups, groups, {})
    groups, drawn, metrics = (_search if s.cfg.algorithm.dynamic_sampling else _draw_once)(s, progress)
    rollout = _rollout(groups, drawn, metrics)
    if s.recorder is not None:
        s.recorder.write(progress.step, number(groups))
    return rollout


def _draw_once(s: Session, progress: Progress) -> tuple[list[Group], list[Group], dict[str, float | None]]:
    groups = _draw(s, progress, s.cfg.train.prompts_per_step, 0)
    return groups, groups, {}


def _search(s: Session, progress: Progress) -> tuple[list[Group], list[Group], dict[str, float | None]]:
    """DAPO (Yu et al. 2025, arXiv:2503.14476): prompts whose samples all score alike are left out and others drawn, in a bounded
    number of rounds. Prompts beyond those wanted wait in `progress.leftovers` for the next step, the oldest first.

    The step always has its number of prompts: when the rounds are used up, prompts that were left out fill it. They have no
    advantage and only weigh in the means.
    """
    wanted, rounds = s.cfg.train.prompts_per_step, 0
    accepted = progress.leftovers
    waited, drawn, left_out = len(accepted), [], []
    while len(accepted) < wanted and rounds < s.cfg.algorithm.sampling_rounds:
        if rounds:
            phases.sync(s, progress)  # scoring may have sent the engines' weights away
        count = prompts_to_draw(wanted - len(accepted), len(drawn) - len(left_out), len(drawn), wanted)
        groups = _draw(s, progress, count, rounds)
        accepted = accepted + [group for group in groups if teaches(group)]
        left_out += [group for group in groups if not teaches(group)]
        drawn += groups
        rounds += 1
    filling = left_out[: max(0, wanted - len(accepted))]
    if filling:
        s.report.warn(
            f"step {progress.step}: {len(accepted)} of {wanted} prompts had samples that score differently, after {rounds} rounds; "
            f"{len(filling)} others fill the step (algorithm.sampling_rounds={s.cfg.algorithm.sampling_rounds})"
        )
    progress.leftovers = accepted[wanted:]
    metrics = {
        "rollout/rounds": float(rounds),
        "rollout/waited_prompts": float(waited),
        "rollout/filling_prompts": float(len(filling)),
    }
    return accepted[:wanted] + filling, drawn, metrics


def _draw(s: Session, progress: Progress, prompts: int, round_: int) -> list[Group]:
    early = phases.early_scores(s)
    samples = phases.generate(s, progress, prompts, round_, early)
    phases.score(s, progress, samples, early)
    return by_prompt(samples)


def _rollout(groups: list[Group], drawn: list[Group], metrics: dict[str, float | None]) -> Rollout:
    """`groups` are trained on, `drawn` are those that this step generated."""
    samples = number(groups)
    generated = sum(len(sample.token_ids) for group in drawn for sample in group)
    equal = sum(not teaches(group) for group in drawn) / len(drawn) if drawn else None
    return Rollout(
        samples=[sample for sample in samples if not sample.greedy],
        greedy=[sample for sample in samples if sample.greedy],
        metrics=metrics | {"tokens/generated": float(generated), "rollout/equal_share": equal},
    )
