"""Prompts from reasoning-gym: endless, repeatable, and apart from the held-out ones."""

from __future__ import annotations

import json

import pytest

from hybrid.data.prompts import load_eval, load_prompts
from hybrid.data.tasks import CHUNK, Task, entry, held_out
from hybrid.errors import DataError
from tests.unit.data_files import config, tokenizer

SUMS = "reasoning_gym:chain_sum"
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(**changes):
    return config(SUMS, **{"task_args": ONE_DIGIT, "eval_size": 64, **changes})


def test_a_question_carries_its_answer_and_the_entry_that_its_scorer_needs():
    cfg = sums(prompt_suffix=" Only the number.")
    prompt = load_prompts(cfg, tokenizer()).take(1)[0]
    problem = prompt.columns["entry"]
    assert prompt.text == problem["question"] + " Only the number."
    assert prompt.label == problem["answer"] and "metadata" in problem


def test_training_never_sees_a_held_out_question():
    held = load_eval(sums(), tokenizer())
    trained = load_prompts(sums(), tokenizer()).take(1500)
    questions = {p.text for p in held}
    assert len(questions) == 64 and [p.index for p in held] == list(range(64))
    assert not questions & {p.text for p in trained}
    assert len({p.text for p in trained}) > 64
    assert [p.index for p in trained] == list(range(1500))


def test_the_held_out_set_is_the_same_for_every_seed_and_training_is_not():
    assert load_eval(sums(seed=1), tokenizer()) == load_eval(sums(seed=2), tokenizer())
    texts = [[p.text for p in load_prompts(sums(seed=s), tokenizer()).take(200)] for s in (1, 2, 1)]
    assert texts[0] == texts[2]
    # Seeds of reasoning-gym count up with the entry: neighbouring ones must not give one stream, shifted.
    assert texts[0][1:] != texts[1][:-1] and texts[1][1:] != texts[0][:-1]


def test_resume_goes_on_with_the_very_next_question():
    straight = load_prompts(sums(), tokenizer())
    straight.take(37)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = load_prompts(sums(), tokenizer())
    resumed.load_state_dict(state)
    assert resumed.take(100) == straight.take(100)


def test_a_stream_does_not_end_where_a_task_does():
    task = Task("gsm_symbolic")
    assert entry(task, "s", CHUNK - 1)["question"] != entry(task, "s", CHUNK)["question"]


def test_a_task_too_small_for_its_held_out_set_is_refused():
    few = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    for size in (8, 30):
        with pytest.raises(DataError, match=r"data.eval_size to at most [2-5],") as error:
            load_prompts(config(SUMS, task_args=few, eval_size=size), tokenizer())
        assert "different questions" in str(error.value)
    assert len(held_out(Task("chain_sum", few), 9, 0, lambda _: True)) == 9


def test_questions_that_are_too_long_are_dropped_counted_or_refused():
    mixed = {"min_terms": 2, "max_terms": 12}
    limit = sorted(len(p.token_ids) for p in load_prompts(config(SUMS, task_args=mixed), tokenizer()).take(99))[50]
    source = load_prompts(config(SUMS, task_args=mixed, max_prompt_tokens=limit), tokenizer())
    assert max(len(p.token_ids) for p in source.take(50)) <= limit and source.dropped > 10
    with pytest.raises(DataError, match=r"data.too_long=drop"):
        load_prompts(config(SUMS, task_args=mixed, max_prompt_tokens=limit, too_long="error"), tokenizer())
    with pytest.raises(DataError, match=r"longer than data.max_prompt_tokens"):
        load_prompts(config(SUMS, task_args=mixed, max_prompt_tokens=3), tokenizer())


def test_an_evaluation_on_another_task_does_not_get_the_arguments_of_training():
    held = load_eval(sums(eval="reasoning_gym:basic_arithmetic", eval_size=4), tokenizer())
    assert len(held) == 4 and held[0].columns["entry"]["metadata"]["source_dataset"] == "basic_arithmetic"


def test_tasks_can_be_mixed():
    parts = [{"name": "chain_sum", "weight": 1, "config": ONE_DIGIT}, {"name": "leg_counting", "weight": 1}]
    cfg = config("reasoning_gym:composite", task_args={"datasets": parts}, eval_size=4)
    names = {p.columns["entry"]["metadata"]["source_dataset"] for p in load_prompts(cfg, tokenizer()).take(40)}
    assert names == {"chain_sum", "leg_counting"}


@pytest.mark.parametrize(
    ("train", "args", "hint"),
    [
        ("reasoning_gym:chain_sums", {}, "Did you mean chain_sum"),
        (SUMS, {"min_term": 2}, "It takes min_terms, max_terms"),
        (SUMS, {"min_terms": 0}, "min_terms must be positive"),
        (SUMS, {"seed": 3}, "train.seed"),
    ],
)
def test_a_wrong_task_or_argument_is_explained(train, args, hint):
    with pytest.raises(DataError, match=hint):
        load_prompts(config(train, task_args=args), tokenizer())
