"""Makes profiles/reports/ anew: the plan of every GPU profile, and the report of the quickstart from its kept ledger.

python launch/make_reports.py           write them
python launch/make_reports.py --check   write nothing; exit 1 and name the files that are not current

To keep another run of the quickstart: python launch/make_reports.py --keep runs/NAME
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from hybrid.config import load_run, resolve
from hybrid.files import write_atomic
from hybrid.memory.ledger import read_ledger
from hybrid.planning.command import machine_overrides
from hybrid.planning.machine import plan_here
from hybrid.planning.rows import ledger_row
from hybrid.reports.read import KEPT_SETTINGS, Run, Settings, read_plan, read_run
from hybrid.reports.write import render

CHECKOUT = Path(__file__).resolve().parent.parent
PROFILES = CHECKOUT / "profiles"
REPORTS = PROFILES / "reports"
QUICKSTART = REPORTS / "inputs" / "quickstart"
PLANNED_GPU = {
    "1x1_0.5b_grpo": "RTX-4090",
    "1x8_7b_grpo": "H100-SXM",
    "1x8_8b_ppo": "H100-SXM",
    "2x8_32b_grpo": "H100-SXM",
}
"""A GPU that the first line of each GPU profile names."""
STATED = ["model.attention=varlen", "cluster.threads_per_process=4", "memory.tier_bytes=512GiB"]
"""What `auto` would take from the machine on which the plans are made."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a file is not current")
    parser.add_argument("--keep", type=Path, metavar="RUN", help="take the ledger of this run as the quickstart's")
    wanted = parser.parse_args(arguments)
    if wanted.keep:
        keep(wanted.keep, QUICKSTART)
    stale = []
    for path, content in reports():
        if path.is_file() and path.read_bytes() == content.encode():
            continue
        stale.append(path.relative_to(CHECKOUT))
        if not wanted.check:
            write_atomic(path, content)
    print("\n".join(f"{'not current' if wanted.check else 'written'}: {path}" for path in stale) or "all current")
    return 1 if stale and wanted.check else 0


def reports() -> Iterator[tuple[Path, str]]:
    """(file, what it is to hold) of all reports."""
    for run in (read_run(QUICKSTART), *plans()):
        html, markdown, _ = render(run)
        yield REPORTS / f"{run.name}.html", html
        yield REPORTS / f"{run.name}.md", markdown


def plans() -> Iterator[Run]:
    """Each GPU profile's plan, as a run that has not begun."""
    for name, gpu in PLANNED_GPU.items():
        cfg = resolve(load_run(PROFILES / f"{name}.yaml", [*machine_overrides(gpu), *STATED]))
        plan, _ = plan_here(cfg, gpu)
        yield Run(f"{name}_{gpu}", (), read_plan(ledger_row(plan)), Settings(device="cuda"))


def keep(run: Path, folder: Path) -> None:
    """Copy of a run what a report needs: its ledger without the nodes' addresses, and the settings without paths."""
    rows = [{key: value for key, value in row.items() if key != "node"} for row in read_ledger(run / "memory.jsonl")]
    write_atomic(folder / "memory.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    profile = yaml.safe_load((run / "profile.yaml").read_text(encoding="utf-8"))
    kept: dict[str, dict] = {}
    for section, key in KEPT_SETTINGS.values():
        kept.setdefault(section, {})[key] = profile[section][key]
    write_atomic(folder / "profile.yaml", yaml.safe_dump(kept, sort_keys=False))


if __name__ == "__main__":
    sys.exit(main())
