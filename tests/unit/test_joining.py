"""C48: a cluster that does not answer ends the wait when it should, with the address and where it came from."""

from __future__ import annotations

import socket
import subprocess
from types import SimpleNamespace

import pytest

from hybrid import joining
from hybrid.errors import ConfigError, PlacementError
from hybrid.joining import Target, await_cluster, find_cluster


class Clock:
    """Time that only what is waited for moves, and `ray status` as `answers` say: an output on stderr, or None for no answer."""

    def __init__(self, *answers: str | None, seconds: float = 1.0):
        self.now, self.seconds, self.answers = 100.0, seconds, list(answers)
        self.commands: list[list[str]] = []
        self.environs: list[dict[str, str]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, command, *, timeout, env, **_):
        self.commands.append(command)
        self.environs.append(env)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None or timeout < self.seconds:
            self.now += timeout
            raise subprocess.TimeoutExpired(command, timeout)
        self.now += self.seconds
        return SimpleNamespace(returncode=int(answer != ""), stderr=answer, stdout="")


@pytest.fixture
def clock(monkeypatch):
    def make(*answers: str | None) -> Clock:
        made = Clock(*answers)
        monkeypatch.setattr(joining, "time", made)
        monkeypatch.setattr(
            joining, "subprocess", SimpleNamespace(run=made.run, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=-3)
        )
        return made

    return make


def failure(target: Target, seconds: float = 20) -> str:
    with pytest.raises(PlacementError) as error:
        await_cluster(target, seconds)
    return str(error.value)


def closed_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_c48_a_stale_address_ends_after_the_timeout_and_is_named_with_its_variable(clock, tmp_path):
    place, waited = f"127.0.0.1:{closed_port()}", clock(None)
    said = failure(find_cluster("auto", {"RAY_ADDRESS": place}))
    assert waited.now == 120
    assert f"cluster.address=auto, RAY_ADDRESS={place}" in said and "cluster.start_timeout_s=20 s" in said
    assert "connection refused" in said and "unset RAY_ADDRESS" in said
    assert waited.commands == [[*joining.STATUS, "--address", place]]


def test_c48_a_stale_note_is_named(clock, tmp_path):
    note = tmp_path / "a b/ray/ray_current_cluster"
    note.parent.mkdir(parents=True)
    note.write_text("127.0.0.1:1\n")
    waited = clock(None)
    target = find_cluster("auto", {"RAY_TMPDIR": str(tmp_path / "a b")})
    said = failure(target)
    assert waited.now == 120 and f"127.0.0.1:1 as noted in {note}" in said and f"Remove '{note}'" in said
    assert waited.commands == [joining.STATUS], "Ray itself looks, as it will when the cluster is joined"


@pytest.mark.parametrize("note", [None, "", b"\xff\xfe"])
def test_c48_no_cluster_known_here_is_told_at_once(clock, tmp_path, note):
    (tmp_path / "ray").mkdir()
    if note is not None:
        (tmp_path / "ray/ray_current_cluster").write_bytes(note if isinstance(note, bytes) else note.encode())
    waited = clock("Traceback\nConnectionError: Could not find any running Ray instance.\n")
    said = failure(find_cluster("auto", {"RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": ""}))
    assert waited.now == 101 and "no Ray runs on this machine" in said and "launch/ray_node.sh head" in said


def test_c48_what_listens_but_is_not_ray_is_told_apart(clock):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        waited = clock("RpcError: something else\n")
        said = failure(find_cluster(f"127.0.0.1:{other.getsockname()[1]}", {}))
    assert waited.now == 120 and len(waited.commands) > 3, "it is asked again and again"
    assert "something listens, but does not answer as Ray does" in said and "Correct cluster.address" in said


def test_c48_a_place_without_an_answer(clock, monkeypatch):
    def no_answer(*_, timeout):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", no_answer)
    clock(None)
    assert "connections get no answer" in failure(find_cluster("10.255.255.1:6379", {}))


def test_c48_a_refused_token_ends_the_wait_at_once(clock):
    waited = clock("ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: missing or incorrect\n")
    said = failure(find_cluster("10.0.0.1:6379", {}))
    assert waited.now == 101 and "refuses this command's token" in said and "RAY_AUTH_TOKEN" in said


def test_a_head_that_comes_late_is_waited_for(clock):
    waited = clock("not yet\n", "not yet\n", "")
    await_cluster(find_cluster("10.0.0.1:6379", {}), 20)
    assert len(waited.commands) == 3 and waited.now < 120


def test_the_token_at_hand_is_used_for_a_cluster_found_here_alone(clock, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    waited = clock("")
    await_cluster(find_cluster("auto", {"RAY_TMPDIR": str(tmp_path)}), 20)
    await_cluster(find_cluster("10.0.0.1:6379", {}), 20)
    assert [environ.get("RAY_AUTH_MODE") for environ in waited.environs] == ["token", None]


@pytest.mark.parametrize("place", ["10.0.0.1:6379", "node-1.example:1", "[::1]:6379"])
def test_addresses(place):
    assert find_cluster(place, {"RAY_ADDRESS": "other:1"}).place == place
    assert find_cluster("auto", {"RAY_ADDRESS": place}).place == place


@pytest.mark.parametrize("place", ["ray://a:1", "http://a:8265", "local", "a", "a:", ":1", "a:b", "a:0", "a:65536", "a b:1"])  # fmt: skip
def test_addresses_of_another_form_are_a_mistake_of_the_profile(place):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        find_cluster(place, {})
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        find_cluster("auto", {"RAY_ADDRESS": place})
