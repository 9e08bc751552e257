"""A host that has no CPU to answer its callers: it says so itself, and no road is to blame."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Severity
from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.toolkit.peers.echo import (
    ACK_BYTES,
    ADDRESS_BYTES,
    LARGE_MARK,
    MAGIC,
    SMALL_BYTES,
    STALL_S,
    TOKEN_BYTES,
    ListeningAddress,
    call,
)
from nccl_doctor.toolkit.peers.listeners import _Caller
from nccl_doctor.toolkit.peers.visitors import LATE_S, Visitors
from tests.support.peers import DROPPED, OK, SILENT_PROXY, World, only, stuck
from tests.support.rows import each_row

HOME = "127.0.0.1"
_LISTEN = f"""
import json, sys
from dataclasses import asdict
from nccl_doctor.toolkit.peers.listeners import Listeners

listeners = Listeners(["{HOME}"])
print(json.dumps(asdict(listeners.doors[0])), flush=True)
sys.stdin.readline()
listeners.close()
print(json.dumps(listeners.late()))
"""


def is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


class Host:
    """A listener in a process of its own, which can be kept from its CPU."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.door = ListeningAddress(**json.loads(process.stdout.readline()))

    @contextmanager
    def without_cpu(self) -> Iterator[None]:
        self._process.send_signal(signal.SIGSTOP)
        while not all(map(is_stopped, Path(f"/proc/{self._process.pid}/task").iterdir())):
            time.sleep(0.01)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def late(self) -> dict[str, float]:
        """What it says as it ends."""
        said, _ = self._process.communicate("\n", timeout=20)
        found: dict[str, float] = json.loads(said)
        return found


@pytest.fixture
def host() -> Iterator[Host]:
    command = [sys.executable, "-c", _LISTEN]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield Host(process)
        finally:
            process.kill()


def test_a_caller_that_gave_up_before_it_was_let_in_is_noted_by_a_host_that_ends(
    host: Host,
) -> None:
    with host.without_cpu():
        made = call(host.door)
    assert (made.outcome, made.duration_s >= STALL_S) == ("intercepted", True)
    assert host.late()[HOME] >= STALL_S - 0.1


def test_who_is_served_in_time_is_not_late(host: Host) -> None:
    assert [call(host.door).outcome for _ in range(3)] == ["ok"] * 3
    time.sleep(LATE_S)  # nothing lies there meanwhile
    assert host.late() == {}


def test_a_caller_that_waits_for_an_answer_that_is_lost_is_not_served_late(host: Host) -> None:
    with socket.create_connection((HOME, host.door.port), timeout=10) as sock:
        sock.sendall(MAGIC + host.door.token.encode())
        time.sleep(LATE_S + 0.2)  # it has not seen the answer, and gives up
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(100):
            pass
    assert host.late() == {}


def test_a_large_message_that_lies_unread_is_noted(host: Host) -> None:
    with (
        socket.create_connection((HOME, host.door.port), timeout=10) as sock,
        sock.makefile("rb") as answers,
    ):
        sock.sendall(MAGIC + host.door.token.encode() + b"." * SMALL_BYTES)
        answers.read(len(host.door.answer) + ADDRESS_BYTES + SMALL_BYTES)
        with host.without_cpu():
            sock.sendall(LARGE_MARK + b"." * ACK_BYTES)  # it fits into the window
            time.sleep(LATE_S + 0.3)
        assert answers.read(1) == b"."
    assert host.late()[HOME] >= LATE_S


def test_a_thread_that_is_late_to_answer_what_it_has_read_is_late() -> None:
    with socket.create_server((HOME, 0)) as listening:
        door = ListeningAddress(
            HOME, listening.getsockname()[1], "a" * TOKEN_BYTES, "b" * TOKEN_BYTES
        )
        with socket.create_connection((HOME, door.port), timeout=10) as sock:
            served, _ = listening.accept()
            with served:
                sock.sendall(MAGIC + door.token.encode())
                caller = _Caller(served)
                caller.shown()
                assert caller.waited_s < LATE_S
                time.sleep(LATE_S + 0.1)
                sock.shutdown(socket.SHUT_WR)
                caller.answer(door, HOME)
    assert caller.waited_s >= LATE_S


def test_a_stranger_is_never_served_late(host: Host) -> None:
    with (
        host.without_cpu(),
        socket.create_connection((HOME, host.door.port), timeout=5) as stranger,
    ):
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        time.sleep(LATE_S + 0.3)
    assert host.late() == {}


def test_of_each_caller_the_longest_delay_is_kept() -> None:
    visitors = Visitors()
    for source, seconds in (("b", 2.0), ("a", 4.0), ("a", 3.0), ("c", LATE_S / 2)):
        visitors.note_delay(source, seconds)
    assert list(visitors.late().items()) == [("a", 4.0), ("b", 2.0)]


def failed_at(world: World, attempt: Mapping[str, Any], late: Mapping[str, float]) -> World:
    """nd0 and nd1 call nd2 in vain, which says whom it served late."""
    world.fail([("nd0", "nd2"), ("nd1", "nd2")], attempt)
    world.facts["nd2"]["late"] = dict(late)
    return world


@each_row("attempt", [SILENT_PROXY, stuck("upload"), stuck("download")])
def test_calls_that_a_host_read_late_blame_no_road(attempt: Mapping[str, Any]) -> None:
    late = {"192.168.77.1": 3.2, "192.168.77.2": 4.7}
    found = only(failed_at(World(4), attempt, late).judge(), "host-answers-late")
    assert (found.level, found.where.hosts, found.where.links) == (Severity.INFO, ("nd2",), ())
    assert "up to 4.7 s: 2 ordered pairs" in found.message


def test_who_was_served_in_time_and_still_waited_was_intercepted() -> None:
    world = failed_at(World(4), SILENT_PROXY, {"192.168.77.1": 3.2})
    by_code = {found.code: found for found in world.judge()}
    assert by_code.keys() == {"peer-intercepted", "host-answers-late"}
    assert by_code["peer-intercepted"].where.links == (("nd1", "nd2"),)
    assert "1 ordered pair of" in by_code["host-answers-late"].message


@each_row("attempt", [OK, DROPPED])
def test_a_late_host_explains_no_other_outcome(attempt: Mapping[str, Any]) -> None:
    late = {"192.168.77.1": 3.2, "192.168.77.2": 3.2}
    codes = {found.code for found in failed_at(World(4), attempt, late).judge()}
    assert codes == (set() if attempt is OK else {"peer-one-way"})


@each_row("late", [None, [1], {"192.168.77.1": "x"}, {"192.168.77.1": float("nan")}])
def test_what_another_version_says_explains_nothing(late: Any) -> None:
    world = World(2).fail([("nd0", "nd1")], SILENT_PROXY)
    world.facts["nd1"]["late"] = late
    assert [found.code for found in world.judge()] == ["peer-intercepted"]


def test_the_map_shows_no_failure_of_a_road_that_nobody_judged() -> None:
    late = {"192.168.77.1": 3.2}
    cluster = failed_at(World(3), SILENT_PROXY, late).cluster()
    shown = {(link.start, link.end): link.reach for link in Firewall().sections(cluster)}
    assert (0, 2) not in shown
    assert (shown[1, 2], shown[2, 0]) == ("failed", "ok")
