"""Data as other people write it: nested columns, messages of many forms, tools, template arguments; ids C35 to C38 of the cases."""

from __future__ import annotations

import json

import pytest

from hybrid.config import load_run
from hybrid.data.columns import NoColumn, pick
from hybrid.data.prompts import left_out, load_eval, load_prompts
from hybrid.errors import ConfigError, DataError
from launch.tiny_models import CHAT_TEMPLATE
from tests.unit.data_files import config, plain_tokenizer, tokenizer, write_jsonl

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds"}}
TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE


def with_template(template: str):
    made = plain_tokenizer()
    made.chat_template = template
    return made


def take(tmp_path, row: dict, tok=None, **data):
    """The prompt that one record becomes, its ids decoded, and what was said about the data."""
    said: list[str] = []
    file = write_jsonl(tmp_path / "a.jsonl", [row])
    (prompt,) = load_prompts(config(file, **data), tok or tokenizer(), said.append).take(1)
    return prompt, tokenizer().decode(prompt.token_ids), said


def refusal(tmp_path, row: dict, tok=None, **data) -> str:
    with pytest.raises(DataError) as error:
        take(tmp_path, row, tok, **data)
    assert f"{tmp_path / 'a.jsonl'}:1" in str(error.value)
    return str(error.value)


NESTED = {"a": {"b": 1, "b.c": 2, "d": [{"e": 3}]}, "a.b": 4, "x.y": {"z": 5}, "null": None}


@pytest.mark.parametrize(
    ("name", "value"),
    [("a.b", 4), ("a.b.c", 2), ("a.d.0.e", 3), ("x.y.z", 5), ("null", None), ("a.d.0", {"e": 3})],
)
def test_a_path_leads_into_columns_and_a_literal_name_wins(name, value):
    assert pick(NESTED, name) == value


@pytest.mark.parametrize("name", ["a.c", "a.b.d", "a.d.1", "a.d.e", "null.x", "x", "a."])
def test_a_path_that_leads_nowhere(name):
    with pytest.raises(NoColumn):
        pick(NESTED, name)


def test_c11_all_column_keys_take_paths(tmp_path):
    row = {
        "ask": {"text": "2 + 2?"},
        "reward_model": {"ground_truth": "4", "style": "rule"},
        "extra": {"tools": [TOOL]},
    }
    paths = {"prompt_field": "ask.text", "label_field": "reward_model.ground_truth", "tools_field": "extra.tools"}
    prompt, shown, _ = take(tmp_path, row, with_template(TOOLS_TEMPLATE), **paths)
    assert (prompt.text, prompt.label) == ("2 + 2?", "4") and '"name": "add"' in shown
    assert prompt.columns["reward_model"] == {"ground_truth": "4", "style": "rule"}
    message = refusal(tmp_path, row, prompt_field="ask.text", label_field="reward_model.groundtruth")
    assert "data.label_field" in message and "did you mean reward_model.ground_truth?" in message


def test_a_record_without_its_source_is_refused_when_read(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "meta": {"source": "b"}}, {"prompt": "y", "meta": {}}])
    weights = {"function": "math_verify", "source_field": "meta.source", "source_weights": {"b": 0.5}}
    with pytest.raises(DataError, match=r"a\.jsonl:2 has no field meta\.source \(reward\.source_field\)"):
        load_prompts(config(file, reward=weights), tokenizer())
    load_eval(config(file, eval=file, reward=weights), tokenizer())  # scores of the evaluation have no weights


def test_a_missing_prompt_column_names_the_usual_one(tmp_path):
    assert "did you mean messages?" in refusal(tmp_path, {"messages": [USER]})


ASKS = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}{{ m.content }}{% endfor %}"
)


def test_c35_keys_without_a_value_are_as_if_they_were_not_there(tmp_path):
    filled = [{"role": "user", "content": "hi", "tool_calls": None, "name": None}]
    assert take(tmp_path, {"prompt": filled}, with_template(ASKS))[1] == "hi"
    call = {"name": "f", "arguments": {"x": 1, "y": None}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    template = "{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls else m.content }}|{% endfor %}"
    assert take(tmp_path, {"prompt": history}, with_template(template))[1] == (
        'hi|[{"name": "f", "arguments": {"x": 1}}]|3|'
    )


def test_c35_what_datasets_fills_in(tmp_path):
    import datasets

    rows = [{"prompt": [USER]}, {"prompt": [{**USER, "tool_calls": [{"name": "f"}]}]}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    first, second = load_prompts(config(str(tmp_path / "d"), shuffle=False), with_template(ASKS)).take(2)
    assert [tokenizer().decode(p.token_ids) for p in (first, second)] == ["hi", "1hi"]


def test_c36_lone_surrogates_are_refused_in_prompts_and_kept_elsewhere(tmp_path):
    assert "surrogates not allowed" in refusal(tmp_path, {"prompt": "a\ud800"})
    assert "surrogates not allowed" in refusal(tmp_path, {"prompt": [{**USER, "name": "\udfff"}]})
    assert "surrogates not allowed" in refusal(tmp_path, {"prompt": "a", "tools": [{"name": "\ud800"}]})
    assert "surrogates not allowed" in refusal(tmp_path, {"prompt": "a"}, system_prompt="\ud800")
    prompt, _, _ = take(tmp_path, {"prompt": "a", "label": "\ud800", "note": ["\ud800"]})
    assert prompt.label == "\ud800" and prompt.columns == {"note": ["\ud800"]}


ANSWERED = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "hello"}]


def test_c37_the_answer_at_the_end_is_left_out_with_a_note(tmp_path):
    prompt, shown, said = take(tmp_path, {"messages": ANSWERED}, prompt_field="messages")
    assert "hello" not in shown and shown.endswith("user\nhi<|im_end|>\n<|im_start|>assistant\n")
    (line,) = said
    assert "a.jsonl: 1 of 1 prompts end with the assistant's answer, which is left out." in line
    assert prompt.text == "system: Be brief.\n\nuser: hi"
    assert "all messages are from the assistant" in refusal(tmp_path, {"prompt": ANSWERED[2:]})
    later = take(tmp_path, {"prompt": [USER, ANSWERED[2], USER, ANSWERED[2], ANSWERED[2]]})[1]
    assert later.count("hello") == 1, "an answer in the middle stays"


@pytest.mark.parametrize("written", [json.dumps, str, lambda rows: f"\n {json.dumps(rows, indent=1)}\n"])
def test_c37_the_text_of_a_message_list_is_read_as_messages(tmp_path, written):
    as_list = take(tmp_path, {"prompt": ANSWERED[:2]})[0]
    prompt, _, said = take(tmp_path, {"prompt": written(ANSWERED[:2])})
    assert prompt == as_list and "the text of a message list" in said[0]


@pytest.mark.parametrize(
    "text", ["[1, 2] is a list", "[1, 2]", '[{"a": 1}]', "[]", "[" * 5000, '{"role": "user"}', "[{'a'"]
)
def test_other_texts_in_brackets_are_texts(tmp_path, text):
    prompt, _, said = take(tmp_path, {"prompt": text}, max_prompt_tokens=9000)
    assert prompt.text == text and not said


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "2 + "}, {"type": "text", "text": "2", "image": None}], "2 + 2"),
        (["2 ", {"text": "+ 2"}], "2 + 2"),
    ],
)
def test_c37_parts_of_text_are_joined(tmp_path, content, text):
    assert take(tmp_path, {"prompt": [{"role": "user", "content": content}]})[0].text == text


def test_c37_messages_that_datasets_stores_by_column(tmp_path):
    columns = {"role": ["system", "user"], "content": ["Be brief.", "hi"], "name": [None, None], "id": None}
    assert take(tmp_path, {"prompt": columns})[0] == take(tmp_path, {"prompt": ANSWERED[:2]})[0]
    assert take(tmp_path, {"prompt": USER})[0] == take(tmp_path, {"prompt": [USER]})[0]


def test_c37_other_parts_are_refused_by_name(tmp_path):
    for part, said in (
        ({"type": "image_url", "image_url": "x"}, "'image_url'"),
        ({"type": "text"}, "no text"),
        (7, "'int'"),
    ):
        message = refusal(tmp_path, {"prompt": [USER, {"role": "user", "content": [part]}]})
        assert "message 1" in message and said in message and "only text is supported" in message


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [{**TOOL, "strict": None}]])
def test_c37_tools_reach_the_template(tmp_path, tools):
    _, shown, said = take(tmp_path, {"prompt": "hi", "tools": tools}, with_template(TOOLS_TEMPLATE))
    assert shown.startswith(json.dumps([TOOL])) and not said
    named = take(tmp_path, {"prompt": "hi", "functions": tools}, with_template(TOOLS_TEMPLATE), tools_field="functions")
    assert named[1] == shown
    assert take(tmp_path, {"prompt": "hi", "tools": tools}, with_template(TOOLS_TEMPLATE), tools_field=None)[1] in shown


@pytest.mark.parametrize("tools", [None, [], "", "[]", "null"])
def test_c37_no_tools(tmp_path, tools):
    assert take(tmp_path, {"prompt": "hi", "tools": tools}, with_template(TOOLS_TEMPLATE))[1].startswith("<|im_start|>")


def test_c37_tools_that_cannot_be_read_or_that_nothing_reads(tmp_path):
    assert "the tools are not JSON" in refusal(tmp_path, {"prompt": "hi", "tools": "a hammer"})
    assert "data.tools_field=null" in refusal(tmp_path, {"prompt": "hi", "tools": ["1"]})
    assert "(data.tools_field)" in refusal(tmp_path, {"prompt": "hi"}, tools_field="functions")
    _, _, said = take(tmp_path, {"prompt": "hi", "tools": [TOOL]})
    assert "1 of 1 prompts have tools, which the model's chat template does not read" in said[0]


THINKS = CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_c38_template_arguments_reach_the_template(tmp_path):
    off = take(tmp_path, {"prompt": "hi"}, with_template(THINKS), template_args={"enable_thinking": False})
    assert off[1].endswith("<think></think>") and not off[2]
    on = take(tmp_path, {"prompt": "hi"}, with_template(THINKS), template_args={"enable_thinking": True})
    assert on[1].endswith("assistant\n")
    unread = take(tmp_path, {"prompt": "hi"}, with_template(THINKS), template_args={"enable_think": True})
    assert unread[2] == ["data.template_args: enable_think has no effect, the model's chat template does not read it."]
    assert "has no effect" in take(tmp_path, {"prompt": "hi"}, plain_tokenizer(), template_args={"x": 1})[2][0]


def test_c38_arguments_that_the_run_sets_are_refused(profile):
    assert load_run(profile, ["data.template_args={enable_thinking: false}"]).data.template_args == {
        "enable_thinking": False
    }
    for name in ("tools", "add_generation_prompt", "tokenize", "messages"):
        with pytest.raises(ConfigError, match=rf"data.template_args sets {name}, which the run sets itself"):
            load_run(profile, [f"data.template_args={{{name}: true}}"])


def test_n4_prompts_left_out_are_said_in_one_line(tmp_path):
    rows = [{"prompt": "hi"}, {"prompt": "long " * 500}, {"prompt": "ho"}]
    file, said = write_jsonl(tmp_path / "a.jsonl", rows), []
    load_prompts(config(file, max_prompt_tokens=20), tokenizer(), said.append)
    (line,) = said
    assert "1 of 3 prompts are left out, longer than data.max_prompt_tokens=20; the longest has" in line
    load_eval(config(file, eval=file, max_prompt_tokens=20), tokenizer(), said.append)
    assert said == [line, line.replace("data.train", "data.eval")]


def test_n4_a_task_says_at_start_and_end_how_many_are_left_out():
    cfg = config("reasoning_gym:chain_sum", max_prompt_tokens=74, task_args={"max_terms": 20}, eval_size=1)
    said: list[str] = []
    source = load_prompts(cfg, tokenizer(), said.append)
    assert len(said) == 1 and " prompts are left out" in said[0] and "of the first" in said[0]
    assert source.seen == source.dropped == 0
    source.take(5)
    assert 0 < source.dropped < source.seen == 5 + source.dropped
    assert f"{source.dropped} of the first {source.seen} prompts are left out" in left_out(cfg, source)
    roomy = config("reasoning_gym:chain_sum", eval_size=1)
    source = load_prompts(roomy, tokenizer())
    source.take(2)
    assert left_out(roomy, source) is None
