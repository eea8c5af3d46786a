"""One row of the architecture table: an architecture from its plan to its export, with a real vLLM engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hybrid.data.batches import Lengths
from hybrid.doctor.full.engine_process import EngineProcess
from hybrid.planning.passes import packed_pass
from hybrid.roles.export import export_model, gather
from hybrid.roles.models import PolicyModel
from hybrid.roles.packing import Row
from hybrid.roles.weights import WeightBuckets
from hybrid.rollout.requests import Completion, EngineOptions, GenerateRequest, SamplingOptions
from hybrid.rollout.sender import make_sender
from tests.architecture_checks import (
    eager,
    gradient_norms,
    load,
    packed_difference,
    packed_logprobs,
    plain_logprobs,
    tokens,
)
from tests.tiny_architectures import TRAINED, make_tiny_architecture

BUCKET_BYTES = 2**17
"""Smaller than the joined experts of a layer."""
PROMPTS = [tokens(5, 7), tokens(90, 3), tokens(30, 90)]
GREEDY = SamplingOptions(max_new_tokens=12, temperature=0.0)
HEADINGS = (
    "architecture",
    "plan, MiB",
    "packed",
    "gradient",
    "self-test",
    "stale",
    "export, trainer",
    "export, engine",
)


@dataclass(frozen=True)
class ArchitectureRow:
    """Numbers of one architecture; log-probs in nats."""

    name: str
    planned_bytes: int
    packed: float
    """Largest difference between packed and unpacked log-probs, fp32."""
    gradient: float
    """Norm of the difference to eager transformers' gradient over the norm of that, fp32."""
    self_test: float
    """Mean difference between engine and trainer after a sync."""
    stale: float
    """The same difference to the weights before the sync: shows that the sync matters."""
    export_trainer: float
    """Largest difference between the trainer and what transformers loads from the export."""
    export_engine: float
    """Largest difference between the synced engine and one that loads the export."""

    def cells(self) -> list[str]:
        """As text, in the order of `HEADINGS`."""
        numbers = (self.packed, self.gradient, self.self_test, self.stale, self.export_trainer, self.export_engine)
        return [self.name, f"{self.planned_bytes / 2**20:.1f}", *(f"{n:.1e}" for n in numbers)]

    def is_exact(self) -> bool:
        bf16 = _dtype(self.name) == torch.bfloat16
        return (
            self.planned_bytes > 0
            and self.packed <= 1e-5
            and self.gradient <= 1e-4
            and self.self_test < (0.02 if bf16 else 0.002)
            and self.stale > 10 * self.self_test
            and self.stale > 0.1
            and self.export_trainer <= 1e-5
            and self.export_engine <= (0.05 if bf16 else 1e-4)
        )


def architecture_row(engine: EngineProcess, name: str, folder: Path) -> ArchitectureRow:
    """Take row `name` of `TRAINED` through plan, packed passes, a sync, a self-test and an export, all in `folder`."""
    dtype = _dtype(name)
    source = make_tiny_architecture(name, folder / name)
    ours, theirs, apart = gradient_norms(source)
    assert ours > 0
    engine.become(engine_options(source, dtype))
    policy = load(source, dtype).eval()
    before = train(policy, 0.02 if dtype == torch.bfloat16 else 0.05)
    make_sender("shm", 0, [engine], BUCKET_BYTES).send(WeightBuckets(policy.hf, 0, BUCKET_BYTES), 1)
    answers = greedy(engine, 1)
    self_test = mean_difference(policy, answers)
    out = folder / f"{name}-export"
    state = gather(WeightBuckets(policy.hf, 0, BUCKET_BYTES, as_loaded=True), is_writer=True)
    assert export_model(policy.hf, state, str(source), out, None, False).problem is None
    with torch.no_grad():
        exported = (packed_logprobs(policy) - packed_logprobs(load(out, dtype).eval())).abs().max()
        plain = (packed_logprobs(policy.float()) - plain_logprobs(eager(out))).abs().max()
    policy.load_state_dict(before)
    stale = mean_difference(policy.to(dtype), answers)
    engine.become(engine_options(out, dtype))
    again = greedy(engine, 0)
    pairs = [(a, b) for x, y in zip(answers, again, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=False)]
    return ArchitectureRow(
        name,
        _planned(source, dtype),
        packed_difference(source),
        apart / theirs,
        self_test,
        stale,
        float(max(exported, plain)),
        max(abs(a - b) for a, b in pairs),
    )


def table(rows: list[ArchitectureRow]) -> str:
    """The rows as columns of text."""
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)) for line in lines)


def _dtype(name: str) -> torch.dtype:
    """vLLM's latent attention on CPU has no fp32."""
    return torch.bfloat16 if "kv_lora_rank" in TRAINED[name][1] else torch.float32


def engine_options(folder: Path, dtype: torch.dtype) -> EngineOptions:
    return EngineOptions(
        str(folder), str(dtype).removeprefix("torch."), "cpu", 32 * 2**20, max_model_len=128, max_num_seqs=8
    )


def train(policy: PolicyModel, scale: float) -> dict[str, torch.Tensor]:
    """Change every parameter, as training would; returns what was before. bf16 rounds more where logits are large."""
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return before


def greedy(engine: EngineProcess, version: int) -> list[Completion]:
    return [group[0] for group in engine.generate([GenerateRequest(p) for p in PROMPTS], GREEDY, version)]


def mean_difference(policy: PolicyModel, answers: list[Completion]) -> float:
    rows = [Row(i, prompt, answer.token_ids) for i, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True))]
    with torch.no_grad():
        scored = packed_logprobs(policy, rows)
    return float((scored - torch.tensor([x for answer in answers for x in answer.logprobs])).abs().mean())


def _planned(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of a training pass."""
    rows = (Lengths(0, 30, 70), Lengths(0, 30, 50))
    return packed_pass(
        str(folder),
        "policy",
        rows,
        dtype=dtype,
        implementation="sdpa",
        checkpointing=False,
        backward=True,
        device="cpu",
        trust_remote_code=False,
    ).peak
