"""The memory that a forward and a backward pass take, by running the role's own code on tensors without bytes.

The model is built with few layers and traced (torch's FakeTensorMode): every storage that comes into being is counted until it is
dropped. Layers between the first and the last all add what the second does, so a 70B model costs as much as a small one. Of kernels'
inner workspaces only the large ones are known. Whatever the role's code becomes, the trace follows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid.algorithms import logprobs
from hybrid.planning.flash import varlen_backward_bytes
from hybrid.roles import reach
from hybrid.roles.apart import decoder_layers

TRACED_LAYERS = 3
"""Of deeper models: a first, a last and one between them."""
DEVICE_OF = torch.ops.prim.device.default
WORKSPACES = {
    torch.ops.aten.logsumexp.default: lambda values, *_: values.nbytes,
    torch.ops.torch_attn._varlen_attn_backward.default: varlen_backward_bytes,
}
"""Bytes that a kernel takes while it runs, where they are as large as what it reads: `exp(values - max)` of logsumexp."""
BEFORE_GRADIENTS = ("trunk", "head")
MOMENTS = (*BEFORE_GRADIENTS, "head backward", "last layer", "first layer")
"""Of a pass, in their order: forward through the layers; what follows, until the first gradient of a parameter exists; from there until
the gradient enters the last layer; through the layers; through the first layer and the embeddings."""
EMBEDDING = "embedding"
"""What comes before the second layer: however deep the model, nothing is added to it. Belongs to the trunk."""


@dataclass
class Trace:
    """Highest bytes in each moment. `growing` counts gradients too, as they are made and kept; `highest` does not count them.
    `held` is what the forward pass through the layers leaves for the backward pass."""

    highest: dict[str, int] = field(default_factory=dict)
    growing: dict[str, int] = field(default_factory=dict)
    held: int = 0

    @property
    def peak(self) -> int:
        return max(self.highest.values())


class _Counter(TorchDispatchMode):
    """Bytes of the storages that live, from when the mode is entered on."""

    def __init__(self, existing: list[torch.Tensor]):
        super().__init__()
        self.sizes = {t.untyped_storage()._cdata: 0 for t in existing}
        self.live = 0
        self.gradients = 0
        self.moment = EMBEDDING
        self.after_layer: list[int] = []
        self.trace = Trace()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is DEVICE_OF:  # more than half of what is dispatched
            return args[0].fake_device
        out = function(*args, **(kwargs or {}))
        if function in WORKSPACES:
            self.note(WORKSPACES[function](*args))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        weakref.finalize(storage, self._drop, key)
        self.note()

    def _drop(self, key: int) -> None:
        self.live -= self.sizes.pop(key)

    def enter(self, moment: str) -> None:
        self.moment = moment
        self.note()

    def take_gradient(self, parameter: torch.Tensor) -> None:
        """What becomes of a gradient is the optimizer's affair."""
        if self.moment == "head":
            self.enter("head backward")
        self.gradients += parameter.grad.nbytes
        parameter.grad = None

    def note(self, workspace: int = 0) -> None:
        live = self.live + workspace
        for into, bytes_ in ((self.trace.highest, live), (self.trace.growing, live + self.gradients)):
            into[self.moment] = max(into.get(self.moment, 0), bytes_)


def trace(
    make: Callable[[int], nn.Module],
    layers: int,
    run: Callable[[nn.Module], torch.Tensor],
    backward: bool,
    device: str,
) -> Trace:
    """The memory of `run(model)` and, with `backward`, of the backward pass of the sum of what it returns.

    `make(n)` builds the model with n of its `layers` layers; both functions are called under fake tensors, which stand for those of
    `device`. What the model itself holds is not counted.
    """
    traced = min(layers, TRACED_LAYERS)
    with _fake_tensors(device):
        model = make(traced)
        counter = _Counter([*model.parameters(), *model.buffers()])
        found = decoder_layers(model)
        _watch_layers(found, counter)
        for p in model.parameters():
            if p.requires_grad:  # routers have biases that the loss does not move
                p.register_post_accumulate_grad_hook(counter.take_gradient)
        with counter, torch.set_grad_enabled(backward):
            out = run(model)
            if backward:
                out.sum().backward()
    deeper, after = layers - traced, counter.after_layer
    if not deeper:
        return _deepened(counter.trace, 0, 0)
    held = after[-1] - after[-2]  # after the first layer the embeddings' output is still the only hidden state
    gradients = sum(p.numel() * p.grad_dtype.itemsize for p in found[1].parameters() if p.requires_grad)
    return _deepened(counter.trace, deeper * held, deeper * gradients)


@contextmanager
def _fake_tensors(device: str) -> Iterator[None]:
    """Tensors without bytes; none of them stays in a cache of the role's code. Of blocks that are computed alike the first stands for
    all: a large vocabulary has thousands on CPU."""
    row_blocks = logprobs.row_blocks
    reach.segment_mask.cache_clear()
    try:
        with FakeTensorMode(), patch.object(logprobs, "row_blocks", lambda logits, _: row_blocks(logits, device)[:1]):
            yield
    finally:
        reach.segment_mask.cache_clear()


def _watch_layers(layers: nn.ModuleList, counter: _Counter) -> None:
    """Tell `counter` when the forward pass leaves the layers and when the gradient enters each of them."""
    last = len(layers) - 1
    for number, layer in enumerate(layers):
        moment = "last layer" if number == last else "first layer" if number == 0 else "other layers"

        def left(_layer, _args, out, number=number, moment=moment):
            hidden = out[0] if isinstance(out, tuple) else out
            if counter.moment in (EMBEDDING, "trunk"):  # else it is computed again, for the backward pass
                counter.after_layer.append(counter.live)
                counter.trace.held = counter.live
                counter.moment = "head" if number == last else "trunk"
            if hidden.requires_grad:
                hidden.register_hook(lambda _g: counter.enter(moment))

        layer.register_forward_hook(left)


def _deepened(traced: Trace, held: int, gradients: int) -> Trace:
    """With further layers between the first and the last, which together leave `held` bytes for the backward pass and take `gradients`.
    They have dropped the former, and made the latter, when the gradient enters the first layer."""

    def of(sizes: dict[str, int], at_first: int) -> dict[str, int]:
        deep = {moment: size + (at_first if moment == "first layer" else held) for moment, size in sizes.items()}
        trunk = max(sizes[EMBEDDING], deep.get("trunk", 0))
        return {"trunk": trunk} | {m: size for m, size in deep.items() if m in MOMENTS and m != "trunk"}

    return Trace(of(traced.highest, 0), of(traced.growing, gradients), traced.held + held)
