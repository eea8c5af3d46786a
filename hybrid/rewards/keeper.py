"""Starts a script in a process of its own, waits for its end, and leaves nothing of it behind.

`python keeper.py LIFE STATUS SCRIPT ARGUMENT...` forks: the child becomes the main thread that runs SCRIPT, the parent keeps it.
LIFE and STATUS are descriptors of pipes. LIFE ends when whoever started this lets go or dies, by SIGKILL too: the child then has
LEAVE_S to end by itself. A byte in LIFE asks for its end at once. STATUS gets the child's exit code, or minus its signal, when it ends.
Afterwards it kills everything that the child started, also processes that left its group. They come to it as orphans, because it is their
subreaper (prctl(2)).

Run by path, so it imports nothing of hybrid.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time

LEAVE_S = 2.0
"""Seconds that the child has to end by itself, and run its `atexit` functions, after LIFE ended."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    life, status, script = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = os.getpid()
    child = os.fork()
    if child:
        _keep(child, life, status)
        return
    os.close(life)
    os.close(status)
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != keeper:
        os._exit(1)
    import runpy

    sys.argv = sys.argv[3:]
    runpy.run_path(script, run_name="__main__")


def _keep(child: int, life: int, status: int) -> None:
    for fd in range(3, 1024):  # the child's: its socket must close when it ends
        if fd not in (life, status):
            with contextlib.suppress(OSError):
                os.close(fd)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    code = _ended(child)
    while code is None:
        ready = select.select([life, woken], [], [])[0]
        if life in ready:
            grace = 0.0 if os.read(life, 1) else LEAVE_S
            code = _ended_within(child, grace)
            break
        os.read(woken, 1024)
        code = _ended(child)
    with contextlib.suppress(OSError):  # nobody reads it any more
        os.write(status, b"%d" % (-signal.SIGKILL if code is None else code))
    _end_all(child)


def _ended(child: int) -> int | None:
    """The exit code of `child`, or minus its signal; None while it runs. Orphans that ended are collected on the way."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                return os.waitstatus_to_exitcode(ended[1])
    return None


def _ended_within(child: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while (code := _ended(child)) is None and time.monotonic() < end:
        time.sleep(0.01)
    return code


def _end_all(child: int) -> None:
    """Kill the processes that are left, until there are none. Those that a killed one had started come here with the next round."""
    for _ in range(200):
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
        for pid in _children():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def _children() -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
            if int(stat.read().rpartition(b")")[2].split()[1]) == os.getpid():
                found.append(int(pid))
    return found


if __name__ == "__main__":
    main()
