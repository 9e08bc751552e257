"""Connections of this machine as the kernel tells them, and roads of the store made of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from nccl_doctor.toolkit.net.sock_diag import connections_at
from nccl_doctor.toolkit.net.tcp_info import TcpInfo
from nccl_doctor.toolkit.peers.standing import roads_of_store

SAID = b"0123456789"


@pytest.fixture(params=["127.0.0.1", "::"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Port of a listener with one connection, on which ten bytes went from the caller."""
    wide = request.param == "::"
    family = socket.AF_INET6 if wide else socket.AF_INET
    try:
        listener = socket.create_server((request.param, 0), family=family, dualstack_ipv6=wide)
    except OSError:
        pytest.skip("no IPv6 here")
    with listener:
        where = ("127.0.0.1", listener.getsockname()[1])
        with socket.create_connection(where) as caller, listener.accept()[0] as answered:
            caller.sendall(SAID)
            assert answered.recv(len(SAID)) == SAID
            yield where[1]


def test_both_ends_of_a_connection_are_told_with_their_counters(port: int) -> None:
    found = connections_at(port)
    assert [(each.local, each.remote) for each in found] == [("127.0.0.1", "127.0.0.1")] * 2
    assert sorted(each.tcp.segments for each in found) == [0, 1]
    assert all(each.tcp.mss > 500 for each in found)


def test_the_time_since_something_came_in_is_told(port: int) -> None:
    time.sleep(0.25)
    for each in connections_at(port):
        assert 0.2 < each.silent_s < 5.0


def test_a_port_without_connections_has_none(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert connections_at(other.getsockname()[1]) == []


def test_what_is_sent_again_until_now_in_vain_is_told_apart() -> None:
    raw = bytes([1, 0, 4]) + bytes(229)
    assert TcpInfo.parse(raw).unanswered == 4
    assert TcpInfo.parse(b"").unanswered == 0


def test_what_lost_nothing_or_stays_here_is_no_road(port: int) -> None:
    assert roads_of_store(port) == {}
    assert roads_of_store(None) == {}
