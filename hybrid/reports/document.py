"""A report in words and tables, before it is HTML or Markdown, so that the two say the same."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.reports.advice import Advice, advise
from hybrid.reports.summary import Summary
from hybrid.reports.tables import Table, tables
from hybrid.telemetry.summary import clock, human_bytes


@dataclass(frozen=True)
class Document:
    name: str
    facts: str
    failure: str | None
    verdict: str
    advice: tuple[Advice, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def document(summary: Summary) -> Document:
    """All that a report says beside its charts."""
    return Document(
        name=summary.name,
        facts=_facts(summary),
        failure=_failure(summary),
        verdict=verdict(summary),
        advice=advise(summary),
        tables=tables(summary),
        notes=_notes(summary),
    )


def verdict(s: Summary) -> str:
    """The fullest moment in one sentence."""
    if s.fullest is None:
        if s.plan is None:
            return "No phase ended, so nothing was measured."
        highest = max(s.plan.phases, key=lambda p: p.peak_bytes)
        share = highest.peak_bytes / s.plan.capacity_bytes
        return f"Fullest by plan: {highest.phase}, {human_bytes(highest.peak_bytes)} of {human_bytes(s.plan.capacity_bytes)} ({share:.0%})."
    full = s.fullest
    of = f" of {human_bytes(s.capacity)} ({full.measured / s.capacity:.0%})" if s.capacity else ""
    where = "at the start" if full.fullest_step == 0 else f"step {full.fullest_step}"
    moved = ""
    if s.step_seconds:
        moved = f" Moving tenants takes {s.moving_seconds:.1f} s of a step's {s.step_seconds:.1f} s."
    return f"Fullest: {full.phase}, {human_bytes(full.measured)}{of}, {where}.{moved}"


def _facts(s: Summary) -> str:
    parts = []
    if s.timeline.spans:
        of = f" of {s.settings.steps}" if s.settings.steps else ""
        parts.append(f"{s.steps}{of} steps in {clock(s.seconds)}")
        parts.append(f"GPU {s.timeline.place.gpu} of {s.timeline.place.gpus}, the fullest")
    for name, value in (("device", s.settings.device), ("policy", s.policy), ("tier", s.settings.tier)):
        if value:
            parts.append(f"{name} {value}")
    if s.capacity:
        parts.append(f"capacity {human_bytes(s.capacity)} per GPU")
    parts.append("with a plan" if s.plan else "no plan recorded")
    return " · ".join(parts)


def _failure(s: Summary) -> str | None:
    if s.failure is not None:
        return f"The run failed in {s.failure['phase']}, step {s.failure['step']}: {s.failure['error']}"
    if s.settings.steps and s.timeline.spans and s.steps < s.settings.steps:
        return f"The ledger ends after {s.steps} of {s.settings.steps} steps: the run goes on, or was killed."
    return None


def _notes(s: Summary) -> tuple[str, ...]:
    notes = [
        "Counted: bytes of the tenants' storages. Measured: the highest memory of each process on the GPU during the phase, added up; on "
        "CUDA what the device had in use. Unattributed: measured less counted, made of processes at rest (interpreters, libraries, "
        "contexts) and the work of the phase (activations, buffers, what allocators and heaps keep).",
        "Bytes are those of one GPU, the one that was fullest; on a machine without GPUs that is one rank of every role and its engine. "
        "1 GiB is 2^30 bytes, 1 GB/s is 10^9 bytes a second.",
        "Highs of the processes in a phase may lie at different moments, so that their sum is a bound.",
    ]
    if s.unread:
        notes.append(
            f"{s.unread} of the ledger's {s.lines} lines cannot be read, cut by a crash or damaged: this report is without them."
        )
    if s.timeline.spans and not s.arrivals:
        notes.append(
            "This ledger is of an older kind: a phase's measure includes the way into it, and pages that processes share count in each."
        )
    if s.kv_cache_share is not None:
        notes.append(
            f"KV cache: at most {s.kv_cache_share:.0%} used. Computed from the lengths of prompts and responses and rollout.max_num_seqs, "
            "as if the longest ran together and shared no prefix; over 100 % means that sequences may have waited."
        )
    return tuple(notes)
