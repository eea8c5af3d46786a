"""A call to a rank carries that rank's numbers: 4 bytes each, a shared prompt once, and little more. The same for what comes back."""

from __future__ import annotations

import pickle

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.config import RunConfig, resolve
from hybrid.data.batches import lengths_of, plan_micro_batches
from hybrid.data.samples import Prompt, Sample
from hybrid.experience import Forward, make_experience, policy_rows, sample_rows, value_rows
from hybrid.roles.objective import PolicyRow, ValueRow
from hybrid.roles.packing import PackedBatch, Row, column, pack
from hybrid.roles.reward import RewardWorker
from hybrid.roles.shards import Shard, flat, flatten, float_columns, shard, unshard
from hybrid.roles.worker import ModelWorker

RANKS, GROUPS, EACH = 4, 16, 4
VOCABULARY = 150_000


def sent(value: object) -> tuple[int, object]:
    """Bytes of `value` as Ray sends it, and what arrives: arrays over a buffer that cannot be written."""
    buffers: list[pickle.PickleBuffer] = []
    data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    return len(data) + sum(map(len, frozen)), pickle.loads(data, buffers=frozen)


def config() -> RunConfig:
    sections = {
        "cluster": {"device": "cpu", "gpus_per_node": RANKS},
        "model": {"path": "org/model", "dtype": "float32"},
        "reward": {"function": "math_verify"},
        "rollout": {"samples_per_prompt": EACH, "kv_cache": "1MiB"},
        "train": {"steps": 1, "prompts_per_step": GROUPS},
        "data": {"train": "org/data"},
    }
    return resolve(RunConfig.model_validate(sections))


@pytest.fixture(scope="module")
def step() -> dict[str, list]:
    """The rows of each kind of call in a step: made as a run makes them, of responses of unlike length."""
    rng = np.random.default_rng(0)
    samples = []
    for group in range(GROUPS):
        prompt = Prompt(group, "p", rng.integers(VOCABULARY, size=40).tolist())
        for _ in range(EACH):
            n = int(rng.integers(20, 90))
            sample = Sample(
                prompt, group, rng.integers(VOCABULARY, size=n).tolist(), rng.normal(size=n).tolist(), "", False, 0
            )
            sample.reward = sample.score = float(rng.random())
            samples.append(sample)
    floats = [[torch.tensor(s.logprobs) - shift for s in samples] for shift in (0.1, 0.2, 0.3)]
    experience = make_experience(config(), samples, Forward(*floats), kl_coef=0.0)
    rows = sample_rows(samples)
    return {
        "logprobs, values and score": rows,
        "train of the actor": policy_rows(experience, rows, with_reference=True),
        "train of the critic": value_rows(experience, rows),
    }


def tokens_of(rows: list) -> list[Row]:
    return [getattr(row, "row", row) for row in rows]


def plan_of(rows: list, ranks: int = RANKS):
    return plan_micro_batches(lengths_of(tokens_of(rows)), ranks, 512, share_prompts=True)


CALLS = ("logprobs, values and score", "train of the actor", "train of the critic")


@pytest.mark.parametrize("call", CALLS)
def test_a_shard_takes_little_more_than_its_numbers(step, call):
    rows = step[call]
    for rank, piece in zip(plan_of(rows), shard(plan_of(rows), rows), strict=True):
        own = [rows[i] for micro in rank for i in micro]
        responses = sum(len(row.response) for row in tokens_of(own))
        prompts = sum(len(prompt) for prompt in {row.group: row.prompt for row in tokens_of(own)}.values())
        numbers = prompts + responses * (1 + len(float_columns(type(own[0]))))
        assert 4 * numbers <= sent(piece)[0] <= 1.2 * 4 * numbers


@pytest.mark.parametrize("call", CALLS)
def test_rows_arrive_as_they_were(step, call):
    rows = step[call]
    for rank, piece in zip(plan_of(rows), shard(plan_of(rows), rows), strict=True):
        _, arrived = sent(piece)
        for micro, got in zip(rank, arrived, strict=True):
            assert_same([rows[i] for i in micro], got)


def test_a_view_is_what_must_not_be_sent(step):
    """The fault that flat arrays end: `sent` sees it, so the bound above can fail."""
    whole = torch.zeros(256, 512)
    assert sent(whole[0])[0] > 100 * sent(whole[0].clone())[0]


def test_answers_take_little_more_than_their_numbers(step):
    """`ModelWorker.forward_rows` is what `logprobs` and `values` answer with."""
    worker = ModelWorker.__new__(ModelWorker)
    worker.device, worker.share_prompts = torch.device("cpu"), True
    rows = step["logprobs, values and score"]
    plan = plan_of(rows)

    def run(batch: PackedBatch) -> torch.Tensor:
        return torch.cat([batch.targets_R.float(), torch.zeros(10**6)])[: len(batch.targets_R)]  # a view

    answers = [worker.forward_rows(piece, run) for piece in shard(plan, rows)]
    for rank, answer in zip(plan, answers, strict=True):
        numbers = sum(len(rows[i].response) for micro in rank for i in micro)
        assert answer.dtype == np.float32
        assert 4 * numbers <= sent(answer)[0] <= 1.2 * 4 * numbers
    back = unshard(plan, [len(row.response) for row in rows], [sent(answer)[1] for answer in answers])
    assert [t.tolist() for t in back] == [row.response.tolist() for row in rows]


def test_scores_come_back_as_floats_of_four_bytes(step):
    """A reward model reads whole sequences, whatever the plan's micro-batches."""
    worker = RewardWorker.__new__(RewardWorker)
    worker.same_tokens, worker.token_budget = True, 10**6
    worker._forward = lambda rows: [float(np.float32(sum(row) / 7)) for row in rows]
    rows = step["logprobs, values and score"]
    plan = plan_of(rows)
    answers = [worker.score(sent(piece)[1]) for piece in shard(plan, rows)]
    assert all(sent(answer)[0] <= 4 * len(answer) + 200 for answer in answers)
    scores = [float(score) for score in unshard(plan, [1] * len(rows), answers)]
    assert scores == worker._forward([row.prompt.tolist() + row.response.tolist() for row in rows])


def test_a_rank_without_rows_answers_with_nothing():
    worker = ModelWorker.__new__(ModelWorker)
    worker.device, worker.share_prompts = torch.device("cpu"), True
    piece = flatten([[], []])
    assert list(piece) == [[], []]
    assert len(worker.forward_rows(piece, lambda batch: torch.ones(len(batch.targets_R)))) == 0


def test_an_answer_is_not_copied_and_nothing_is_said_of_it(recwarn):
    """Ray delivers arrays that are read-only; copying them costs more than their way here."""
    answer = np.arange(5, dtype=np.float32)
    answer.flags.writeable = False
    back = unshard([[[1], [0]]], [2, 3], [answer])
    assert [row.tolist() for row in back] == [[3, 4], [0, 1, 2]]
    assert all(np.shares_memory(row.numpy(), answer) for row in back)
    assert not recwarn.list


def test_an_answer_of_the_wrong_length_is_refused():
    with pytest.raises(ValueError, match="2 numbers to rows of 3"):
        unshard([[[0]]], [3], [np.zeros(2, np.float32)])


def test_what_a_rank_computes_with_is_the_same(step):
    """Packed tokens and columns of a shard equal those of the rows that were never sent, bit for bit."""
    rows = step["train of the actor"]
    plan = plan_of(rows)
    for rank, piece in zip(plan, shard(plan, rows), strict=True):
        for micro, got in zip(rank, sent(piece)[1], strict=True):
            here = [rows[i] for i in micro]
            batches = [pack([row.row for row in side], True) for side in (here, got)]
            for name in ("input_ids_N", "position_ids_N", "predict_R", "targets_R"):
                one, other = (getattr(batch, name) for batch in batches)
                assert one.dtype == other.dtype == torch.int64
                assert torch.equal(one, other)
            for name in float_columns(PolicyRow):
                assert torch.equal(column(here, name, batches[0]), column(got, name, batches[1]))


lists = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=12)


@given(lists, st.integers(1, 4), st.sampled_from([Row, PolicyRow, ValueRow]), st.booleans())
def test_any_rows_on_any_ranks(drawn, ranks, kind, with_old):
    """Fewer rows than ranks, empty responses, columns that are not there."""
    rows = [make(kind, group, n, with_old) for group, n in drawn]
    plan = plan_of(rows, ranks)
    pieces = [sent(piece)[1] for piece in shard(plan, rows)]
    for rank, piece in zip(plan, pieces, strict=True):
        for micro, got in zip(rank, piece, strict=True):
            assert_same([rows[i] for i in micro], got)
    answers = [flat([torch.tensor(row.response) for rows in piece for row in tokens_of(rows)]) for piece in pieces]
    back = unshard(plan, [len(row.response) for row in tokens_of(rows)], answers)
    assert [t.tolist() for t in back] == [list(row.response) for row in tokens_of(rows)]


def make(kind: type, group: int, n: int, with_old: bool):
    row = Row(group, list(range(group)), list(range(n)))
    if kind is Row:
        return row
    columns = [torch.full((n,), float(i)) for i in range(2)]
    if kind is ValueRow:
        return ValueRow(row, *columns)
    return PolicyRow(row, *columns, old_logprobs=columns[0] if with_old else None, is_fresh=bool(n % 2))


def assert_same(here: list, got: list) -> None:
    assert len(here) == len(got)
    for row, other in zip(here, got, strict=True):
        assert type(row) is type(other)
        for one, two in zip(tokens_of([row]), tokens_of([other]), strict=True):
            assert one.group == two.group
            assert list(one.prompt) == two.prompt.tolist()
            assert list(one.response) == two.response.tolist()
            assert two.prompt.dtype == two.response.dtype == np.int32
        for name in float_columns(type(row)):
            one, two = getattr(row, name), getattr(other, name)
            assert (one is None) == (two is None)
            assert one is None or np.array_equal(one, two)
        if isinstance(row, PolicyRow):
            assert row.is_fresh == other.is_fresh


def test_shards_are_made_one_by_one(step):
    made = shard([[[0]], [[10**6]]], step["train of the critic"])
    assert isinstance(next(made), Shard)
    with pytest.raises(IndexError):
        next(made)
