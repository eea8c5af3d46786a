"""Commands that are shown can be pasted into a shell, whatever blanks and quotes their parts have."""

from __future__ import annotations

import shlex

import pytest

from hybrid.config import load_run, resolve
from hybrid.planning.machine import plan_here
from hybrid.planning.show import suggestion_lines
from hybrid.planning.suggest import Suggestion
from hybrid.reporting import _next_commands
from hybrid.surroundings import check_surroundings


def test_the_commands_at_the_end_of_a_run(profile, tmp_path):
    run_dir = tmp_path / "it's a run"
    cfg = resolve(load_run(profile), run_dir)
    for command, _ in _next_commands(cfg, run_dir):
        words = shlex.split(command)
        assert any(word in words for word in (str(run_dir / "profile.yaml"), str(run_dir / "samples.jsonl"))), command


def test_suggestions_of_a_plan(profile):
    plan, _ = plan_here(resolve(load_run(profile)))
    overrides = ("rollout.stop=['a b']", "model.path=/models/my model")
    line = suggestion_lines(plan, [Suggestion(overrides, plan)])[1]
    assert tuple(shlex.split(line.partition("  (")[0])) == overrides


def test_variables_to_unset_are_names_alone(tmp_path):
    with pytest.raises(Exception, match=r"`unset RAY_RUNTIME_ENV_HOOK`"):
        check_surroundings("a:1", {"RAY_RUNTIME_ENV_HOOK": "no such; hook"})
