"""Knocking: what ends it early, what does not, and what is said on the way. Loopback only; the
firewalls of other hosts are in the lab.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nccl_doctor.checks.port import road
from nccl_doctor.checks.port.road import knock


@pytest.fixture
def closed() -> Iterator[int]:
    """A port where nothing listens, kept from others."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def knocked(name: str, port: int, seconds: float, **how: Any) -> dict[str, Any]:
    started = time.monotonic()
    found = knock(name, port, started + seconds, **how)
    assert time.monotonic() - started < seconds + 3.0  # of a busy machine
    return found


@pytest.mark.parametrize("how", [{}, {"elsewhere": True}, {"serves": True}])
def test_nothing_listens_is_not_final(closed: int, how: dict[str, bool]) -> None:
    found = knocked("127.0.0.1", closed, 5.0, **how)
    assert found["last"]["outcome"] == "refused"
    assert (found["final"], len(found["changes"])) == ("", 1)
    assert found["seconds"] > 1.5
    assert found["rules"] is not None  # a local rule may be what refuses


def test_one_packet_without_an_answer_as_the_time_ends_is_no_news() -> None:
    """Until then nothing listened: the road may have lost that packet."""
    with socket.socket() as full, contextlib.ExitStack() as held:
        full.bind(("127.0.0.1", 0))
        port = full.getsockname()[1]

        def drop() -> None:  # from now on, as a full queue does
            full.listen(0)
            for _ in range(3):
                client = held.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))

        timer = threading.Timer(1.0, drop)
        timer.start()
        found = knocked("127.0.0.1", port, 2.2)
        timer.join()
    assert found["last"]["outcome"] == "refused"
    assert (len(found["changes"]), found["knocks"] > 2) == (1, True)


def test_the_own_address_is_final_where_rank_0_is_on_another_host(
    closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(road, "SELF_STANDS_S", 0.5)
    found = knocked("127.0.0.1", closed, 20.0, elsewhere=True)
    assert found["final"] == "127.0.0.1 is this host, and rank 0 is on another"
    assert found["seconds"] < 5
    assert knocked("127.0.0.1", closed, 2.0)["final"] == ""


def test_no_route_is_final_once_it_has_stood(closed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert knocked("255.255.255.255", closed, 2.5)["final"] == ""
    monkeypatch.setattr(road, "NO_ROUTE_STANDS_S", 0.5)
    found = knocked("255.255.255.255", closed, 20.0)
    assert found["last"]["outcome"] == "unreachable"
    assert "no route to 255.255.255.255" in found["final"]
    assert found["seconds"] < 5


@pytest.mark.parametrize("name", ["bad..label", "nd0:29500", "tcp://nd0"])
def test_what_can_be_no_name_is_final(name: str) -> None:
    found = knocked(name, 29500, 20.0)
    assert "not a host name" in found["final"]
    assert (found["last"], found["name"]["came_s"]) == (None, None)


def test_a_name_that_does_not_resolve_is_not_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    found = knocked("no-such-host.invalid", 29500, 3.0)
    assert (found["final"], found["last"]) == ("", None)
    assert found["name"]["error"]
    assert found["knocks"] > 1


def test_a_name_and_then_a_port_that_come_late_are_told_in_order(
    closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    born = time.monotonic() + 1.0

    def resolver(name: str, *rest: Any, **more: Any) -> Any:
        if time.monotonic() < born:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    said: list[str] = []
    found = knocked("nd0", closed, 4.0, breadcrumb=said.append)
    assert 0.8 < found["name"]["came_s"] < 3.0
    assert found["name"]["answers"] == ["127.0.0.1"]
    words = [text for _, text in found["changes"]]
    assert words == [
        "nd0 does not resolve (Name or service not known)",
        f"nd0:{closed} (127.0.0.1) refuses connections",
    ]
    assert [line.partition(";")[0] for line in said] == words
    assert said[0].endswith("trying for 4 s more")


def test_an_address_that_was_known_stays_known_while_the_resolver_is_out(
    closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def resolver(name: str, *rest: Any, **more: Any) -> Any:
        asked.append(name)
        if len(asked) > 1:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    found = knocked("nd0", closed, 2.5)
    assert found["knocks"] > 1
    assert found["name"]["answers"] == ["127.0.0.1"]
    assert [text for _, text in found["changes"]] == [
        f"nd0:{closed} (127.0.0.1) refuses connections"
    ]
