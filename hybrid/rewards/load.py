"""From `reward.function` and `data.eval_function` to something that scores."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from hybrid.config import RunConfig
from hybrid.config.resolve import absolute_function
from hybrid.data.tasks import Task, eval_task, train_task
from hybrid.errors import RewardError
from hybrid.rewards.function import RewardFunction
from hybrid.rewards.verifiers import MathVerify, TaskScorer


def load_rewards(cfg: RunConfig) -> tuple[RewardFunction | None, RewardFunction | None]:
    """Training's reward function (None with a reward model) and the evaluation's (None without an evaluation).

    A held-out reasoning-gym set that the profile names no function for is scored by its task. Raises `RewardError`.
    """
    function, by_group = absolute_function(cfg, cfg.reward.function), cfg.reward.batch == "group"
    reward = None
    if function:
        reward = load_reward(function, cfg.reward.timeout_s, train_task(cfg), "reward.function", by_group)
    task = eval_task(cfg)
    if task is None and cfg.data.eval is None:
        return reward, None
    eval_function = absolute_function(cfg, cfg.data.eval_function) or function or ("reasoning_gym" if task else None)
    if eval_function is None:
        raise RewardError(
            f"data.eval={cfg.data.eval} has nothing that scores it: reward.function is null. Set data.eval_function."
        )
    if reward and eval_function == function and task == train_task(cfg):
        return reward, reward
    return reward, load_reward(eval_function, cfg.reward.timeout_s, task, "data.eval_function")


def load_extra_rewards(cfg: RunConfig) -> list[tuple[float, RewardFunction]]:
    """(weight, function) of `reward.extra`. Raises `RewardError`."""
    timeout_s, task, by_group = cfg.reward.timeout_s, train_task(cfg), cfg.reward.batch == "group"
    return [
        (weight, load_reward(absolute_function(cfg, spec), timeout_s, task, "reward.extra", by_group))
        for spec, weight in cfg.reward.extra.items()
    ]


def load_reward(
    spec: str, timeout_s: float, task: Task | None = None, key: str = "reward.function", by_group: bool = False
) -> RewardFunction:
    """`reasoning_gym` (the scorer of `task`), `math_verify`, or `file.py:function`; `key` is where the profile says so. `by_group` is
    about functions of a file: those that come with hybrid look at one sample at a time.

    Raises `RewardError` when there is no such function, or its file does not run.
    """
    if spec == "reasoning_gym":
        if task is None:
            raise RewardError(
                f"{key}=reasoning_gym scores a reasoning_gym task, and the data is none. Set {key} to math_verify or "
                "file.py:function."
            )
        return RewardFunction(TaskScorer(task), spec, timeout_s, by_group=True)
    if spec == "math_verify":
        return RewardFunction(MathVerify(), spec, timeout_s, by_group=True)
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py"):
        raise RewardError(f"{key}={spec} is neither reasoning_gym, math_verify nor file.py:function.")
    module = _load_module(Path(file), key)
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1) or names
        hint = f"did you mean {' or '.join(near)}?" if near else "it defines none."
        raise RewardError(f"{key}: {file} defines no function {name}; {hint}")
    reward = RewardFunction(function, spec, timeout_s, by_group)
    if not reward.accepts("responses"):
        raise RewardError(
            f"{key}: {spec} does not take responses. Write def {name}(prompts, responses, labels, **columns)."
        )
    return reward


def _load_module(path: Path, key: str) -> ModuleType:
    """The module at `path`, run once however many of its functions are asked for. It may import files beside it."""
    if not path.is_file():
        raise RewardError(f"{key}: the file {path} does not exist.")
    path = path.resolve()
    name = f"hybrid_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Before it runs: dataclasses and pickle look it up.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RewardError(f"{key}: {path} does not run: {type(error).__name__}: {error}") from error
    return module
