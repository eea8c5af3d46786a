"""Everything that a run reads, and all that can be wrong with it, before Ray starts: functions, models, data, labels, and the plan.

A mistake that is found here costs seconds and leaves no run folder. The run goes on with what was read, and reads nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.config import RunConfig, model_source
from hybrid.config.load import check_report
from hybrid.config.resolve import in_folder
from hybrid.config.start_rules import check_room
from hybrid.data.prompts import PromptSource, Say, load_eval, load_prompts
from hybrid.data.rollouts import check_recorded, load_rollouts
from hybrid.data.samples import Prompt, Sample
from hybrid.data.sources import Unreachable
from hybrid.rewards import (
    Functions,
    RewardFunction,
    check_columns,
    load_extra_rewards,
    load_rewards,
    started_functions,
)
from hybrid.rewards.check_labels import check_labels
from hybrid.start_check import check_models, check_passes, told_with_profile
from hybrid.tokenizer import load_tokenizer
from hybrid.waiting import told

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybrid.planning.plan import Plan


@dataclass
class Inputs:
    """Data and rewards of a run. What the config does not ask for is None or empty."""

    tokenizer: PreTrainedTokenizerBase | None
    """None in a dry run of a model that is not on this machine; its prompts have no token ids then."""
    prompts: PromptSource | None = None
    held_out: list[Prompt] = field(default_factory=list)
    reward: RewardFunction | None = None
    eval_reward: RewardFunction | None = None
    extra_rewards: list[tuple[float, RewardFunction]] = field(default_factory=list)
    """(weight, function) of rewards that are added to the first."""
    recorded: dict[int, list[Sample]] = field(default_factory=dict)
    """Recorded rollouts by step."""
    notes: list[str] = field(default_factory=list)
    """What the user should know: prompts left out, labels that cannot be read, files that an export changes."""


@dataclass(frozen=True)
class Prepared:
    """A run that can start: its plan, and what it reads."""

    plan: Plan
    inputs: Inputs

    @property
    def cfg(self) -> RunConfig:
        """Resolved, with what the plan chose."""
        return self.plan.cfg

    def in_folder(self, run_dir: Path) -> Prepared:
        """The same run in `run_dir`."""
        return replace(self, plan=replace(self.plan, cfg=in_folder(self.cfg, run_dir)))


@contextmanager
def prepared(cfg: RunConfig) -> Iterator[Prepared]:
    """Read and check what the resolved `cfg` names, and plan its memory. The users' functions run until the end of the context.

    Raises `ConfigError` and `DataError` for mistakes in profile, models, functions and data, and when the run does not fit.
    """
    with read_inputs(cfg) as inputs:
        from hybrid.planning.footprint import tier_bytes
        from hybrid.planning.run import plan_run

        with told("planning memory"):
            plan = plan_run(cfg)
        if plan.cfg.memory.tier == "file":
            check_report(cfg, check_room(plan.cfg, tier_bytes(plan.prediction, plan.residency)))
        yield Prepared(plan, inputs)


@contextmanager
def read_inputs(cfg: RunConfig, dry_run: bool = False) -> Iterator[Inputs]:
    """Read and check all but the plan. A dry run downloads no model, and notes where the hub cannot be reached.

    Cheap checks come first: functions start in a second, models need torch, and data needs the model's tokenizer.
    """
    with started_functions(cfg) as functions:
        with told("checking the models"):
            checked = check_models(cfg)
            if dry_run:
                check_passes(cfg)
            tokenizer = checked.tokenizer
            if tokenizer is None and not dry_run:
                with told_with_profile(cfg):
                    tokenizer = load_tokenizer(model_source(cfg, cfg.model.path), cfg.model.trust_remote_code)
        inputs = Inputs(tokenizer, notes=checked.notes)
        if tokenizer is None:
            inputs.notes.append(
                f"model.path: {cfg.model.path} is not on this machine; the lengths of prompts are not known."
            )
        with told("reading the data"):
            _read(cfg, functions, inputs, dry_run)
        yield inputs


def _read(cfg: RunConfig, functions: Functions, inputs: Inputs, dry_run: bool) -> None:
    """Fill in data and rewards."""
    say = inputs.notes.append
    if cfg.uses_engines:
        try:
            inputs.prompts = load_prompts(cfg, inputs.tokenizer, say)
            inputs.held_out = load_eval(cfg, inputs.tokenizer, say)
        except Unreachable as error:
            if not dry_run:
                raise
            say(f"not checked: {error}")
    else:
        inputs.recorded = load_rollouts(cfg.rollout.replay)
        check_recorded(cfg, inputs.recorded)
    check_columns(cfg, functions, inputs.prompts.look(1) if inputs.prompts else [], inputs.held_out)
    inputs.reward, inputs.eval_reward = load_rewards(cfg)
    inputs.extra_rewards = load_extra_rewards(cfg)
    if inputs.prompts is not None:
        _check_labels(inputs, say)


def _check_labels(inputs: Inputs, say: Say) -> None:
    rewards = [inputs.reward, *(extra for _, extra in inputs.extra_rewards)]
    check_labels(rewards, inputs.prompts, inputs.eval_reward, inputs.held_out, say)
