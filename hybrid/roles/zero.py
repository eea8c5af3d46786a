"""DeepSpeed behind one file: ZeRO 0-3 with AdamW, one optimizer step from many micro-batches, and the state it holds.

DeepSpeed is imported where it is used: the controller imports this module for its names and never loads it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from hybrid.memory.tenants import NamedStorage
from hybrid.roles.inventory import inventory

LARGEST_BUCKET = 50_000_000
"""Elements that ranks exchange at a time, at most. ZeRO-3 keeps a buffer of a bucket for good; DeepSpeed's default of 5e8 would pin
954 MiB per role."""
BUCKET_MULTIPLE = 1024
"""DeepSpeed wants buckets aligned."""
PREFETCH_ELEMENTS = {"cuda": 50_000_000, "cpu": 0}
"""Elements that ZeRO-3 gathers ahead of their use. On CPU nothing overlaps with it: buffers on their way would only take memory."""


@dataclass(frozen=True)
class ZeroOptions:
    """How DeepSpeed partitions a trained role and how AdamW steps it. `optimizer_on_cpu`: masters and moments live in host memory and are
    stepped there (ZeRO-Offload, Ren et al. 2021), stages 1 to 3. `overlap_comm`: see train.overlap_comm."""

    stage: int
    dtype: torch.dtype
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    optimizer_on_cpu: bool = False
    overlap_comm: bool = False


@dataclass(frozen=True)
class StepResult:
    """`applied` is False when a loss or gradient was not finite on some rank: then nothing changed. `grad_norm` is before clipping."""

    applied: bool
    grad_norm: float | None


def deepspeed_config(
    stage: int,
    dtype: torch.dtype,
    max_grad_norm: float = 0.0,
    bucket_elements: int = LARGEST_BUCKET,
    optimizer_on_cpu: bool = False,
    overlap_comm: bool = False,
) -> dict:
    """The DeepSpeed configuration of a role; micro-batches and their boundaries are ours, so both batch sizes are 1.

    Gradients of bf16 models add up in fp32. Stage 0 has no setting for that; `TrainedModel` sees to it there. Stages 0 and 1 also send
    them in fp32: once a step, and what was added up in fp32 then needs no copy. Stages 2 and 3 send each micro-batch's in the model's type.
    """
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        # Stage 1 adds each gradient up as it comes, and drops it: no second copy of all of them in bf16.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32" if stage else None},
        "communication_data_type": "fp32" if stage < 2 else None,
        "zero_optimization": {
            "stage": stage,
            # Stages 0 and 1 reduce after the last backward pass: nothing is left to overlap with.
            "overlap_comm": overlap_comm and stage >= 2,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
            "stage3_prefetch_bucket_size": PREFETCH_ELEMENTS["cuda" if torch.cuda.is_available() else "cpu"],
            **(offload if optimizer_on_cpu else {}),
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def load_partitioned(stage: int, dtype: torch.dtype, load: Callable[[], nn.Module]) -> nn.Module:
    """`load()`, with every parameter partitioned as it is read when the stage is 3: no rank ever holds the whole model."""
    if stage < 3:
        return load()
    from transformers.integrations import (
        HfDeepSpeedConfig,  # not at the top: the doctor's checks run without transformers
    )

    keep_alive = HfDeepSpeedConfig(deepspeed_config(stage, dtype))  # transformers looks it up through a weak reference
    model = load()
    del keep_alive
    return model


class TrainedModel:
    """A model under DeepSpeed with its optimizer."""

    def __init__(self, model: nn.Module, options: ZeroOptions):
        self.options = options
        optimizer = torch.optim.AdamW(
            _decay_groups(model, options.weight_decay), lr=0.0, betas=options.betas, eps=options.eps, fused=True
        )
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        bucket = min(LARGEST_BUCKET, -(-elements // BUCKET_MULTIPLE) * BUCKET_MULTIPLE)
        config = deepspeed_config(
            options.stage, options.dtype, options.max_grad_norm, bucket, options.optimizer_on_cpu, options.overlap_comm
        )
        self.engine, self.optimizer, _, _ = load_deepspeed().initialize(model=model, optimizer=optimizer, config=config)
        # Stage 0 in bf16 allocates the moments by an empty step, which would shift Adam's bias correction by one.
        for state in optimizer.state.values():
            state["step"].zero_()
        if options.stage == 0:
            for p in model.parameters():
                p.grad_dtype = torch.float32

    @property
    def stage(self) -> int:
        return self.options.stage

    @property
    def module(self) -> nn.Module:
        return self.engine.module

    def forward(self, *args, **kwargs):
        """The model's output without a graph."""
        self.engine.eval()
        with torch.no_grad():
            return self.engine(*args, **kwargs)

    def step(
        self, losses: list[Callable[[Callable], torch.Tensor]], learning_rate: float, check: Callable[[], None]
    ) -> StepResult:
        """One optimizer step over micro-batches.

        Each entry of `losses` is called with the model and returns a scalar: its share of the loss, already divided by what the whole
        step counts over all ranks. The gradient is then that of the sum over micro-batches and ranks, however the batch was cut.
        Every rank must bring the same number. `check` runs after the last backward and before the update; what it raises must be
        raised on all ranks.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.train()
        world, finite = dist.get_world_size(), True
        for number, loss_of in enumerate(losses, start=1):
            self.engine.set_gradient_accumulation_boundary(number == len(losses))
            loss = loss_of(self.engine)
            finite &= bool(loss.isfinite())
            if number == len(losses) and not _on_all_ranks(finite):
                loss = loss * float(
                    "nan"
                )  # a gradient that is not finite makes every ZeRO stage drop the step, and clean up
            if number == len(losses) and self.options.stage == 0:
                self._fill_gradients(loss)
            # DeepSpeed averages gradients over ranks; ours are parts of one sum.
            self.engine.backward(loss * world, scale_wrt_gas=False)
        check()
        norm = self._plain_grad_norm()
        if norm is not None and not math.isfinite(norm):
            self.engine.zero_grad()
            return StepResult(applied=False, grad_norm=None)
        self.engine.step()
        if not self.engine.was_step_applied() or getattr(self.optimizer, "overflow", False):
            return StepResult(applied=False, grad_norm=None)
        return StepResult(
            applied=True, grad_norm=norm if norm is not None else float(self.engine.get_global_grad_norm())
        )

    def _fill_gradients(self, loss: torch.Tensor) -> None:
        """Zeros for parameters that no micro-batch uses, in fp32: DeepSpeed would make them in the parameter's type, which `grad_dtype`
        refuses."""
        without = [p for p in self.module.parameters() if p.requires_grad and p.grad is None]
        used = used_by(loss) if without else set()
        for p in without:
            if p not in used:
                p.grad = torch.zeros_like(p, dtype=torch.float32)

    def _plain_grad_norm(self) -> float | None:
        """DeepSpeed measures and checks gradients by itself, except with the plain optimizer of stage 0 in fp32: there, their norm."""
        if self.options.stage > 0 or self.options.dtype != torch.float32:
            return None
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None]))

    def storages(self) -> dict[str, list[NamedStorage]]:
        """Everything this role keeps on the device, by part; see `inventory`."""
        return inventory(self.module, self.optimizer)

    def drop_caches(self) -> None:
        """Free what ZeRO-3 gathered ahead of use."""
        if self.options.stage == 3:
            self.engine.empty_partition_cache()


def used_by(loss: torch.Tensor) -> set[torch.Tensor]:
    """The leaves of the graph of `loss`."""
    found, seen, waiting = set(), set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        waiting += [before for before, _ in node.next_functions]
    return found


def _on_all_ranks(flag: bool) -> bool:
    everywhere = torch.tensor(int(flag))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


class FrozenModel:
    """A model that only runs forward: plain, or partitioned by ZeRO-3."""

    def __init__(self, model: nn.Module, stage: int, dtype: torch.dtype, overlap_comm: bool = False):
        model.requires_grad_(False)
        self.stage = stage
        self.engine = model.eval()
        if stage == 3:
            config = deepspeed_config(stage, dtype, overlap_comm=overlap_comm)
            self.engine, *_ = load_deepspeed().initialize(model=model, config=config)
            self.engine.eval()

    @property
    def module(self) -> nn.Module:
        return self.engine.module if self.stage == 3 else self.engine

    def forward(self, *args, **kwargs):
        """The model's output without a graph."""
        with torch.no_grad():
            return self.engine(*args, **kwargs)

    def storages(self) -> dict[str, list[NamedStorage]]:
        return {"weights": inventory(self.module, None)["weights"]}

    def drop_caches(self) -> None:
        if self.stage == 3:
            self.engine.empty_partition_cache()


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay on matrices only, as is usual; one group when there is none, which keeps ZeRO's flat buffers few."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if weight_decay == 0:
        return [{"params": parameters, "weight_decay": 0.0}]
    rank = lambda p: len(getattr(p, "ds_shape", p.shape))  # noqa: E731
    return [
        {"params": [p for p in parameters if rank(p) >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if rank(p) < 2], "weight_decay": 0.0},
    ]


def load_deepspeed() -> ModuleType:
    """DeepSpeed, told what not to do.

    It would compile a C++ extension for collectives on CPU: minutes at the first start, and a lock that a killed process leaves locked
    for every later one. Gloo does that work. To learn whether it can, it would probe the builders of all its extensions in each process,
    with compilers and on every GPU: it finds the answer to the one question that it asks. And it would load all of torch's compiler (a
    second, and tens of MiB in every rank) to ask whether our optimizer is Muon, whose functions it decorates with `torch.compile`: they
    are imported without.
    """
    import deepspeed

    with (
        patch.object(torch, "compile", lambda function=None, **_: function or (lambda each: each)),
        suppress(ImportError),
    ):
        import deepspeed.runtime.zero.muon.muon_optimizer

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.utils.logger.setLevel("WARNING")
    warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
    return deepspeed
