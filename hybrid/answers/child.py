"""The process that compares answers: reads JSON lines, writes one for each. Run by path.

[label, response] is answered with {"equal": bool, "late": bool}, [label] with {"unreadable": reason or null, "late": bool}.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path

LIMIT_S = 2.0
"""Seconds of processor time for one request; the parent kills what no signal interrupts."""
MEMORY_BYTES = 4 * 2**30


class Late(BaseException):
    """A request took too long. Not an `Exception`, which sympy and math-verify catch in many places."""


def main() -> None:
    # PR_SET_PDEATHSIG: end with the run, also in the middle of a power tower.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Prints of libraries are not replies.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from hybrid.answers.compare import equal, unreadable

    sys.path.pop(0)
    from hybrid.answers.symbolic import same_expression

    logging.disable(logging.WARNING)  # That it runs without signals of its own, for each request.
    same_expression("2x+1", "1+2x")  # The first use of the parser loads its tables.
    signal.signal(signal.SIGPROF, _late)

    def reply(**values: object) -> None:
        print(json.dumps(values), file=replies, flush=True)

    reply(ready=True)
    for line in sys.stdin:
        texts = json.loads(line)
        late, result = False, None
        try:
            # Again and again, as a handler for all exceptions may swallow one.
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S, LIMIT_S / 4)
            try:
                result = equal(*texts) if len(texts) == 2 else unreadable(*texts)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except Late:
            late = True
        except (Exception, RecursionError):
            # sympy raises many kinds of errors on text that is not mathematics: there is no answer.
            result = False if len(texts) == 2 else "it cannot be compared"
        with contextlib.suppress(Late):
            reply(**({"equal": bool(result)} if len(texts) == 2 else {"unreadable": result}), late=late)


def _late(signum: int, frame: object) -> None:
    raise Late


if __name__ == "__main__":
    main()
