"""The command line: reads arguments, prints errors, and leaves the work to the modules it imports when a command runs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

import hybrid
from hybrid.config import SECTIONS, RunConfig, check_start, dump, load_run, placement, resolve
from hybrid.config.violations import describe, section_class
from hybrid.exits import errors_for_people
from hybrid.garbage import pause_gc
from hybrid.leftovers import keep_caches
from hybrid.text import escape_output, use_utf8

EXAMPLES = """[bold]Examples[/bold]

  hybrid train profiles/quickstart.yaml

  hybrid train profiles/quickstart.yaml train.steps=3 actor.learning_rate=1e-5 --dry-run

  hybrid train profiles/cpu_ppo.yaml algorithm.advantage=rloo critic=null 'rollout.stop=["\\n\\n"]'
"""

PLAN_EXAMPLES = """[bold]Examples[/bold]

  hybrid plan profiles/quickstart.yaml

  hybrid plan profiles/1x8_7b_grpo.yaml --gpu H100-SXM

  hybrid plan profiles/1x8_7b_grpo.yaml actor.zero_stage=3 --gpu A100-40GB --nodes 2 --gpus-per-node 8 --json
"""


def _sections_help() -> str:
    """Every section with its keys, for the help: blank lines between, as typer joins lines that follow each other."""
    lines = ["[bold]Sections of a profile and their keys[/bold] (meaning and bounds: hybrid/config/sections.py)"]
    for name in SECTIONS:
        keys = ", ".join(section_class(name).model_fields)
        lines.append(f"  [cyan]{name}[/cyan]: {describe(name)} [dim]{keys}[/dim]")
    return "\n\n".join(lines)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hybrid {hybrid.__version__}")
        raise typer.Exit


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(epilog=f"{EXAMPLES}\n\nSections and keys of a profile: hybrid train --help")
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """RL for language models on GPUs that every role shares: Ray places, vLLM generates, DeepSpeed trains."""


@app.command(epilog=f"{EXAMPLES}\n\n{_sections_help()}")
def train(
    profile: Annotated[Path, typer.Argument(help="A YAML file; profiles/ has some to start from.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE]...", help="Laid over the profile. Values are YAML.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check profile, models, functions and data, print the profile resolved and the places; start nothing.",
        ),
    ] = False,
) -> None:
    """Train a model as PROFILE says.

    The run gets a new folder, runs/<profile>-<time> unless logging.name names another: profile.yaml as resolved, versions.json,
    metrics.jsonl, memory.jsonl, samples.jsonl, logs, and the model at the end.
    Ends with 0 when trained, 2 for a mistake in the profile, a model, the data, a reward function or the surroundings, 130 or 143 when
    interrupted, and 1 for other errors; code of a user's file that ends the program when it is imported is one of these.
    """
    with errors_for_people():
        cfg = load_run(profile, overrides or [])
        check_start(cfg)
        resolved = resolve(cfg)
        if dry_run:
            from hybrid.preparation import read_inputs

            with read_inputs(resolved, dry_run=True) as inputs:
                _show(resolved)
                _say(inputs.notes)
            return
        _check_surroundings(resolved)
        from hybrid.config.run_folder import create_run_dir, save_origin
        from hybrid.preparation import prepared

        with prepared(resolved) as ready:
            run_dir = create_run_dir(cfg)
            ready = ready.in_folder(run_dir)
            save_origin(ready.cfg, run_dir, sys.argv)
            _say([*ready.cfg.notes, *ready.inputs.notes])
            from hybrid.launcher import launch

            launch(ready, run_dir)


@app.command(epilog=PLAN_EXAMPLES)
def plan(
    profile: Annotated[Path, typer.Argument(help="A YAML file; profiles/ has some to start from.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE]...", help="Laid over the profile. Values are YAML.", show_default=False
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Plan for this GPU: a name (H100-SXM) or its bytes (80GiB).")] = None,
    nodes: Annotated[int | None, typer.Option(help="Plan for this many nodes.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Plan for this many GPUs on each node.")] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure this machine's processes and slow tier first (a minute or two), and keep it."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, sizes in bytes.")] = False,
) -> None:
    """Say what each phase of PROFILE will hold on each GPU, what moves between phases, and whether it fits. Needs no GPU, loads no weights.

    Ends with 0 when it fits, with 2 when not or for a mistake in the profile.
    """
    with errors_for_people():
        from hybrid.planning.command import plan_command

        machine = {"gpu": gpu, "nodes": nodes, "gpus_per_node": gpus_per_node}
        code = plan_command(profile, overrides or [], json_wanted=json, calibrate_first=calibrate, **machine)
    raise typer.Exit(code)


@app.command()
def report(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's folder, or its name under runs/: finished, running or crashed.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The HTML file; its Markdown twin goes beside it. Default: report.html in RUN.", show_default=False
        ),
    ] = None,
) -> None:
    """Show what a run held in memory, and what to change: one HTML file and a Markdown twin.

    Bytes by tenant over a step and over the run, predicted beside measured, what moving cost, what processes keep, and advice.
    """
    with errors_for_people():
        from hybrid.reports.markdown import short_form
        from hybrid.reports.read import find_run
        from hybrid.reports.write import write_report

        page, twin, doc = write_report(find_run(run), out)
        print(f"{short_form(doc)}\n\nwritten: {page} and {twin}")


@app.command()
def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Run checks on the GPUs, 5 to 30 minutes; they should be free.")
    ] = False,
    part: Annotated[
        Literal["core", "full", "all"],
        typer.Option(help="With --gpu: core needs torch and DeepSpeed, full also vLLM and Ray."),
    ] = "all",
    out: Annotated[Path, typer.Option(help="With --gpu: the JSON file with all figures.")] = Path("hybrid-doctor.json"),
) -> None:
    """Say what of this machine is right for a run and what is not; with --gpu also prove on its GPUs what plans and tests assume.

    Ends with 0 when nothing is wrong, with 1 when something is, with 2 where --gpu finds no GPU that torch can use.
    """
    with errors_for_people():
        if gpu:
            from hybrid.doctor.command import gpu_doctor

            code = gpu_doctor(part, out)
        else:
            from hybrid.doctor.surroundings import look_around

            code = 0
            for word, name, said in look_around():
                print(f"{word}  {name:14} {said}", flush=True)
                code |= int(word == "FAIL")
    raise typer.Exit(code)


def _check_surroundings(cfg: RunConfig) -> None:
    """Raise `SurroundingsError` for what would keep a resolved `cfg` from starting, before anything is written or started."""
    from hybrid.joining import find_cluster
    from hybrid.surroundings import check_surroundings

    check_surroundings(cfg.cluster.address, device=cfg.cluster.device)
    if cfg.cluster.address is not None:
        find_cluster(cfg.cluster.address)


def _show(cfg: RunConfig) -> None:
    """Print a resolved config and its placement."""
    from rich.console import Console
    from rich.table import Table

    from hybrid.telemetry.summary import count_of

    print(dump(cfg))
    table = Table(
        title=f"{count_of(cfg.cluster.num_nodes, 'node')} x {count_of(cfg.cluster.gpus_per_node, 'GPU')}, device {cfg.cluster.device}"
    )
    for column in ("rank", "node", "GPU", "roles", "engine", "GPU share of a process"):
        table.add_column(column)
    for place in placement(cfg):
        engine = "none (replay)"
        if place.engine is not None:
            engine = f"engine {place.engine}, tp rank {place.tp_rank} of {cfg.rollout.tensor_parallel_size}"
        share = f"1/{place.processes}"
        table.add_row(str(place.rank), str(place.node), str(place.gpu), ", ".join(place.roles), engine, share)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    _say(cfg.notes)


def _say(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}")


def main() -> None:
    """Entry point of the `hybrid` command."""
    use_utf8()
    escape_output()
    keep_caches()
    pause_gc()
    try:
        app()
    except BaseException as end:
        if "ray" not in sys.modules:
            raise
        # Everything is stopped and written. Under load, what Ray leaves to the interpreter's teardown has turned status 1 into 0.
        code = end.code if isinstance(end, SystemExit) else 1
        with suppress(OSError, ValueError):  # a reader that has gone
            if not isinstance(end, SystemExit):
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
