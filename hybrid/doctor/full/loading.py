"""A model's way from its file to the GPU."""

from __future__ import annotations

from hybrid.doctor.check import Check, Figures, Setting, beside, expect
from hybrid.doctor.full.model import make_model


def weights_reach_the_gpu_alone(setting: Setting) -> Figures:
    """What reading a model adds to this process's own host memory, and what comes free on the GPU afterwards."""
    import torch

    from hybrid.memory.probe import measured_bytes, process_bytes, release_free_memory
    from hybrid.roles.models import ModelOptions, load_policy

    path, device = make_model(setting, setting.folder / "model"), setting.torch_device
    torch.ones(1, device=device)
    # The first model read loads libraries, whose memory is not the model's.
    load_policy(ModelOptions(str(path), torch.float32, "sdpa"), device)
    release_free_memory(device)
    host, before = process_bytes().private, measured_bytes(device)
    # In another type than the file's, so that a copy would be memory of this process.
    policy = load_policy(ModelOptions(str(path), torch.float32, "sdpa"), device)
    tensors = [*policy.parameters(), *policy.buffers()]
    size = sum(p.nbytes for p in policy.parameters())
    figures: Figures = {"model_bytes": size, "host_bytes": process_bytes().private - host}
    elsewhere = {str(tensor.device) for tensor in tensors} - {str(device)}
    expect(not elsewhere, f"weights are on {', '.join(sorted(elsewhere))}", figures)
    if setting.device == "cuda":
        expect(figures["host_bytes"] < size // 2, "a copy of the model stays in host memory", figures)
        for tensor in tensors:
            tensor.untyped_storage().resize_(0)
        release_free_memory(device)
        figures["left_bytes"] = beside(measured_bytes(device) - before, 0)
        expect(figures["left_bytes"]["measured"] < size // 10, "the model's memory does not come free", figures)
    return figures


LOADING = [
    Check(
        "load/gpu",
        "A model is read to the GPU without a copy of it in host memory, and its memory there comes free when it leaves.",
        "Several ranks that load at once would need host memory for a model each: give the machine more, and send the report.",
        weights_reach_the_gpu_alone,
        part="full",
    )
]
