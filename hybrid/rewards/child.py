"""The process of one user's reward function: imports its file, says what it takes, then answers batches on its main thread.

`child.py SOCKET DUMP SECONDS FILE NAME`: descriptors of a socket and of a file for stacks, the seconds that the import may take, and the
function. Each message is 8 bytes of length and a pickle; replies hold plain values only. Run by path, so it imports nothing of hybrid;
start-up is the user's own imports and some 50 ms.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import os
import pickle
import signal
import struct
import sys
import time
import zlib
from typing import Any

GRACE_S = 0.25
"""An awaitable is cancelled by the loop at its deadline; so much later the stacks of a call that is still not back are written."""
OURS = (os.path.dirname(os.path.abspath(__file__)), "<frozen ", f"{os.sep}runpy.py")
"""Parts of the paths of files that no error shows."""
LOOP = (*OURS, f"{os.sep}asyncio{os.sep}")


class Hung(Exception):
    """An awaitable passed its deadline; the message says where it waits."""


def main() -> None:
    sock, dump, seconds, file, name = sys.argv[1:]
    signals, out, dumps = _Socket(int(sock)), _tidy_start(file), int(dump)
    faulthandler.enable(dumps, all_threads=False)
    with _watched(dumps, float(seconds)):
        function, about = _load(file, name)
    out()
    signals.send(about)
    pid = os.getpid()
    loop = None
    while function is not None:
        try:
            request = signals.receive()
        except EOFError:  # the run is over
            break
        except BaseException:  # a signal that the user's code asked for came late
            continue
        positional, keywords, count, timeout_s = request
        with _watched(dumps, timeout_s + GRACE_S):
            reply, loop = _answer(function, file, positional, keywords, count, time.monotonic() + timeout_s, loop)
        out()
        if os.getpid() != pid:  # the function forked, and came back twice
            os._exit(0)
        signals.send(reply)


class _Socket:
    def __init__(self, fd: int):
        self._fd = fd
        self._data = bytearray()

    def send(self, value: Any) -> None:
        data = pickle.dumps(value)
        left = memoryview(struct.pack("!Q", len(data)) + data)
        while left:
            left = left[os.write(self._fd, left) :]

    def receive(self) -> Any:
        """The next message. Raises EOFError when none will come."""
        head = 8
        while len(self._data) < (end := head + self._length(head)):
            if not (part := os.read(self._fd, 1 << 20)):
                raise EOFError
            self._data += part
        data, self._data = self._data[head:end], self._data[end:]
        return pickle.loads(data)

    def _length(self, head: int) -> int:
        return struct.unpack("!Q", self._data[:head])[0] if len(self._data) >= head else 1


def _tidy_start(file: str):
    """Give the user's code what a program of its own has. Returns what flushes its prints."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # inherited from the thread that started this
    for name in (signal.SIGALRM, signal.SIGCHLD):
        signal.signal(name, signal.SIG_DFL)
    sys.argv = [file]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()

    return flush


@contextlib.contextmanager
def _watched(dump: int, seconds: float):
    """Write the stacks after `seconds`, from a thread that needs no Python; leave no alarm of the user's behind."""
    os.ftruncate(dump, 0)
    os.lseek(dump, 0, os.SEEK_SET)
    faulthandler.dump_traceback_later(seconds, file=dump)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)


def _load(file: str, name: str) -> tuple[Any, dict[str, Any]]:
    """The function and what it takes, or None and what is wrong."""
    try:
        module = _import(file)
    except BaseException as error:
        told = plain.raised(error, OURS, file)
        if isinstance(error, SyntaxError) and (os.path.isfile(error.filename or "") or not told["where"]):
            return None, {"syntax": error.msg or "", "line": error.lineno, "file": error.filename or file}
        return None, {"raised": told, "ends": isinstance(error, SystemExit)}
    missing = object()
    function = getattr(module, name, missing)
    if function is missing:
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        return None, {"names": own}
    if not callable(function) or inspect.isclass(function):
        return None, {"not_function": "a class" if inspect.isclass(function) else f"a {type(function).__name__}"}
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        return None, {"no_signature": str(error)}
    return function, {"parameters": [(p.name, p.kind.name, p.default is p.empty) for p in parameters]}


def _import(file: str) -> Any:
    """The module, under the name that a process which it starts by `spawn` would import it by, where no other has that name."""
    folder, stem = os.path.dirname(file), os.path.basename(file).removesuffix(".py")
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"hybrid_reward_{stem}_{zlib.crc32(file.encode()):08x}"
    with contextlib.suppress(ImportError, ValueError, OSError):
        found = importlib.util.find_spec(stem) if stem.isidentifier() else None
        if found is not None and found.origin is not None and os.path.samefile(found.origin, file):
            name = stem
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look it up
    spec.loader.exec_module(module)
    return module


def _answer(
    function, file: str, positional: list, keywords: dict, count: int, deadline: float, loop
) -> tuple[dict, Any]:
    """The reply to a batch of `count` responses, and the event loop, made when it is first needed."""
    try:
        # Called outside the loop, so that a sync function may start a loop of its own.
        result = function(*positional, **keywords)
        if inspect.isawaitable(result) or inspect.isasyncgen(result):
            loop = loop or _new_loop()
            result = loop.run_until_complete(_awaited(_gathered([result], count), deadline))[0]
        values = plain.listed(result, count)
        if values is None:
            return {"returned": plain.shown(result)}, loop
        if any(map(inspect.isawaitable, values)):
            loop = loop or _new_loop()
            values = loop.run_until_complete(_awaited(_gathered(values, count), deadline))
        return {"scores": [plain.number(value) for value in values]}, loop
    except Hung as hung:
        return {"hung": str(hung)}, loop
    except BaseException as error:  # sys.exit() in a reward function is a failed reward, too
        return {"raised": plain.raised(error, OURS, file)}, loop


def _new_loop():
    import asyncio  # a third of the start-up

    return asyncio.new_event_loop()


async def _gathered(values: list, count: int) -> list:
    """`values`, with what awaitables give in their places."""
    import asyncio

    async def one(value):
        if inspect.isasyncgen(value):
            taken = []
            async for item in value:
                taken.append(item)
                if len(taken) > count:
                    break
            return taken
        return await value if inspect.isawaitable(value) else value

    return list(await asyncio.gather(*map(one, values)))


async def _awaited(awaitable, deadline: float):
    import asyncio

    task = asyncio.ensure_future(awaitable)
    done, _ = await asyncio.wait({task}, timeout=max(deadline - time.monotonic(), 0))
    if done:
        return task.result()
    where = _where_it_waits(asyncio.all_tasks() - {asyncio.current_task()})
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_S / 2)
    raise Hung(where)


def _where_it_waits(tasks) -> str:
    """The innermost line of user's code among the suspended coroutines."""
    for task in tasks:
        coroutine, place = task.get_coro(), ""
        while coroutine is not None:
            frame = getattr(coroutine, "cr_frame", None)
            if frame is not None and not any(part in frame.f_code.co_filename for part in LOOP):
                place = f"it waits at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
            coroutine = getattr(coroutine, "cr_await", None)
        if place:
            return place
    return "it waits, and did not say where"


def _plain():
    """plain.py from beside this file: `-P` keeps this folder out of the path, where it would shadow user's modules."""
    spec = importlib.util.spec_from_file_location("hybrid_plain", os.path.join(OURS[0], "plain.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain = _plain()

if __name__ == "__main__":
    main()
