"""Names of GPUs, and bundles in the order of ranks."""

import random

import pytest

from hybrid.gpus import rank_order


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
