"""The address at which a participant signs in, of several that a name has."""

from __future__ import annotations

import socket

import pytest

from nccl_doctor.gather.connect import first_to_answer
from nccl_doctor.toolkit.net.names import look_up


def test_the_first_address_that_accepts_connections():
    with socket.create_server(("127.0.0.3", 0)) as server:
        port = server.getsockname()[1]
        assert first_to_answer(("127.0.0.2", "127.0.0.3", "127.0.0.4"), port) == "127.0.0.3"
        assert first_to_answer(("127.0.0.2",), port) == ""


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "::1"])
def test_the_order_of_the_answers_is_that_of_torch(name: str):
    """As SocketConnectOp::tryConnect in torch asks first: for IPv6, and IPv4 mapped into it."""
    flags = socket.AI_V4MAPPED | socket.AI_ALL | socket.AI_NUMERICSERV
    asked = socket.getaddrinfo(name, 29500, socket.AF_INET6, socket.SOCK_STREAM, 0, flags)
    order = [str(entry[4][0]).removeprefix("::ffff:") for entry in asked]
    assert list(look_up(name, 4.0).answers) == list(dict.fromkeys(order))
