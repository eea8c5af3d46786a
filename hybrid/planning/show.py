"""A plan for people: tables and a verdict."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybrid.planning.footprint import Move, tier_bytes
from hybrid.planning.plan import Plan
from hybrid.planning.prediction import KVCache
from hybrid.planning.rows import (
    PhaseRow,
    TransitionRow,
    host_rows,
    never_moving,
    optimizer_places,
    phase_rows,
    transition_rows,
)
from hybrid.planning.suggest import Suggestion

NO_BREAK = "\u00a0"


def human(nbytes: float) -> str:
    """Bytes in the largest binary unit of which there is one: 1536 MiB -> "1.5 GiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:{'.3g' if abs(nbytes) < 1000 * size else '.0f'}}{NO_BREAK}{unit}"
    return f"{nbytes:.0f}{NO_BREAK}B"


def show(plan: Plan, console: Console) -> None:
    """Phases and tenants, transitions, host, choices and the verdict."""
    cfg = plan.cfg
    console.print(
        Text.assemble(
            (f"{cfg.model.path}", "bold"),
            f"  {cfg.cluster.num_nodes} node(s) x {cfg.cluster.gpus_per_node} GPU(s) of "
            f"{human(plan.limits.device_bytes)}, policy {cfg.memory.policy}",
        )
    )
    for table in _phases(plan, console):
        console.print(table)
    rows = transition_rows(plan)
    if moving := [row for row in rows if row.moves]:
        console.print(_transitions(plan, moving))
    if still := [f"{row.previous} to {row.phase}" for row in rows if not row.moves]:
        console.print(f"nothing moves from {', '.join(still)}" if moving else "Nothing moves between phases.")
    console.print(_host(plan))
    for line in _choices(plan):
        console.print(line)
    console.print(verdict(plan))


def verdict(plan: Plan) -> Text:
    """Fits, with what headroom and cost, or what is short."""
    if plan.fits:
        tightest = min(phase_rows(plan), key=lambda row: plan.limits.device_bytes - row.peak_bytes)
        free = plan.limits.device_bytes - tightest.peak_bytes
        words = f" tightest in {tightest.phase}, {human(free)} free; {plan.seconds_per_step:.2f} s of movement per step"
        return Text.assemble(("fits:", "bold green"), words)
    return Text.assemble(("does not fit:", "bold red"), *(f"\n  {line}" for line in shortage_lines(plan)))


def shortage_lines(plan: Plan) -> list[str]:
    """What is short, one line each."""
    return [f"{s.where} is short by {human(s.nbytes)} per {s.per}" for s in plan.shortages]


def suggestion_lines(plan: Plan, found: list[Suggestion]) -> list[str]:
    """Overrides that make the run of `plan`, which does not fit, fit, with what they cost."""
    if not found:
        largest = max((s.nbytes for s in plan.shortages if s.per == "GPU"), default=0)
        needed = f" As it is, it takes GPUs of {human(plan.limits.device_bytes + largest)}." if largest else ""
        return [f"No change known here makes it fit.{needed}"]
    if found[0].together:
        lines = ["No single change makes it fit; these together do, planned again:"]
    else:
        lines = ["Single changes that make it fit, each planned again:"]
    for each in found:
        lines.append(f"  {shlex.join(each.overrides)}  ({'; '.join(_costs(plan, each.plan))})")
    return lines


def _costs(before: Plan, after: Plan) -> list[str]:
    """What a plan that fits takes, and what it gives up against one that does not."""
    costs = [f"{after.seconds_per_step:.2f} s of movement per step"]
    was, places = optimizer_places(before), optimizer_places(after)
    costs += [
        f"the CPU steps the {role}" for role, place in places.items() if place == "cpu" and was.get(role) != "cpu"
    ]
    if (kv := after.prediction.kv_cache) is not None and kv.sequences < before.prediction.kv_cache.sequences:
        costs.append(f"KV cache for {kv.sequences} whole sequences")
    return costs


def _phases(plan: Plan, console: Console) -> list[Table]:
    """As few tables as `console` is wide enough for, the phases in order over them: cut names of phases could not be told apart."""
    rows = phase_rows(plan)
    unbounded = console.options.update(max_width=10**4)
    for count in range(1, len(rows) + 1):
        size = -(-len(rows) // count)
        tables = [_phase_table(plan, rows[start : start + size]) for start in range(0, len(rows), size)]
        if all(console.measure(table, options=unbounded).maximum <= console.width for table in tables):
            break
    return tables


def _phase_table(plan: Plan, rows: list[PhaseRow]) -> Table:
    """Phases across; tenants, working sets and overhead down."""
    table = Table(title="On each GPU, at the fullest moment of each phase", title_justify="left")
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(row.phase, justify="right")
    tenants = ["/".join(t.key) for t in plan.prediction.tenants if t.device_bytes]
    working = list(dict.fromkeys(name for row in rows for name in row.working))
    overhead = list(plan.prediction.overhead)
    for names, part in ((tenants, "tenants"), (working, "working"), (overhead, "overhead")):
        for name in names:
            sizes = [getattr(row, part).get(name, 0) for row in rows]
            table.add_row(name, *(human(size) if size else "-" for size in sizes), end_section=name == names[-1])
    table.add_row("peak", *(human(row.peak_bytes) for row in rows), style="bold")
    table.add_row("largest part", *(row.cause.replace(" ", "\n").replace("/", "/\n") for row in rows), style="dim")
    free = [plan.limits.device_bytes - row.peak_bytes for row in rows]
    table.add_row("headroom", *(Text(human(size), style="red" if size < 0 else "green") for size in free))
    return table


def _transitions(plan: Plan, rows: list[TransitionRow]) -> Table:
    table = Table(title="Transitions: what moves, and on each GPU what is copied", title_justify="left")
    table.add_column("from, to")
    table.add_column("per step", no_wrap=True)
    table.add_column("moves", overflow="fold")
    for name in ("bytes", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    sizes = {t.key: t.device_bytes for t in plan.prediction.tenants}
    for row in rows:
        times = f"{row.times:.0f} x" if row.times >= 1 else "once"
        moves = "\n".join(_move(move) for move in row.moves if sizes[move.key]) or "-"
        way = f"{row.previous}\n{row.phase}"
        table.add_row(way, times, moves, human(row.nbytes), f"{row.seconds:.2f}", end_section=True)
    return table


def _move(move: Move) -> str:
    name = f"{'out' if move.kind == 'leave' else 'in':3} {'/'.join(move.key)}"
    return f"{name} {human(move.nbytes)}" if move.nbytes else name


def _host(plan: Plan) -> Table:
    table = Table(title="On each node's host, besides", title_justify="left")
    table.add_column("")
    table.add_column("bytes", justify="right")
    for name, size in host_rows(plan).items():
        table.add_row(name, human(size))
    room = "not bounded here" if plan.limits.tier_bytes is None else f"of {human(plan.limits.tier_bytes)}"
    used = tier_bytes(plan.prediction, plan.residency)
    table.add_row(f"slow tier ({plan.cfg.memory.tier})", f"{human(used)} {room}", style="bold")
    return table


def _choices(plan: Plan) -> list[str]:
    cfg = plan.cfg
    chosen = {True: "chosen", False: "given"}
    cache = []
    if (kv := plan.prediction.kv_cache) is not None:
        cache = [
            f"KV cache of an engine: {human(cfg.rollout.kv_cache)} on each of its GPUs "
            f"({chosen['rollout.kv_cache' in cfg.autos]}), {kv.tokens:,} tokens; {_sequences(plan, kv)}"
        ]
    tokens = f"{cfg.train.micro_batch_tokens} tokens ({chosen['train.micro_batch_tokens' in cfg.autos]})"
    places = ", ".join(f"{role} {place}" for role, place in optimizer_places(plan).items())
    return [
        *cache,
        f"micro-batches of {tokens}; optimizer state: {places}",
        f"never moving: {', '.join(never_moving(plan)) or 'nothing'}",
    ]


def _sequences(plan: Plan, kv: KVCache) -> str:
    length = plan.cfg.max_sequence_tokens
    at_once = plan.cfg.sequences_at_once(plan.cfg.samples_per_step)
    if kv.sequences >= at_once:
        return f"all {at_once} sequences that it takes at once fit at their full {length:,} tokens"
    return f"{kv.sequences} of the {at_once} sequences that it takes at once fit at their full {length:,} tokens"
