"""From `reward.function`, `reward.extra` and `data.eval_function` to something that scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from hybrid.config import RunConfig
from hybrid.config.load import check_report
from hybrid.config.resolve import absolute_function
from hybrid.config.violations import Violation
from hybrid.data.samples import Prompt
from hybrid.data.tasks import Task, eval_task, train_task
from hybrid.errors import ConfigError, EndsProgram, HybridError
from hybrid.rewards.columns import columns_of
from hybrid.rewards.function import RewardFunction
from hybrid.rewards.user import Problem, UserFunction, user_function
from hybrid.rewards.verifiers import MathVerify, TaskScorer

Functions = Mapping[str, UserFunction]
"""Users' functions by `file.py:function`, with absolute paths."""


@contextmanager
def started_functions(cfg: RunConfig) -> Iterator[Functions]:
    """The users' functions that a profile names, running, and fit for its data as far as that can be read at once. `load_reward` takes
    those that run. They end with the context.

    Raises `ConfigError` with all that is wrong with them, `EndsProgram` where one of the files ends the program.
    """
    uses = [(key, spec, data) for key, spec, data in _uses(cfg) if _is_users(spec)]
    with ExitStack() as stack:
        functions = {spec: _function(cfg, spec) for spec in dict.fromkeys(spec for _, spec, _ in uses)}
        for function in functions.values():
            stack.callback(function.close)
        problems = {spec: function.problem() for spec, function in functions.items()}  # they have all begun to import
        check_report(cfg, list(_violations(cfg, uses, functions, problems)), _error(problems.values()))
        yield functions


def check_columns(cfg: RunConfig, functions: Functions, train: Sequence[Prompt], held_out: Sequence[Prompt]) -> None:
    """Raise `ConfigError` where a user's function needs a column that none of these prompts has; for data that no file here holds."""
    prompts = {"train": train, "eval": held_out}
    found = []
    for key, spec, data in _uses(cfg):
        if spec in functions and prompts[data] and columns_of(cfg, data, ()) is None:
            columns = dict.fromkeys(name for prompt in prompts[data] for name in prompt.columns)
            if problem := functions[spec].lacks(list(columns), _fields(cfg)):
                found.append(_violation(key, spec, problem))
    check_report(cfg, found)


def load_rewards(cfg: RunConfig) -> tuple[RewardFunction | None, RewardFunction | None]:
    """Training's reward function (None with a reward model) and the evaluation's (None without an evaluation).

    A held-out reasoning-gym set that the profile names no function for is scored by its task. Raises `ConfigError`.
    """
    function = absolute_function(cfg, cfg.reward.function)
    reward = _load(cfg, function, "reward.function", train_task(cfg)) if function else None
    task = eval_task(cfg)
    if task is None and cfg.data.eval is None:
        return reward, None
    eval_function = absolute_function(cfg, cfg.data.eval_function) or function or ("reasoning_gym" if task else None)
    if eval_function is None:
        raise ConfigError(
            f"data.eval: {cfg.data.eval} is invalid: reward.function is null, and nothing else scores it. Set data.eval_function."
        )
    if reward and eval_function == function and task == train_task(cfg):
        return reward, reward
    return reward, _load(cfg, eval_function, "data.eval_function", task)


def load_extra_rewards(cfg: RunConfig) -> list[tuple[float, RewardFunction]]:
    """(weight, function) of `reward.extra`. Raises `ConfigError`."""
    return [
        (weight, _load(cfg, absolute_function(cfg, spec), "reward.extra", train_task(cfg)))
        for spec, weight in cfg.reward.extra.items()
    ]


def load_reward(
    spec: str,
    timeout_s: float,
    task: Task | None = None,
    key: str = "reward.function",
    by_group: bool = False,
    processes: int = 1,
) -> RewardFunction:
    """`reasoning_gym` (the scorer of `task`), `math_verify`, or `file.py:function`; `key` is where the profile says so. `by_group` and
    `processes` are about functions of a file: those that come with hybrid look at one sample at a time.

    Raises `ConfigError` when there is no such function, or it cannot be used, `EndsProgram` when its file ends the program.
    """
    if spec == "reasoning_gym":
        if task is None:
            raise ConfigError(
                f"{key}: reasoning_gym is invalid: it scores a reasoning_gym task, and the data is not one. Set {key} to math_verify or "
                "file.py:function."
            )
        return RewardFunction(TaskScorer(task), spec, timeout_s, by_group=True)
    if spec == "math_verify":
        return RewardFunction(MathVerify(), spec, timeout_s, by_group=True)
    if not _is_users(spec):
        raise ConfigError(
            f"{key}: {spec} is invalid: it is not reasoning_gym, math_verify or file.py:function. Name one."
        )
    function = user_function(spec, processes, timeout_s)
    if problem := function.problem():
        function.close()
        found = _violation(key, spec, problem)
        raise _error([problem])(f"{found.rule}. {found.fix}")
    return RewardFunction(function, spec, timeout_s, by_group)


def _load(cfg: RunConfig, spec: str, key: str, task: Task | None) -> RewardFunction:
    by_group = cfg.reward.batch == "group" and key != "data.eval_function"
    return load_reward(spec, cfg.reward.timeout_s, task, key, by_group, cfg.reward.processes)


def _function(cfg: RunConfig, spec: str) -> UserFunction:
    return user_function(spec, cfg.reward.processes, cfg.reward.timeout_s)


def _is_users(spec: str) -> bool:
    return spec.rpartition(":")[0].endswith(".py")


def _uses(cfg: RunConfig) -> list[tuple[str, str, str]]:
    """(key, function, the data it scores) of every function that the profile names."""
    uses = [("reward.function", cfg.reward.function, "train")]
    uses += [("reward.extra", spec, "train") for spec in cfg.reward.extra]
    if cfg.data.eval is not None or eval_task(cfg) is not None:
        key = "data.eval_function" if cfg.data.eval_function else "reward.function"
        uses.append((key, cfg.data.eval_function or cfg.reward.function, "eval"))
    return [(key, absolute_function(cfg, spec), data) for key, spec, data in uses if spec]


def _error(problems: Iterable[Problem | None]) -> type[HybridError]:
    """The class of the error that tells `problems`: code that ends the program is more than a mistake in a profile."""
    return EndsProgram if any(problem and problem.ends_program for problem in problems) else ConfigError


def _violations(
    cfg: RunConfig, uses: list[tuple[str, str, str]], functions: Functions, problems: Mapping[str, Problem | None]
) -> Iterator[Violation]:
    told = set()
    for key, spec, data in uses:
        problem = problems[spec]
        if problem is None and (needed := functions[spec].needs()):
            columns = columns_of(cfg, data, needed)
            problem = None if columns is None else functions[spec].lacks(columns, _fields(cfg))
        if problem is not None and (spec, problem) not in told:
            told.add((spec, problem))
            yield _violation(key, spec, problem)


def _violation(key: str, spec: str, problem: Problem) -> Violation:
    return Violation((key,), f"{key}: {spec} is invalid: {problem.why}", problem.fix)


def _fields(cfg: RunConfig) -> dict[str, str]:
    return {cfg.data.prompt_field: "prompts", cfg.data.label_field: "labels"}
