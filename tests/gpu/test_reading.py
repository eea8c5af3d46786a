"""A model is read to the GPU without a copy of it in host memory."""

import pytest
import torch

from hybrid.memory.probe import measured_bytes, process_bytes, release_free_memory
from hybrid.roles.models import ModelOptions, load_policy
from launch.tiny_models import make_tiny_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_models_weights_are_on_the_gpu_alone(tmp_path):
    """Its file is in fp32, so that a copy in bf16 would be memory of this process. All of it comes free on the GPU afterwards."""
    folder = make_tiny_llama(tmp_path / "llama", vocab_size=200_000, hidden_size=512)
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    release_free_memory(device)
    host, gpu = process_bytes().private, measured_bytes(device)
    policy = load_policy(ModelOptions(str(folder), torch.bfloat16, "sdpa"), device)
    size = sum(p.nbytes for p in policy.parameters())
    assert {tensor.device for tensor in (*policy.parameters(), *policy.buffers())} == {device}
    assert size > 200 * 2**20 and process_bytes().private - host < size // 2
    for tensor in (*policy.parameters(), *policy.buffers()):
        tensor.untyped_storage().resize_(0)
    release_free_memory(device)
    assert measured_bytes(device) - gpu < size // 10
