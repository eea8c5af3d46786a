"""A user's function is looked at before a run starts: one that cannot work is refused with status 2 (C32), a file that ends the program
with 1 (N1)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybrid.errors import ConfigError, EndsProgram, HybridError
from hybrid.rewards import check_columns, load_reward, load_rewards, score, started_functions, user
from tests.unit.data_files import config, sample, write_jsonl

FILE = Path(__file__).with_name("user_rewards.py")
SUMS = "reasoning_gym:chain_sum"


def refused(spec: str, **options) -> str:
    with pytest.raises(ConfigError) as error:
        load_reward(spec, 10, **options)
    return str(error.value)


def file_of(folder: Path, text: str | bytes, name: str = "rewards.py") -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


@pytest.mark.parametrize(("name", "scores"), [("judge", [0.25]), ("part", [0.5]), ("by_lambda", [1.0])])
def test_whatever_can_be_called_is_a_function(name, scores):
    reward = load_reward(f"{FILE}:{name}", 10)
    assert score(reward, [sample()]) == scores
    reward.close()


def test_a_file_may_import_what_lies_beside_it_and_is_imported_by_its_name(tmp_path):
    file_of(tmp_path, "POINTS = 0.5\n", "beside.py")
    text = "from beside import POINTS\ndef fn(responses): return [POINTS + (__name__ == 'json')] * len(responses)\n"
    for name in ("rewards.py", "json.py"):  # a library of that name stays what it is
        reward = load_reward(f"{file_of(tmp_path, text, name)}:fn", 10)
        assert score(reward, [sample()]) == [0.5]
        reward.close()


def test_a_file_in_another_encoding_is_read_as_python_does(tmp_path):
    file = file_of(tmp_path, "# -*- coding: latin-1 -*-\n# \xe9\ndef fn(responses): ...".encode("latin-1"))
    load_reward(f"{file}:fn", 10).close()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("judges", r"user_rewards.py defines no judges. Did you mean judge\?"),
        ("Judge", "Judge is a class"),
        ("number", "number is a int"),
        ("blind", "does not take responses: its parameters are prompts. Write def blind"),
        ("trl_style", "its parameter completions has no default, and the responses are called responses here"),
        ("verl_style", "its parameters are data_source, solution_str, ground_truth, extra_info"),
    ],
)
def test_c32_a_function_that_cannot_be_called_is_refused_with_its_parameter(name, said):
    message = refused(f"{FILE}:{name}")
    assert message.startswith(f"reward.function: {FILE}:{name} is invalid: ")
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import nothing_like_this",
            r"rewards.py does not run: ModuleNotFoundError: .*nothing_like_this.* at .*rewards.py:1 \(import",
        ),
        ("x = 1\ndef broken(:\n", r"rewards.py, line 2, is not valid Python \("),
        (b"\xe9 = 1", "is not valid Python"),
        ("import ast\nast.literal_eval('(')", "does not run: SyntaxError"),
        ("fn = print", "does not take responses"),
        (
            "import sys\nsys.exit(0)",
            r"ends the program: SystemExit: 0 at .*rewards.py:2 .* Put the code .* if __name__ == '__main__'",
        ),
        ("import os\nos._exit(0)", r"ends the program: its process ended with status 0.* if __name__ == '__main__'"),
        (
            "while True: pass",
            r"did not end within 0.5 s: it is in .*rewards.py:1 \(<module>\). Put the code .* '__main__'",
        ),
    ],
)
def test_n1_a_file_that_cannot_be_imported_is_refused_with_its_line(tmp_path, monkeypatch, text, said):
    monkeypatch.setattr(user, "START_S", 60 if said[:3] != "did" else 0.5)
    with pytest.raises(HybridError, match=said) as error:
        load_reward(f"{file_of(tmp_path, text)}:fn", 0.5)
    assert isinstance(error.value, EndsProgram) == said.startswith("ends the program")
    assert isinstance(error.value, ConfigError) != said.startswith("ends the program")


def test_a_spec_that_names_no_function_is_explained():
    assert "is not reasoning_gym, math_verify or file.py:function" in refused("reasoning_gim")
    assert "the data is not one" in refused("reasoning_gym")


def test_training_and_evaluation_each_get_their_function():
    mine = f"{FILE}:judge"
    train, held_out = load_rewards(config(SUMS, reward={"function": mine}, eval_function="reasoning_gym"))
    assert (train.name, held_out.name) == (mine, "reasoning_gym")
    train, held_out = load_rewards(config(SUMS, reward={"function": "reasoning_gym"}))
    assert train is held_out
    train, held_out = load_rewards(config(SUMS, reward={"model": "m"}))
    assert train is None and held_out.name == "reasoning_gym"
    train, held_out = load_rewards(config("a.jsonl", reward={"function": mine}))
    assert train.name == mine and held_out is None


def test_an_evaluation_that_nothing_can_score_is_refused():
    with pytest.raises(ConfigError, match=r"Set data.eval_function"):
        load_rewards(config("a.jsonl", eval="b.jsonl", reward={"model": "m"}))
    with pytest.raises(ConfigError, match="the data is not one"):
        load_rewards(config(SUMS, eval="b.jsonl", reward={"function": "reasoning_gym"}))


def test_a_function_runs_once_for_all_who_name_it_and_ends_with_the_run():
    cfg = config(SUMS, reward={"function": f"{FILE}:of_process", "extra": {f"{FILE}:judge": 1.0}}, eval=SUMS)
    with started_functions(cfg):
        first, held_out = load_rewards(cfg)
        with started_functions(cfg):
            again, _ = load_rewards(cfg)
            assert score(first, [sample()]) == score(again, [sample()]) == score(held_out, [sample()])
    with started_functions(cfg):
        assert score(load_rewards(cfg)[0], [sample()]) != [0.0]


def test_c32_a_parameter_that_is_no_column_of_a_file_is_found_before_anything_starts(tmp_path):
    rows = [{"prompt": "a", "label": "b"}, {"prompt": "a", "label": "b", "level": 3}]
    needs = {"function": f"{FILE}:needs_level"}
    with started_functions(config(write_jsonl(tmp_path / "a.jsonl", rows), reward=needs)):
        pass
    bare = write_jsonl(tmp_path / "b.jsonl", rows[:1])
    with (
        pytest.raises(ConfigError, match="parameter level has no default and") as error,
        started_functions(config(bare, reward=needs)),
    ):
        pass
    assert "a batch has prompts, responses, labels, token_ids" in str(error.value)
    renamed = config(
        write_jsonl(tmp_path / "c.jsonl", [{"prompt": "a", "level": 1}]), label_field="level", reward=needs
    )
    with pytest.raises(ConfigError, match="Rename it labels"), started_functions(renamed):
        pass
    with pytest.raises(ConfigError, match=r"a batch has .*entry"), started_functions(config(SUMS, reward=needs)):
        pass


def test_c32_columns_that_only_the_hub_knows_are_looked_at_when_the_data_was_read():
    cfg = config("some-org/some-data", reward={"function": f"{FILE}:needs_level"})
    with started_functions(cfg) as functions:
        check_columns(cfg, functions, [sample(level=1).prompt], [])
        with pytest.raises(ConfigError, match="its parameter level"):
            check_columns(cfg, functions, [sample(levels=1).prompt], [])


def test_what_a_file_prints_is_no_part_of_a_plan(profile, hybrid_command):
    file_of(profile.parent, "print('imported')\ndef fn(responses): ...\n", "mine.py")
    result = hybrid_command("plan", profile, "reward.function=mine.py:fn", "--json")
    assert "imported" in result.stderr and "imported" not in result.stdout


@pytest.mark.parametrize("command", [("train",), ("train", "--dry-run"), ("plan",)])
@pytest.mark.parametrize(
    ("last_line", "status", "said"),
    [
        ("sys.exit(main())", 1, "mine.py ends the program: SystemExit"),
        ("import os; os._exit(0)", 1, "mine.py ends the program: its process ended with status 0"),
        ("raise KeyError(1)", 2, "mine.py does not run: KeyError"),
    ],
)
def test_n1_the_command_refuses_and_leaves_nothing(profile, hybrid_command, command, last_line, status, said, tmp_path):
    file_of(profile.parent, f"import sys\ndef main(): ...\n{last_line}\n", "mine.py")
    name, *options = command
    overrides = [
        "model.path=some-org/some-model",
        "reward.function=mine.py:fn",
        f"reward.extra={{{FILE}:trl_style: 0.5}}",
    ]
    result = hybrid_command(name, profile, *overrides, *options)
    assert result.exit_code == status, result.output
    assert result.stderr.startswith(f"error: {profile}: 2 problems\n")
    assert said in result.output and "completions" in result.output
    assert ("if __name__ == '__main__'" in result.output) == (status == 1)
    assert not (tmp_path / "elsewhere" / "runs").exists()
