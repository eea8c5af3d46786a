"""GPU utilisation: a mean between two calls where there are GPUs, nothing where there are none."""

import threading
import time

import pynvml
import pytest

from hybrid.telemetry.gpu import GpuUtilization


@pytest.fixture
def nvml(monkeypatch):
    """A node with four GPUs; the number of a handle is how busy it is."""
    state = {"open": 0, "busy": {0: 10, 1: 30, 2: 50, "MIG-abc": 90}}

    def utilization(handle):
        if handle not in state["busy"]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return type("Utilization", (), {"gpu": state["busy"][handle]})

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: state.update(open=state["open"] + 1))
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: state.update(open=state["open"] - 1))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda handle: f"GPU-{handle}bc-def")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda name: name)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", utilization)
    return state


def wait_for_samples(gpus):
    deadline = time.monotonic() + 5
    while (value := gpus.take()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return value


@pytest.mark.parametrize("visible, mean", [(None, 0.3), ("1,2", 0.4), ("MIG-abc", 0.9), ("GPU-1bc-def,GPU-2b", 0.4)])
def test_mean_over_visible_gpus(nvml, monkeypatch, visible, mean):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    threads = threading.active_count()
    with GpuUtilization(interval_s=0.01) as gpus:
        assert wait_for_samples(gpus) == pytest.approx(mean)
    assert threading.active_count() == threads and nvml["open"] == 0
    gpus.stop()


def test_mean_starts_again_with_each_take(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with GpuUtilization(interval_s=0.01) as gpus:
        wait_for_samples(gpus)
        nvml["busy"][0] = 100
        time.sleep(0.03)
        gpus.take()
        assert wait_for_samples(gpus) == 1.0


@pytest.mark.parametrize("visible", ["", "-1"])
def test_no_visible_gpu(nvml, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with GpuUtilization() as gpus:
        assert gpus.take() is None
    assert nvml["open"] == 0


def test_a_gpu_without_utilisation_has_none(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-slice")
    with GpuUtilization(interval_s=0.001) as gpus:
        time.sleep(0.02)
        assert gpus.take() is None


def test_no_driver(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    with GpuUtilization() as gpus:
        assert gpus.take() is None
