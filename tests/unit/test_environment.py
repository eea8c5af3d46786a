"""Variables of a process by its role, its node and what the user has set."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hybrid.environment import ALLOCATOR, HEARTBEAT, INTERFACES, Place, interface_of, process_environment
from hybrid.errors import SurroundingsError
from hybrid.surroundings import check_surroundings

GIVEN = "max_split_size_mb:64,expandable_segments:True,roundup_power2_divisions:[256:1,512:2]"
OTHERS = "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2]"


def nodes(**addresses):
    return {name: [SimpleNamespace(address=each) for each in found] for name, found in addresses.items()}


HERE = nodes(lo=["127.0.0.1", "::1"], docker0=["172.17.0.1"], eth1=["02:42:ac:11:00:02", "10.0.0.7", "fe80::1%eth1"])


def variables(role="actor", device="cuda", several=False, environ=None, address="10.0.0.7", interfaces=HERE):
    return process_environment(Place(device, role, "3", several), environ or {}, address, interfaces)


def allocator(*args, **kwargs):
    return {name: value for name, value in variables(*args, **kwargs).items() if name in ALLOCATOR}


@pytest.mark.parametrize("expandable", [True, False])
@pytest.mark.parametrize("name", ALLOCATOR)
@pytest.mark.parametrize("role", ["actor", "rollout", "critic", "reference", "reward"])
def test_only_roles_that_export_nothing_have_expandable_segments(role, name, expandable):
    pinned = "" if role == "rollout" else ",pinned_max_cached_size_mb:64"
    wanted = f"{OTHERS}{pinned},expandable_segments:{role not in ('actor', 'rollout')}"
    given = {name: GIVEN.replace("True", str(expandable))}
    assert allocator(role, environ=given) == dict.fromkeys(ALLOCATOR, wanted)


def test_without_settings_of_the_user_there_are_ours():
    exact = "pinned_max_cached_size_mb:64"
    assert allocator("actor") == dict.fromkeys(ALLOCATOR, f"{exact},expandable_segments:False")
    assert allocator("critic", environ={ALLOCATOR[0]: ""}) == dict.fromkeys(
        ALLOCATOR, f"{exact},expandable_segments:True"
    )
    assert allocator("rollout") == dict.fromkeys(ALLOCATOR, "expandable_segments:False")


def test_a_bound_of_the_user_for_cached_pinned_memory_stays():
    given = {ALLOCATOR[0]: "pinned_max_cached_size_mb : 8"}
    assert allocator("critic", environ=given)[ALLOCATOR[0]] == "pinned_max_cached_size_mb : 8,expandable_segments:True"


def test_torch_reads_what_we_set_and_prefers_the_first_of_the_two():
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    ours = variables("actor", environ={ALLOCATOR[0]: GIVEN})[ALLOCATOR[0]]
    env = os.environ | {ALLOCATOR[0]: ours, ALLOCATOR[1]: GIVEN}
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert told.stdout.strip() == ours, told.stderr


def test_a_process_sees_its_gpu_alone_whatever_ray_was_told():
    environ = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    found = variables(environ=environ)
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("3", "PCI_BUS_ID")


def test_nccl_bears_a_driver_that_pins_memory_unless_the_user_says_how_long():
    assert int(variables()[HEARTBEAT]) == 1800
    assert HEARTBEAT not in variables(environ={HEARTBEAT: "60"})


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "PYTORCH_NO_CUDA_MEMORY_CACHING=1 is invalid"),
        ({ALLOCATOR[0]: "max_split_size_mb:64, backend:cudaMallocAsync"}, f"{ALLOCATOR[0]}=max_split_size_mb"),
        ({ALLOCATOR[1]: "backend:mine"}, "the allocator mine"),
    ],
)
def test_allocators_that_count_nothing_are_refused_on_cuda(environ, says):
    with pytest.raises(SurroundingsError, match=says):
        check_surroundings("10.0.0.1:6379", environ, device="cuda")
    check_surroundings("10.0.0.1:6379", environ, device="cpu")
    check_surroundings("10.0.0.1:6379", {ALLOCATOR[0]: GIVEN, ALLOCATOR[1]: "backend:native"}, device="cuda")


def test_a_cpu_run_on_one_node_sets_nothing():
    assert variables(device="cpu") == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_several_nodes_gloo_and_nccl_take_the_interface_of_the_nodes_address(device):
    found = variables(device=device, several=True)
    assert [found[name] for name in INTERFACES] == ["eth1", "=eth1"]
    assert not set(INTERFACES) & set(variables(device=device))


def test_interfaces_that_the_user_names_stay():
    for given in INTERFACES:
        found = variables(several=True, environ={given: "ib0"})
        assert given not in found and len(set(INTERFACES) & set(found)) == 1


@pytest.mark.parametrize(
    ("address", "name"),
    [("10.0.0.7", "eth1"), ("127.0.0.1", "lo"), ("fe80:0::1", "eth1"), ("10.0.0.70", None), ("gpu-node-3", None)],
)
def test_the_interface_that_holds_an_address(address, name):
    assert interface_of(address, HERE) == name


def test_an_address_that_no_interface_holds_sets_nothing():
    assert not set(INTERFACES) & set(variables(several=True, address="203.0.113.9"))


def test_this_machines_own_interfaces_are_asked():
    found = process_environment(Place("cpu", "actor", "0", True), {}, "127.0.0.1")
    assert found == dict(zip(INTERFACES, ("lo", "=lo"), strict=True))
