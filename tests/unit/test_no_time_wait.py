"""Connections that free their port at once: what the kernel has of them afterwards."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nccl_doctor.toolkit.net.no_time_wait import calls_without_time_wait, no_time_wait

_TIME_WAIT = "06"


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def is_kept(port: int) -> bool:
    """Whether this port is kept for a connection that was closed."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == _TIME_WAIT and row[1].endswith(f":{port:04X}") for row in rows)


def close(calling: socket.socket, server: socket.socket) -> int:
    """Let both sides hear each other, then close; the caller first. Returns the caller's port."""
    heard, _ = server.accept()
    with heard:
        calling.sendall(b"hello")
        assert heard.recv(5) == b"hello"
        port: int = calling.getsockname()[1]
        calling.close()
        with contextlib.suppress(ConnectionResetError):
            assert heard.recv(1) == b""
    return port


def test_a_socket(server: socket.socket) -> None:
    usual, reset = (socket.create_connection(server.getsockname()) for _ in "12")
    no_time_wait(reset)
    assert [is_kept(close(each, server)) for each in (usual, reset)] == [True, False]


def test_what_a_library_opens(server: socket.socket) -> None:
    port = server.getsockname()[1]
    before = socket.create_connection(server.getsockname())
    with socket.create_server(("127.0.0.1", 0)) as elsewhere, calls_without_time_wait(port):
        meanwhile = socket.create_connection(server.getsockname())
        other = socket.create_connection(elsewhere.getsockname())
        with open("/dev/null"), socket.socket(), socket.socketpair()[0]:
            pass
        kept = open("/dev/null")  # noqa: SIM115 - no socket, and still open
    kept.close()
    assert [is_kept(close(each, server)) for each in (before, meanwhile)] == [True, False]
    linger = other.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8)
    other.close()
    assert not any(linger), "of another port"
