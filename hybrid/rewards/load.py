"""From a profile's words to reward functions."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path

from hybrid.config import RunConfig, resolve_path
from hybrid.data.sources import REASONING_GYM, is_task, make_task
from hybrid.errors import RewardError
from hybrid.rewards import verifiers
from hybrid.rewards.function import RewardFunction


def load_rewards(cfg: RunConfig) -> tuple[RewardFunction | None, RewardFunction | None]:
    """The reward of training (None where a reward model gives it) and that of the evaluation (the same unless data.eval_function).

    Raises `RewardError` when a file or function is not there, or does not take prompts, responses and labels.
    """
    training = _load(cfg, cfg.reward.function, cfg.data.train) if cfg.reward.function else None
    if cfg.data.eval_function is None:
        return training, training
    return training, _load(cfg, cfg.data.eval_function, cfg.data.eval or cfg.data.train)


def _load(cfg: RunConfig, spec: str, source: str) -> RewardFunction:
    if spec == "math_verify":
        call: Callable = verifiers.math_verify
    elif spec == "reasoning_gym":
        if not is_task(source):
            raise RewardError(
                f"The reward reasoning_gym scores {REASONING_GYM}TASK data, not {source}: use math_verify or file.py:function."
            )
        call = verifiers.reasoning_gym(make_task(cfg, source, cfg.train.seed))
    else:
        call = _from_file(cfg, spec)
    return RewardFunction(spec, call, cfg.reward.timeout_s)


def _from_file(cfg: RunConfig, spec: str) -> Callable:
    file, _, name = spec.rpartition(":")
    path = resolve_path(cfg, file)
    if not file or not path.is_file():
        raise RewardError(f"Reward {spec}: no file {file or spec}. Give `file.py:function`, relative to the profile.")
    module = _import(path, spec)
    functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
    if name not in functions:
        nearest = difflib.get_close_matches(name, functions, n=1, cutoff=0.0)
        raise RewardError(
            f"Reward {spec}: {path} has no function {name}" + (f"; the nearest is {nearest[0]}." if nearest else ".")
        )
    call = getattr(module, name)
    parameters = inspect.signature(call).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [p for p in ("prompts", "responses", "labels") if p not in parameters and not takes_any]
    if missing:
        raise RewardError(
            f"Reward {spec} does not take {', '.join(missing)}: write `def {name}(prompts, responses, labels, **columns)`."
        )
    return call


def _import(path: Path, spec: str):
    description = importlib.util.spec_from_file_location(f"hybrid_reward_{path.stem}", path)
    module = importlib.util.module_from_spec(description)
    try:
        description.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"Reward {spec}: importing {path} raised {type(error).__name__}: {error}") from error
    return module
