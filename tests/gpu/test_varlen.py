"""Packed attention by torch's variable-length kernel on a GPU."""

import pytest
import torch

from hybrid.roles.varlen import check_alignment
from hybrid.roles.varlen_check import CASES, difference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_causal_mask_ends_at_the_last_query_and_the_last_key():
    """Proves that a response sees its whole prompt; a failure means that log-probs are of other texts, and `sdpa` must be used."""
    check_alignment("cuda")


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_exact_attention(name):
    """bf16 keeps 8 bits; a wrong mask, window or head gives differences of the order of 1."""
    found = difference(CASES[name], "cuda")
    assert found.forward < 0.02 and found.backward < 0.04, found
