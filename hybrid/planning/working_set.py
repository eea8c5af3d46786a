"""The memory that a forward and a backward pass take, by running the role's own code on tensors without bytes.

The model is built with few layers and traced (torch's FakeTensorMode): every storage that comes into being is counted until it is
dropped. Memory is linear in the number of layers, moment by moment, so two traces give any depth; a 70B model costs as much as a small
one. Kernels' inner workspaces are not seen. Whatever the role's code becomes, the trace follows it.
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
from hybrid.roles import attention

BEFORE_GRADIENTS = ("trunk", "head")
MOMENTS = (*BEFORE_GRADIENTS, "head backward", "last layer", "first layer")
"""Of a pass, in their order: forward through the layers; what follows, until the first gradient of a parameter exists; from there until
the gradient enters the last layer; through the layers; through the first layer and the embeddings."""


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
        self.moment = MOMENTS[0]
        self.trace = Trace()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
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

    def note(self) -> None:
        for into, bytes_ in ((self.trace.highest, self.live), (self.trace.growing, self.live + self.gradients)):
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
    if layers <= 3:
        return _trace_once(make, layers, run, backward, device)
    return _extrapolate(*(_trace_once(make, few, run, backward, device) for few in (2, 3)), layers)


def _trace_once(make, layers: int, run, backward: bool, device: str) -> Trace:
    with _fake_tensors(device):
        model = make(layers)
        counter = _Counter([*model.parameters(), *model.buffers()])
        _watch_layers(_layers_of(model), counter)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(counter.take_gradient)
        with counter, torch.set_grad_enabled(backward):
            out = run(model)
            if backward:
                out.sum().backward()
    return counter.trace


@contextmanager
def _fake_tensors(device: str) -> Iterator[None]:
    """Tensors without bytes; none of them stays in a cache of the role's code. Of blocks that are computed alike the first stands for
    all: a large vocabulary has thousands on CPU."""
    row_blocks = logprobs.row_blocks
    attention.segment_mask.cache_clear()
    try:
        with FakeTensorMode(), patch.object(logprobs, "row_blocks", lambda logits, _: row_blocks(logits, device)[:1]):
            yield
    finally:
        attention.segment_mask.cache_clear()


def _layers_of(model: nn.Module) -> nn.ModuleList:
    """The decoder layers: the list with most parameters."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def _watch_layers(layers: nn.ModuleList, counter: _Counter) -> None:
    """Tell `counter` when the forward pass leaves the layers and when the gradient enters each of them."""
    last = len(layers) - 1
    for number, layer in enumerate(layers):
        moment = "last layer" if number == last else "first layer" if number == 0 else "other layers"

        def left(_layer, _args, out, number=number, moment=moment):
            hidden = out[0] if isinstance(out, tuple) else out
            if number == last and counter.moment == "trunk":
                counter.trace.held = counter.live
                counter.moment = "head"
            if hidden.requires_grad:
                hidden.register_hook(lambda _g: counter.enter(moment))

        layer.register_forward_hook(left)


def _extrapolate(two: Trace, three: Trace, layers: int) -> Trace:
    """Layers between the first and the last take what lies between those two."""

    def line(a: int, b: int) -> int:
        return b + (layers - 3) * (b - a)

    def lines(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
        return {moment: line(a[moment], size) for moment, size in b.items() if moment in a}

    return Trace(lines(two.highest, three.highest), lines(two.growing, three.growing), line(two.held, three.held))
