"""Prompts from files: what is read, how it is rendered, in what order it comes, and what is refused."""

from __future__ import annotations

import json

import pytest

from hybrid.data.prompts import load_eval, load_prompts
from hybrid.errors import DataError
from tests.unit.data_files import config, plain_tokenizer, tokenizer, write_jsonl


def rows(count: int) -> list[dict]:
    return [{"prompt": f"What is {i} + 1?", "label": i + 1, "level": i % 3} for i in range(count)]


def refusal(cfg, tok=None) -> str:
    with pytest.raises(DataError) as error:
        load_prompts(cfg, tok or tokenizer())
    return str(error.value)


def test_a_record_becomes_a_tokenised_prompt_with_label_and_columns(tmp_path):
    source = load_prompts(config(write_jsonl(tmp_path / "a.jsonl", rows(3)), shuffle=False), tokenizer())
    first = source.take(2)[1]
    assert tokenizer().decode(first.token_ids) == "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert (first.text, first.label, first.columns) == ("What is 1 + 1?", 2, {"level": 1})
    assert first.where == f"{tmp_path / 'a.jsonl'}:2"


def test_system_prompt_and_suffix_are_added(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"question": "Why?", "answer": "so"}])
    cfg = config(
        file, prompt_field="question", label_field="answer", system_prompt="Be brief.", prompt_suffix=" In a word."
    )
    (prompt,) = load_prompts(cfg, tokenizer()).take(1)
    assert tokenizer().decode(prompt.token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy? In a word.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (prompt.text, prompt.label) == ("Why? In a word.", "so")


def test_messages_keep_their_order_and_the_suffix_joins_the_last(tmp_path):
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "2 + 2?"},
    ]
    cfg = config(write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat}]), prompt_suffix=" Please.")
    prompt = load_prompts(cfg, tokenizer()).take(1)[0]
    assert tokenizer().decode(prompt.token_ids).count("<|im_start|>") == 4
    assert prompt.text == "user: Hi\n\nassistant: Hello\n\nuser: 2 + 2? Please."
    assert prompt.label is None


def test_a_base_model_gets_plain_text(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "Q: 1 + 1\nA:"}])
    prompt = load_prompts(config(file, system_prompt="Sums."), plain_tokenizer()).take(1)[0]
    assert tokenizer().decode(prompt.token_ids) == "Sums.\n\nQ: 1 + 1\nA:"


def test_messages_need_a_chat_template(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "Hi"}]}])
    message = refusal(config(file), plain_tokenizer())
    assert "a.jsonl:1" in message and "no chat template" in message and "instruct" in message


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('{"prompt": "cut', "is not JSON"),
        ('["prompt"]', "must be a JSON object, not list"),
        ('{"promt": "x"}', "did you mean promt"),
        ('{"prompt": "  "}', "is empty"),
        ('{"prompt": 7}', "must be a text or a list of chat messages, not int"),
        ('{"prompt": []}', "not an empty list"),
        ('{"prompt": ["hi"]}', 'must be {"role"'),
        ('{"prompt": [{"role": "User", "content": "x"}]}', "role 'User'"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "only text is supported"),
        ('{"prompt": [{"role": "assistant", "content": "x"}]}', "must end with the user"),
        ('{"prompt": "\\ud800"}', "surrogates"),
        (b'{"prompt": "\xff"}', "is not JSON"),
    ],
)
def test_a_malformed_record_is_named_by_file_and_line(tmp_path, line, rule):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"prompt": "good"}\n\n' + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    message = refusal(config(str(file)))
    assert f"{file}:3" in message and rule in message


def test_a_second_system_message_is_refused(tmp_path):
    chat = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat}])
    assert "data.system_prompt" in refusal(config(file, system_prompt="C"))
    assert load_prompts(config(file), tokenizer()).take(1)[0].text.startswith("system: A")


def test_a_template_that_refuses_is_named_with_the_record(tmp_path):
    tok = plain_tokenizer()
    tok.chat_template = "{{ raise_exception('roles must alternate') }}"
    message = refusal(config(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])), tok)
    assert "a.jsonl:1" in message and "roles must alternate" in message


def test_a_label_field_that_the_profile_names_must_be_there(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "answer": 1}])
    assert "data.label_field" in refusal(config(file, label_field="anser"))
    assert load_prompts(config(file), tokenizer()).take(1)[0].columns == {"answer": 1}


def test_long_prompts_are_dropped_and_counted_or_refused(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "hi"}, {"prompt": "long " * 50}, {"prompt": "ho"}])
    source = load_prompts(config(file, max_prompt_tokens=20), tokenizer())
    assert source.dropped == 1 and {p.text for p in source.take(4)} == {"hi", "ho"}
    message = refusal(config(file, max_prompt_tokens=20, too_long="error"))
    assert "a.jsonl:2" in message and "data.max_prompt_tokens=20" in message
    assert "all 3 prompts are longer" in refusal(config(file, max_prompt_tokens=2))


def test_a_relative_file_is_found_beside_the_profile(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "beside.jsonl", rows(3))
    cfg = config("beside.jsonl", eval="beside.jsonl").model_copy(update={"profile_dir": tmp_path})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len({p.text for p in load_prompts(cfg, tokenizer()).take(3)}) == len(load_eval(cfg, tokenizer())) == 3


def test_a_source_without_prompts_is_an_error(tmp_path):
    assert "it is empty" in refusal(config(write_jsonl(tmp_path / "a.jsonl", [])))
    (tmp_path / "a.csv").write_text("prompt\nhi\n")
    assert "no .jsonl file" in refusal(config(str(tmp_path / "a.csv")))
    assert "does not exist" in refusal(config(str(tmp_path / "none.jsonl")))
    (tmp_path / "folder").mkdir()
    assert "save_to_disk" in refusal(config(str(tmp_path / "folder")))


def test_every_epoch_has_every_prompt_once_in_a_new_order(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", rows(10))
    source = load_prompts(config(file), tokenizer())
    taken = [p for size in (3, 4, 7, 16) for p in source.take(size)]
    epochs = [[p.text for p in taken[i : i + 10]] for i in (0, 10, 20)]
    assert all(len(set(epoch)) == 10 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [p.index for p in taken] == list(range(30))


def test_order_depends_on_the_seed_only(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", rows(20))
    order = {
        seed: [[p.text for p in load_prompts(config(file, seed=seed), tokenizer()).take(25)] for _ in range(2)]
        for seed in (0, 1)
    }
    assert order[0][0] == order[0][1] != order[1][0]
    unshuffled = load_prompts(config(file, shuffle=False), tokenizer()).take(25)
    assert [p.label for p in unshuffled] == [*range(1, 21), *range(1, 6)]


def test_resume_goes_on_with_the_very_next_prompt(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [*rows(7), {"prompt": "long " * 900}])
    straight = load_prompts(config(file), tokenizer())
    straight.take(5)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = load_prompts(config(file), tokenizer())
    resumed.load_state_dict(state)
    assert resumed.take(20) == straight.take(20) and resumed.dropped == straight.dropped == 1


def test_a_position_in_other_data_is_refused(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", rows(7))
    state = load_prompts(config(file), tokenizer()).state_dict()
    with pytest.raises(DataError, match=r"train.seed was 0, is 1"):
        load_prompts(config(file, seed=1), tokenizer()).load_state_dict(state)
    write_jsonl(tmp_path / "a.jsonl", rows(8))
    with pytest.raises(DataError, match=r"prompts was 7, is 8"):
        load_prompts(config(file), tokenizer()).load_state_dict(state)


def test_evaluation_draws_from_its_own_file(tmp_path):
    train, held_out = write_jsonl(tmp_path / "a.jsonl", rows(3)), write_jsonl(tmp_path / "b.jsonl", rows(50))
    assert load_eval(config(train), tokenizer()) == []
    chosen = [load_eval(config(train, eval=held_out, eval_size=8, seed=s), tokenizer()) for s in (0, 1)]
    assert chosen[0] == chosen[1] and len({p.text for p in chosen[0]}) == 8
    assert [p.index for p in chosen[0]] == list(range(8))
    assert len(load_eval(config(train, eval=held_out, eval_size=90), tokenizer())) == 50


def test_a_saved_datasets_folder_is_read_by_split(tmp_path):
    import datasets

    make = datasets.Dataset.from_list
    chats = [{"prompt": [{"role": "user", "content": f"{i}?"}], "label": str(i)} for i in range(4)]
    datasets.DatasetDict(train=make(chats), test=make(rows(2))).save_to_disk(tmp_path / "both")
    make([{"prompt": "ok"}, {"prompt": ""}]).save_to_disk(tmp_path / "one")
    cfg = config(str(tmp_path / "both"), eval=str(tmp_path / "both"))
    assert sorted(p.text for p in load_prompts(cfg, tokenizer()).take(4)) == ["0?", "1?", "2?", "3?"]
    assert [p.label for p in load_eval(cfg, tokenizer())] == [1, 2]
    assert "its splits are train, test" in refusal(config(str(tmp_path / "both"), split="dev"))
    assert "one[1]: the prompt is empty" in refusal(config(str(tmp_path / "one")))


def test_an_unreachable_hub_is_explained(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = refusal(config("nobody/no-such-data"))
    assert "nobody/no-such-data" in message and "save_to_disk" in message
