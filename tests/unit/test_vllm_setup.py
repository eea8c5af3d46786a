"""What vLLM is told, with a stand-in for it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from hybrid.config import load_run, resolve
from hybrid.planning.facts import MachineFacts
from hybrid.planning.machine_use import CUSTOM_ALL_REDUCE, overhead
from hybrid.rollout import vllm_setup
from hybrid.rollout.requests import EngineOptions, SamplingOptions
from hybrid.rollout.stepping import finished


@pytest.fixture
def told(monkeypatch):
    """Arguments of the last call of vLLM's classes, by the name of the class."""
    calls: dict[str, dict] = {}
    stub, params = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    stub.LLM = lambda **kwargs: calls.update(LLM=kwargs)
    stub.SamplingParams = lambda **kwargs: calls.update(SamplingParams=kwargs)
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    loader = ModuleType("hybrid.rollout.model_loader")  # it registers with vLLM
    loader.load_options = lambda *_: {}
    monkeypatch.setitem(sys.modules, "hybrid.rollout.model_loader", loader)
    return calls


@pytest.mark.parametrize("wanted", [True, False])
def test_the_all_reduce_is_vllms_own_where_it_is_wanted(told, wanted):
    options = EngineOptions("m", "bfloat16", "cuda", 2**20, 64, tensor_parallel_size=2, custom_all_reduce=wanted)
    vllm_setup.build(options, "m")
    assert told["LLM"]["disable_custom_all_reduce"] is not wanted


@pytest.mark.parametrize("detokenize", [True, False])
def test_vllm_makes_texts_where_it_must(told, detokenize):
    vllm_setup.sampling_params(SamplingOptions(8), None, detokenize)
    assert told["SamplingParams"]["detokenize"] is detokenize


@pytest.mark.parametrize(("tp", "wanted", "counted"), [(2, True, True), (2, False, False), (1, True, False)])
def test_the_plan_counts_the_buffers_of_the_all_reduce(profile, tp, wanted, counted):
    cuda = ["cluster.device=cuda", "model.dtype=bfloat16", f"rollout.tensor_parallel_size={tp}"]
    cfg = resolve(load_run(profile, [*cuda, f"rollout.custom_all_reduce={str(wanted).lower()}"]))
    found = overhead(cfg, MachineFacts())
    assert found.get("custom all-reduce", 0) == (CUSTOM_ALL_REDUCE if counted else 0)


class Engine:
    """vLLM's engine that ends one request, with two responses, in its second step."""

    def __init__(self):
        at = [{7: SimpleNamespace(logprob=-1.0)}, {8: SimpleNamespace(logprob=-2.0)}]
        made = lambda reason: SimpleNamespace(token_ids=[7, 8], logprobs=at, text="vLLM's", finish_reason=reason)  # noqa: E731
        done = SimpleNamespace(
            request_id="0", finished=True, prompt_token_ids=[1, 2], outputs=[made("stop"), made("length")]
        )
        self.steps = [[SimpleNamespace(finished=False)], [done]]

    def has_unfinished_requests(self):
        return bool(self.steps)

    def step(self):
        return self.steps.pop(0)


def test_texts_are_made_of_the_tokens_where_vllm_makes_none():
    words = {1: "A", 2: " b", 7: " c", 8: " d"}
    decode = lambda ids, skip_special_tokens: "".join(words[i] for i in ids)  # noqa: E731
    tokenizer = SimpleNamespace(backend_tokenizer=SimpleNamespace(decode=decode))
    for given, texts in ((tokenizer, [" c", " c d"]), (None, ["vLLM's"] * 2)):
        ((answer,),) = finished(SimpleNamespace(llm_engine=Engine()), ["0-abc"], 3, given)
        assert [completion.text for completion in answer[1]] == texts
        assert [completion.token_ids for completion in answer[1]] == [[7, 8]] * 2
