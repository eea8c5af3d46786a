"""A recorded rollout comes back to the last bit."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.data.prompts import load_prompts
from hybrid.data.rollouts import RolloutRecorder, load_rollouts
from hybrid.data.samples import Prompt, Sample
from hybrid.errors import DataError
from tests.unit.data_files import config, tokenizer

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
keys = st.text(max_size=3) | st.sampled_from(["__tuple__", "__pairs__"])
values = st.recursive(
    scalars,
    lambda v: (
        st.lists(v, max_size=3)
        | st.lists(v, max_size=3).map(tuple)
        | st.dictionaries(keys, v, max_size=3)
        | st.dictionaries(st.integers() | st.tuples(st.integers()), v, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def rollouts(draw):
    prompts = [
        Prompt(i, draw(st.text(max_size=9)), [1, i], draw(values), draw(st.dictionaries(keys, values, max_size=2)))
        for i in range(draw(st.integers(1, 3)))
    ]
    logprobs = draw(st.lists(st.floats(max_value=0, allow_nan=False), max_size=4))
    return [
        Sample(
            prompt,
            group,
            list(range(len(logprobs))),
            logprobs,
            draw(st.text(max_size=9)),
            draw(st.booleans()),
            3,
            reward,
        )
        for group, prompt in enumerate(prompts)
        for reward in (None, 0.1)
    ]


def same(left, right):
    """Equal in value, type and sign of zero."""
    return left == right and repr(left) == repr(right)


@settings(max_examples=25, deadline=None)
@given(rollouts(), rollouts())
def test_exact_round_trip(tmp_path_factory, first, second):
    path = tmp_path_factory.mktemp("r") / "rollouts.jsonl"
    recorder = RolloutRecorder(path)
    recorder.write(1, first)
    recorder.write(4, second)
    assert same(load_rollouts(path), {1: first, 4: second})


def sample(reward=0.5):
    prompt = Prompt(0, "What?", [1, 2], "42", {"metadata": {"pair": (1, 2), 3: "three"}})
    return Sample(prompt, 0, [5, 6], [-math.pi, -1e-300], "42", False, 2, reward)


def test_samples_of_a_prompt_share_it_again(tmp_path):
    one = sample()
    other = Sample(one.prompt, 0, [7], [-0.1], "7", True, 2)
    RolloutRecorder(tmp_path / "r.jsonl").write(1, [one, other])
    back = load_rollouts(tmp_path / "r.jsonl")[1]
    assert back == [one, other] and back[0].prompt is back[1].prompt


def test_recordings_are_not_mixed(tmp_path):
    RolloutRecorder(tmp_path / "r.jsonl").write(1, [sample()])
    with pytest.raises(DataError, match=r"rollout.record=.*r\.jsonl exists.*name another"):
        RolloutRecorder(tmp_path / "r.jsonl")


def test_c36_lone_surrogates_and_nan_come_back(tmp_path):
    one = sample()
    one.prompt.label, one.prompt.columns = "\ud800", {"\udfff": [math.inf, "é"], "nan": math.nan}
    RolloutRecorder(tmp_path / "r.jsonl").write(1, [one])
    (back,) = load_rollouts(tmp_path / "r.jsonl")[1]
    assert repr(back) == repr(one)


def test_what_cannot_be_recorded_is_refused_when_read(tmp_path):
    import datetime

    import datasets

    rows = [{"prompt": "hi", "when": datetime.datetime(2026, 1, 1)}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "d")
    cfg = config(str(tmp_path / "d"))
    load_prompts(cfg, tokenizer())
    recording = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"record": "r.jsonl"})})
    with pytest.raises(DataError, match=r"d\[0\]: columns\.when of a prompt: it is a datetime\.datetime"):
        load_prompts(recording, tokenizer())


def test_what_cannot_be_written_is_named(tmp_path):
    bad = sample()
    bad.prompt.columns["metadata"]["when"] = object()
    with pytest.raises(DataError, match=r"columns\.metadata\.when of a prompt: it is a builtins\.object"):
        RolloutRecorder(tmp_path / "r.jsonl").write(1, [bad])


def test_malformed_files_are_named_by_line(tmp_path):
    path = tmp_path / "r.jsonl"
    RolloutRecorder(path).write(1, [sample()])
    good = json.loads(path.read_text())

    def load_with(second):
        path.write_text(json.dumps(good) + "\n" + (second if isinstance(second, str) else json.dumps(second)) + "\n")
        return load_rollouts(path)

    def changed(**fields):
        return {**good, "step": 2, "samples": [{**good["samples"][0], **fields}]}

    assert list(load_with({**good, "step": 2})) == [1, 2]
    cases = {
        "is not JSON": "{]",
        "must be a JSON object": "[1]",
        "'samples' is missing": {"step": 2, "prompts": []},
        "2 tokens but 1 log-probs": changed(logprobs=[0.0]),
        "a sample must have the fields": changed(extra=1),
        "out of range": changed(prompt=7),
        "step 1 a second time": good,
    }
    for message, second in cases.items():
        with pytest.raises(DataError, match=rf"r\.jsonl:2 .*{message}"):
            load_with(second)
    path.write_text("")
    with pytest.raises(DataError, match="holds no whole rollout"):
        load_rollouts(path)
