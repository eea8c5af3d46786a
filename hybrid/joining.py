"""Finding a Ray cluster to join, and waiting until it answers, for a bounded time.

Ray's own waits for a cluster that is not there take minutes and cannot be interrupted. So `ray status` asks first, in a process of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybrid.errors import PlacementError, SurroundingsError
from hybrid.surroundings import temp_folder

STATUS = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "status"]
ASK_AGAIN_S = 2.0
NOTHING_FOUND = "Could not find any running Ray"
REFUSED_TOKEN = "InvalidAuthToken"
TOKEN = Path("~/.ray/auth_token")
PLACE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:/\s]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class Target:
    """A cluster to join: HOST:PORT where that is known, how the user came to ask for it, and what to change when it is not there.
    `found_here`: Ray looks for it on this machine, and takes the token that it finds."""

    place: str | None
    said: str
    cure: str
    found_here: bool = False


def find_cluster(address: str, environ: Mapping[str, str] = os.environ) -> Target:
    """What `cluster.address` names: `auto` is RAY_ADDRESS, else what Ray noted in its folder, else what runs here. Raises
    `SurroundingsError` for an address of another form than HOST:PORT."""
    said, cure = f"cluster.address={address}", "Correct cluster.address"
    if address == "auto":
        if given := environ.get("RAY_ADDRESS"):
            address, said, cure = given, f"cluster.address=auto, RAY_ADDRESS={given}", "Correct or unset RAY_ADDRESS"
        else:
            return _noted(Path(temp_folder(environ)[1]) / "ray/ray_current_cluster")
    found = PLACE.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 2**16:
        raise SurroundingsError(
            f"{said} is invalid: a cluster's address has the form HOST:PORT, for example 10.0.0.1:6379. {cure}."
        )
    return Target(address, said, cure)


def _noted(note: Path) -> Target:
    try:
        place = note.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        place = ""
    if not place:
        return Target(None, "cluster.address=auto", "Set cluster.address to HOST:PORT", found_here=True)
    cure = f"Remove {shlex.quote(str(note))}"
    return Target(place, f"cluster.address=auto, {place} as noted in {note}", cure, found_here=True)


def await_cluster(target: Target, timeout_s: float) -> None:
    """Return when the cluster answers. Raises `PlacementError` when it has not after `timeout_s` seconds, at once when it refuses our
    token or when no Ray is known here."""
    deadline = time.monotonic() + timeout_s
    command = STATUS if target.found_here else [*STATUS, "--address", str(target.place)]
    environ = os.environ | ({"RAY_AUTH_MODE": "token"} if target.found_here and _token_at_hand() else {})
    why = "nothing answers"
    while (left := deadline - time.monotonic()) > 0:
        try:
            done = subprocess.run(
                command,
                capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=left, stdin=subprocess.DEVNULL, env=environ,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            break
        if done.returncode == 0:
            return
        why = _last_line(done.stderr) or _last_line(done.stdout) or f"`ray status` ended with {done.returncode}"
        if REFUSED_TOKEN in done.stderr:
            raise PlacementError(
                f"{target.said}: the cluster refuses this command's token. Set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                "~/.ray/auth_token to what the cluster's head has."
            )
        if NOTHING_FOUND in done.stderr + done.stdout:
            raise PlacementError(f"{target.said}: no Ray runs on this machine, and none is noted. {_start(target)}")
        time.sleep(max(0.0, min(ASK_AGAIN_S, deadline - time.monotonic())))
    raise PlacementError(
        f"{target.said}: no Ray cluster answers there within cluster.start_timeout_s={timeout_s:g} s ({_diagnosis(target) or why}). "
        f"{_start(target)}"
    )


def _token_at_hand(environ: Mapping[str, str] = os.environ) -> bool:
    """As `ray.init` decides for a cluster that it finds on this machine."""
    if "RAY_AUTH_MODE" in environ:
        return False
    return bool(environ.get("RAY_AUTH_TOKEN") or environ.get("RAY_AUTH_TOKEN_PATH")) or TOKEN.expanduser().is_file()


def _start(target: Target) -> str:
    return (
        f"{target.cure}, start a cluster with `bash launch/ray_node.sh head` on the first node, or leave cluster.address unset to start "
        "Ray on this machine."
    )


def _diagnosis(target: Target) -> str | None:
    """How the place behaves towards a plain connection."""
    if target.place is None:
        return None
    host, _, port = target.place.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2):
            return "something listens, but does not answer as Ray does"
    except TimeoutError:
        return "connections get no answer"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
