"""One process of a user's reward function, seen from the run: start it, ask it, find out why it does not answer, end it.

The user's code gets the main thread of a process of its own (child.py), so that signals work, and so that leaks, crashes, `os._exit`, a
changed directory or seed stay there. A second small process (keeper.py) sees its end and ends what it started.

Ours because no pool that we know does these three: it keeps one process with its state and says where a call hangs before it ends it; it
does not import the program that starts it (multiprocessing's spawn and forkserver do, and with them pebble, loky and concurrent.futures);
it leaves no process behind, whichever of the two is killed.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import pickle
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from hybrid.telemetry.stream import QuietStream

GRACE_S = 0.5
"""The process writes where it hangs a quarter of a second after a deadline; so much later that is read."""
DUMP_S = 3.0
"""Seconds that a process which hangs may be late with its stacks."""
END_S = 5.0
"""Seconds that ending a process may take; keeper.py gives the user's code two of them."""
SCRIPTS = Path(__file__).parent
NOT_SHOWN = (str(SCRIPTS), "<frozen ", f"{os.sep}runpy.py", f"{os.sep}asyncio{os.sep}")


class Hung(Exception):
    """A call passed its deadline; the message says where it was."""


class Ended(Exception):
    """The process ended in a call; the message says how."""


class Process:
    """Started at once; `about` waits for the import of the file."""

    def __init__(self, file: str, name: str, start_s: float):
        """`start_s`: seconds that the import may take."""
        self._start_s = start_s
        self._asked = True
        self._received = bytearray()
        self._dump = os.memfd_create("hybrid-stacks")
        self._socket, theirs = socket.socketpair()
        life, self._life = os.pipe()
        self._status, status = os.pipe()
        passed = (theirs.fileno(), life, status, self._dump)
        command = [sys.executable, "-P", SCRIPTS / "keeper.py", life, status, SCRIPTS / "child.py", theirs.fileno()]
        self._keeper = subprocess.Popen(
            [*map(str, command), str(self._dump), str(start_s), file, name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=passed,
            start_new_session=True,
        )
        theirs.close()
        os.close(life)
        os.close(status)
        self._output = threading.Thread(
            target=_forward, args=(self._keeper.stdout, self._keeper.stderr), name="hybrid-reward-output", daemon=True
        )
        self._output.start()
        self._started = time.monotonic()
        self._about: dict[str, Any] | None = None
        self._end = weakref.finalize(
            self, _end, self._keeper, self._life, self._status, self._socket, self._dump, self._output
        )

    def about(self) -> dict[str, Any]:
        """The parameters of the function, or the mistake in it, as child.py tells. Raises `Hung` and `Ended`."""
        if self._about is None:
            left = self._started + self._start_s - time.monotonic()
            self._about = self._receive(left)
        return self._about

    def send(self, positional: list, keywords: dict[str, list], count: int, timeout_s: float) -> None:
        """Ask for the scores of `count` responses; `receive` gives the reply. Raises `Hung`, `Ended`, and pickle's errors for arguments."""
        data = pickle.dumps((positional, keywords, count, timeout_s), protocol=pickle.HIGHEST_PROTOCOL)
        self._asked = True
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(struct.pack("!Q", len(data)) + data)
        except TimeoutError:
            raise Hung("its process takes no batch: it is stopped, or a signal handler of it does not return") from None
        except OSError:
            raise Ended(self._how_it_ended()) from None

    def receive(self, seconds: float) -> dict[str, Any]:
        """The reply to what was sent, within `seconds`. Raises `Hung` and `Ended`; the process is of no use then."""
        return self._receive(seconds)

    def close(self, at_once: bool = False) -> None:
        """End the process and what it started: at once when it is in a call, else after its `atexit` functions. May be called twice."""
        if (at_once or self._asked) and self._end.alive:
            with contextlib.suppress(OSError):
                os.write(self._life, b"k")
        self._end()

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds + GRACE_S
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._status, select.POLLIN)
        while (message := self._message()) is None:
            ready = [fd for fd, _ in poller.poll(max(end - time.monotonic(), 0) * 1000)]
            if self._socket.fileno() in ready:
                part = self._socket.recv(1 << 20)
                self._received += part
                if part:
                    continue
            if ready:
                raise Ended(self._how_it_ended())
            raise Hung(self._where_it_is())
        self._asked = False
        return message

    def _message(self) -> dict[str, Any] | None:
        if len(self._received) < 8:
            return None
        end = 8 + struct.unpack("!Q", self._received[:8])[0]
        if len(self._received) < end:
            return None
        data, self._received = self._received[8:end], self._received[end:]
        return pickle.loads(data)

    def _how_it_ended(self) -> str:
        ready = select.poll()
        ready.register(self._status, select.POLLIN)
        said = os.read(self._status, 16) if ready.poll(END_S * 1000) else b""
        if not said:
            return "its process closed its connection"
        code = int(said)
        if code >= 0:
            return f"its process ended with status {code}, as os._exit({code}) does"
        places = self._places()
        why = " That is how Linux ends a process when memory runs out." if -code == signal.SIGKILL else ""
        where = f" in {places[0]}" if places else ""
        return f"its process was ended by signal {-code} ({signal.Signals(-code).name}){where}.{why}"

    def _where_it_is(self) -> str:
        end = time.monotonic() + DUMP_S
        while not os.fstat(self._dump).st_size and time.monotonic() < end:
            time.sleep(0.05)  # on a busy machine the process may have begun later than its deadline says
        places = list(dict.fromkeys(self._places()))
        if not places:
            return "it did not say where"
        return f"it is in {places[0]}" if len(places) == 1 else f"it is in {places[-1]}, {places[0]}"

    def _places(self) -> list[str]:
        """Where the main thread was when stacks were last written, innermost first, without our lines."""
        text = os.pread(self._dump, 1 << 20, 0).decode(errors="replace")
        last = re.split(r"\n(?:Current t|T)hread 0x", text)[-1]  # threads come newest first
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', last, re.MULTILINE)
        return [f"{file}:{line} ({name})" for file, line, name in frames if not any(part in file for part in NOT_SHOWN)]


def _end(keeper: subprocess.Popen, life: int, status: int, sock: socket.socket, dump: int, output: threading.Thread):
    sock.close()
    os.close(life)
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(END_S)
    if keeper.poll() is None:
        keeper.kill()
        keeper.wait()
    output.join(1.0)
    os.close(status)
    os.close(dump)


def _forward(*pipes) -> None:
    """Pass on what the user's code prints, as it comes, to what stdout and stderr are here at the time: a live bar takes their places."""
    names = {pipe.fileno(): name for pipe, name in zip(pipes, ("stdout", "stderr"))}
    decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in names}
    poller = select.poll()
    for fd in names:
        poller.register(fd, select.POLLIN)
    while names:
        for fd, _ in poller.poll():
            data = os.read(fd, 1 << 16)
            stream = QuietStream(getattr(sys, names[fd]))
            stream.write(decoders[fd].decode(data, final=not data))
            stream.flush()
            if not data:
                poller.unregister(fd)
                del names[fd]
    for pipe in pipes:
        pipe.close()
