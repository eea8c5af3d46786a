"""The process that math-verify runs in: reads [label, response] lines, writes {"equal", "late"} or {"unreadable"} lines.

Run by path, so it imports nothing of hybrid.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys

LIMIT_S = 2
"""Seconds of one parsing or comparison, kept by math-verify's signals."""
MEMORY_BYTES = 4 * 2**30
DELIMITERS = re.compile(r"\$|\\boxed|\\\(|\\\[")


class _Late(logging.Handler):
    """math-verify logs that it gave up, and returns False."""

    seen = False

    def emit(self, record: logging.LogRecord) -> None:
        self.seen = self.seen or "imeout" in record.getMessage()


def main() -> None:
    ctypes.CDLL(None).prctl(
        1, signal.SIGKILL
    )  # PR_SET_PDEATHSIG: end with the run, also in the middle of a power tower.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What libraries print is no reply.
    from math_verify import parse, verify

    late = _Late()
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addHandler(late)

    def reply(**values: object) -> None:
        print(json.dumps(values), file=replies, flush=True)

    reply(ready=True)
    for line in sys.stdin:
        label, response = json.loads(line)
        label = label.rpartition("####")[2].strip()  # GSM8K's labels: reasoning, ####, answer.
        late.seen = False
        gold = parse(label if DELIMITERS.search(label) else f"\\boxed{{{label}}}", parsing_timeout=LIMIT_S)
        if not gold:
            reply(unreadable=True)
            continue
        equal = verify(gold, parse(response, parsing_timeout=LIMIT_S), timeout_seconds=LIMIT_S)
        reply(equal=bool(equal), late=late.seen)


if __name__ == "__main__":
    main()
