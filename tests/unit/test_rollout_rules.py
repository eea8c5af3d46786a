"""Rules of an engine that need no engine: legal moves, complete weights, buckets in shared memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid.errors import MemoryScheduleError, RolloutError
from hybrid.rollout import engine as engine_module
from hybrid.rollout.checkpoint_names import check_bucket, check_complete, checkpoint_shapes
from hybrid.rollout.requests import EngineOptions
from hybrid.rollout.residency import check_come, check_leave
from hybrid.rollout.sender import bounded, make_sender, staging_bytes
from hybrid.rollout.shared_memory import SharedBucket

BOTH = {"weights", "kv_cache"}


@pytest.mark.parametrize(
    ("parts", "resident", "device", "says"),
    [
        (["weights"], BOTH, "cpu", "on cpu"),
        (["kv_cache"], {"weights"}, "cpu", "not on the device"),
        (["weights"], BOTH, "cuda", "cannot leave alone"),
        (["kv_cache", "kv_cache"], BOTH, "cuda", "once per call"),
        ([], BOTH, "cuda", "once per call"),
        (["optimizer"], BOTH, "cuda", "optimizer"),
    ],
)
def test_illegal_leaves_are_refused(parts, resident, device, says):
    with pytest.raises(MemoryScheduleError, match=says):
        check_leave(parts, resident, device)


def test_a_part_that_is_there_cannot_come():
    with pytest.raises(MemoryScheduleError, match="already"):
        check_come(["weights", "kv_cache"], {"weights"}, "cuda")


def test_legal_moves_pass():
    check_leave(["weights", "kv_cache"], BOTH, "cuda")
    check_leave(["weights"], {"weights"}, "cuda")
    check_leave(["kv_cache"], BOTH, "cuda")
    check_come(["weights"], set(), "cuda")
    check_come(["kv_cache"], {"weights"}, "cpu")


@pytest.mark.parametrize("error", [ValueError("too long"), AttributeError("no score_func")])
def test_whatever_vllm_raises_as_it_starts_is_an_error_of_ours(tmp_path, monkeypatch, error):
    def build(*_):
        raise error

    monkeypatch.setattr(engine_module.vllm_setup, "environment", lambda _: {})
    monkeypatch.setattr(engine_module.vllm_setup, "build", build)
    with pytest.raises(RolloutError, match=f"vLLM refuses to start with EngineOptions.*: {error}"):
        engine_module.Engine(EngineOptions(str(tmp_path), "float32", "cpu", 2**20, 64)).start()


def test_shapes_are_read_from_the_checkpoint(tmp_path):
    save_file({"a.weight": torch.zeros(3, 2), "rotary_emb.inv_freq": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert checkpoint_shapes(tmp_path) == {"a.weight": (3, 2)}
    with pytest.raises(RolloutError, match="no safetensors"):
        checkpoint_shapes(tmp_path / "nothing")


def test_a_bucket_must_hold_what_the_model_has():
    expected = {"a": (2, 2), "b": (3,)}
    check_bucket(expected, set(), ["a", "b"], [[2, 2], [3]])
    for names, shapes, says in [
        (["c"], [[1]], "has no weight `c`"),
        (["a"], [[2, 3]], "shape"),
        (["b"], [[3]], "twice"),
    ]:
        with pytest.raises(RolloutError, match=says):
            check_bucket(expected, {"b"} if says == "twice" else set(), names, shapes)


def test_all_weights_that_vllm_takes_must_arrive():
    expected = {"a": (1,), "lm_head.weight": (1,), "score.weight": (1,)}
    check_complete(expected, {"a"}, needed=set())
    with pytest.raises(RolloutError, match="1 of 3 weights were not sent: `lm_head"):
        check_complete(expected, {"a"}, needed={"lm_head.weight"})
    check_complete(expected, {"a", "lm_head.weight"}, needed={"lm_head.weight"})


def test_a_shared_bucket_is_a_safetensors_file_until_it_is_closed():
    flat = torch.arange(24, dtype=torch.bfloat16)  # views of one buffer, as ZeRO keeps them
    bucket = [("a", flat[:6].view(2, 3)), ("b", flat[6:].view(3, 6).T), ("scalar", torch.tensor(2.5))]
    shared = SharedBucket(bucket)
    loaded = load_file(shared.path)
    assert loaded.keys() == {"a", "b", "scalar"}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in bucket)
    shared.close()
    with pytest.raises(FileNotFoundError):
        load_file(shared.path)


def test_buckets_are_cut_at_the_bound_and_never_inside_a_tensor():
    source = [[("a", torch.zeros(4)), ("b", torch.zeros(4)), ("c", torch.zeros(100))], [("d", torch.zeros(1))]]
    assert [[n for n, _ in piece] for piece in bounded(source, 32)] == [["a", "b"], ["c"], ["d"]]


class RecordingEngine:
    """Stands for an engine of this process: records the protocol, and reads buckets as a worker does."""

    def __init__(self, fail_at: str | None = None):
        self.calls, self.weights, self.fail_at = [], {}, fail_at

    def _record(self, name, *args):
        self.calls.append(name)
        if name == self.fail_at:
            raise ValueError(f"no {name}")

    def start_weight_update(self):
        self._record("start")

    def update_weights(self, request):
        self._record("update")
        [path] = request["update_info"]["paths"].values()
        self.weights |= load_file(path)
        assert list(request["update_info"]["names"]) == list(load_file(path))

    def finish_weight_update(self):
        self._record("finish")

    def set_weight_version(self, version):
        self._record("version")
        self.version = version


@pytest.mark.parametrize(("bucket", "staged"), [(2**31, 340), (200, 200), (100, 200), (1, 200)])
def test_the_staging_buffer_holds_the_largest_tensor_and_no_more_than_the_model(bucket, staged):
    """200 bytes of the largest tensor, 340 in all: not 2 GiB for a small model."""
    weights = [("a", torch.bfloat16, (10, 10)), ("b", torch.float32, (5,)), ("c", torch.bfloat16, (60,))]
    assert staging_bytes(bucket, weights) == staged


def test_a_sync_is_one_session_of_bounded_buckets():
    source = [[("a", torch.ones(4)), ("b", torch.full((4,), 2.0))], [("c", torch.full((2,), 3.0))]]
    engines = [RecordingEngine(), RecordingEngine()]
    make_sender("shm", 0, engines, bucket_bytes=16).send(source, 7)
    for engine in engines:
        assert engine.calls == ["start", "update", "update", "update", "finish", "version"]
        assert {k: v.tolist() for k, v in engine.weights.items()} == {"a": [1.0] * 4, "b": [2.0] * 4, "c": [3.0] * 2}
        assert engine.version == 7


@pytest.mark.parametrize("fail_at", ["start", "update", "finish", "version"])
def test_a_failing_engine_ends_the_sync_with_an_error(fail_at):
    sender = make_sender("shm", 0, [RecordingEngine(fail_at)], bucket_bytes=16)
    with pytest.raises(RolloutError, match=f"no {fail_at}"):
        sender.send([[("a", torch.ones(4))]], 1)


def test_an_unknown_backend_is_refused():
    with pytest.raises(RolloutError, match="nccl"):
        make_sender("nccl", 0, [], 1)
