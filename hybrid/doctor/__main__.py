"""The checks on a machine that has torch and DeepSpeed but not the command `hybrid`: `python -m hybrid.doctor core`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hybrid.doctor.command import gpu_doctor
from hybrid.errors import HybridError

FILE = Path("hybrid-doctor.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hybrid.doctor", description=__doc__)
    parser.add_argument("part", choices=("core", "full", "all"), nargs="?", default="core", help="which checks")
    parser.add_argument("--out", type=Path, default=FILE, help="the JSON file with all figures")
    parser.add_argument("--only", default="", help="only checks whose name begins so, such as swap/")
    parser.add_argument("--cpu", action="store_true", help="try them in small on the CPU")
    given = parser.parse_args()
    try:
        return gpu_doctor(given.part, given.out, on_cpu=given.cpu, only=given.only)
    except HybridError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
