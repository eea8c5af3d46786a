"""Names of GPUs, and bundles in the order of ranks."""

import random
from types import SimpleNamespace

import pynvml
import pytest

from hybrid.config import machine
from hybrid.config.rules import gpus_are_whole
from hybrid.gpus import rank_order, visible_devices
from hybrid.rollout.residency import held_bytes, peak_bytes

MIG = "MIG-1ea9d8b2-cd5b-5f4b-8b5c-a4f0f3c0a0b1"


@pytest.mark.parametrize("driver", ["aa", "mm", "zz"])
def test_the_drivers_node_comes_first_then_nodes_and_gpus_in_order(driver):
    places = [(node, gpu) for node in ("zz", "aa", "mm") for gpu in ("10", "2", "0")]
    random.Random(driver).shuffle(places)
    nodes, gpus = zip(*places, strict=True)
    ranked = [places[slot] for slot in rank_order(nodes, gpus, driver)]
    others = sorted({"aa", "mm", "zz"} - {driver})
    assert ranked == [(node, gpu) for node in (driver, *others) for gpu in ("0", "2", "10")]


def test_gpus_named_by_uuid_have_a_fixed_order_too():
    gpus = ["GPU-8932f937", "GPU-0adc1aa1", "GPU-f00dbabe"]
    assert rank_order(["n"] * 3, gpus, "n") == [1, 0, 2]


def test_a_driver_without_a_gpu_of_the_pool_changes_nothing():
    assert rank_order(["b", "a", "b", "a"], ["1", "1", "0", "0"], "head") == [3, 1, 2, 0]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (None, None),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0, 2", ["0", "2"]),
        ("3,-1,2", ["3"]),
        ("GPU-8932f937,GPU-0adc1aa1", ["GPU-8932f937", "GPU-0adc1aa1"]),
        ("GPU-8932f937,1", ["GPU-8932f937"]),
        ("1,GPU-8932f937", ["1"]),
        (MIG, [MIG]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(given, names):
    assert visible_devices({} if given is None else {"CUDA_VISIBLE_DEVICES": given}) == names


def _memory(gpu, version=None):
    """As nvidia-smi counts, and in the second version as CUDA does."""
    reserved = {"reserved": 5} if version == pynvml.nvmlMemory_v2 else {}
    return SimpleNamespace(total=100 + gpu, used=10 + gpu, **reserved)


@pytest.fixture
def nvml(monkeypatch):
    """A driver with three GPUs; of the second MIG is on, and the third has no bf16."""
    names = {0: 0, 1: 1, 2: 2, "GPU-8932f937": 2}
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", names.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", names.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda gpu: [int(gpu == 1)] * 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", _memory)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda gpu: f"GPU {gpu}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda gpu: (7 if gpu == 2 else 9, 0))


@pytest.mark.parametrize(
    ("visible", "device", "address", "says"),
    [
        ("0,1", "cuda", None, None),
        ("1,0", "cuda", None, "the driver has cut the first GPU into parts"),
        (MIG, "cuda", None, f"CUDA_VISIBLE_DEVICES={MIG} names parts"),
        (MIG, "cpu", None, None),
        (MIG, "cuda", "auto", None),
    ],
)
def test_parts_of_a_gpu_are_refused_with_the_reason(nvml, monkeypatch, visible, device, address, says):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpus_are_whole(SimpleNamespace(cluster=SimpleNamespace(device=device, address=address)))
    if says is None:
        assert found is None
    else:
        assert says in found[0] and "IPC" in found[0] and "nvidia-smi -mig 0" in found[1]


@pytest.mark.parametrize(("visible", "number"), [("0", 0), ("2", 2), ("GPU-8932f937,GPU-0adc1aa1", 2)])
def test_the_first_visible_gpu_is_asked(nvml, monkeypatch, visible, number):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpu_has_bf16() is (number == 0)
    assert (machine.gpu_bytes(), machine.gpu_used_bytes()) == (95 + number, 10 + number), (
        "without what the driver keeps"
    )
    assert machine.gpu_name() == f"GPU {number}"


def test_a_driver_that_says_less_is_asked_for_less(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda gpu: SimpleNamespace(total=100))
    assert machine.gpu_bytes() == 100


def test_a_worker_counts_what_it_holds_itself():
    """Ten bytes outside the pools of sleep mode; in them 70, of which 5 are trimmed, 40 asleep and 25 awake."""
    allocations = [SimpleNamespace(handle=(0, size, 0), is_asleep=asleep) for size, asleep in ((40, True), (25, False))]
    segments = [{"total_size": size} for size in (40, 25, 5)]
    assert held_bytes(80, segments, allocations) == 35


def test_the_peak_of_an_engine_counts_what_it_has_given_back_since():
    """A sync clones weights for a while: reserved memory rises and falls, and pools that sleep count all the time."""
    assert peak_bytes(35, reserved=80, highest=95) == 50
    assert peak_bytes(35, reserved=80, highest=80) == 35
    assert peak_bytes(35, reserved=80, highest=60) == 35  # the count began anew meanwhile
