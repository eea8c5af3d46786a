"""`launch/ray_node.sh` for real: a head, a worker that joins it, a driver that sees both, and nothing that stays."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "ray_node.sh"
DEADLINE_S = 240.0
DRIVER = """
import sys, time, ray
ray.init(address=sys.argv[1], logging_level="ERROR")
deadline = time.monotonic() + float(sys.argv[2])
while ray.cluster_resources().get("GPU", 0) < 3 and time.monotonic() < deadline:
    time.sleep(0.5)
print(len([node for node in ray.nodes() if node["Alive"]]), ray.cluster_resources().get("GPU"))
"""


@pytest.fixture
def surroundings():
    """Home and Ray folder of a machine of its own. Sockets of Ray need a short path."""
    folder = Path(tempfile.mkdtemp(prefix="hyb"))
    keep = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") or k == "RAY_USAGE_STATS_ENABLED"}
    # The scripts use the active environment, which is the one that runs this test.
    yield keep | {"HOME": str(folder), "RAY_TMPDIR": str(folder), "VIRTUAL_ENV": sys.prefix, "RAY_AUTH_MODE": "token"}
    shutil.rmtree(folder, ignore_errors=True)


def start(env: dict[str, str], *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", SCRIPT, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def await_answer(port: int, node: subprocess.Popen) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and node.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    node.kill()
    pytest.fail(f"the head does not answer: {node.communicate()[0]}")


def of_this_home(home: str) -> list[str]:
    """Command lines of live processes whose environment names `home`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"HOME={home}\0".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def test_a_worker_joins_a_head_and_both_end_on_ctrl_c(surroundings):
    port = free_port()
    head = start(surroundings, "head", "--port", str(port), "--ip", "127.0.0.1", "--num-gpus", "1")
    nodes = [head]
    try:
        await_answer(port, head)
        # The worker finds the token that the head made: both have one home.
        worker = start(surroundings, "worker", f"127.0.0.1:{port}", "--ip", "127.0.0.1", "--num-gpus", "2")
        nodes.append(worker)
        driver = subprocess.run(
            [sys.executable, "-c", DRIVER, f"127.0.0.1:{port}", str(DEADLINE_S / 2)],
            env=surroundings,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert driver.stdout.split() == ["2", "3.0"], driver.stderr
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGINT)
        outputs = [node.communicate(timeout=DEADLINE_S)[0] for node in nodes]
    assert "bash launch/ray_node.sh worker" in outputs[0]
    assert [node.returncode for node in nodes] == [130, 130], outputs
    assert of_this_home(surroundings["HOME"]) == []
    assert not (Path(surroundings["RAY_TMPDIR"]) / "ray" / "ray_current_cluster").exists()
