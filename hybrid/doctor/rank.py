"""One process of a check: `python -m hybrid.doctor.rank NAME RESULT SETTING`, the last in JSON. Writes the result whole."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

from hybrid.doctor.check import Failed, Setting, Skipped, find_check
from hybrid.files import write_atomic

SAY_BEFORE_END_S = 5.0
"""The stacks of a process that hangs are in its log so long before it is killed."""


def main(name: str, result: str, setting: str) -> None:
    check = find_check(name)
    faulthandler.dump_traceback_later(max(1.0, check.deadline_s - SAY_BEFORE_END_S), exit=False)
    given = json.loads(setting)
    given |= {"folder": Path(given["folder"]), "gpus": tuple(given["gpus"])}
    answer = run_here(name, Setting(**given))
    write_atomic(result, json.dumps(answer))
    sys.stdout.flush()
    os._exit(
        int(answer["status"] == "fail")
    )  # no teardown of CUDA and process groups, which may wait for ranks that failed


def run_here(name: str, setting: Setting) -> dict:
    """Run a check in this process: its status (pass, fail or skip), a sentence where it did not pass, and figures."""
    try:
        return {"status": "pass", "said": "", "figures": find_check(name).run(setting)}
    except Skipped as reason:
        return {"status": "skip", "said": str(reason), "figures": {}}
    except Failed as failure:
        return {"status": "fail", "said": str(failure), "figures": failure.figures}
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = f"{type(error).__name__}: {lines[0]} ({Path(place.filename).name}:{place.lineno})"
        return {"status": "fail", "said": said, "figures": {}, "traceback": traceback.format_exc()}


if __name__ == "__main__":
    main(*sys.argv[1:])
