"""Connection attempts: classes of their ends, and a second one beside the first."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from nccl_doctor.toolkit.net.dial import Origin, dial, dial_twice, sockaddr

HOME = "127.0.0.1"


@pytest.fixture
def full() -> Iterator[socket.socket]:
    """A listening socket whose queue is full: it answers no SYN until somebody accepts."""
    with socket.socket() as sock, contextlib.ExitStack() as held:
        sock.bind((HOME, 0))
        sock.listen(0)
        for _ in range(3):
            client = held.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(sock.getsockname())
        time.sleep(0.1)
        yield sock


def test_no_answer_is_dropped_after_its_time(full: socket.socket) -> None:
    found, sock = dial(HOME, full.getsockname()[1], 0.4)
    assert (found.outcome, sock) == ("dropped", None)
    assert 0.4 <= found.duration_s < 2.0


def test_two_attempts_wait_side_by_side(full: socket.socket) -> None:
    began = time.monotonic()
    found, sock = dial_twice(HOME, full.getsockname()[1], 1.0, 0.3)
    took = time.monotonic() - began
    assert ([each.outcome for each in found], sock) == (["dropped", "dropped"], None)
    assert all(1.0 <= each.duration_s < 1.9 for each in found)
    assert 1.3 <= took < 1.9


def test_whichever_comes_first_is_the_connection(full: socket.socket) -> None:
    taken: list[socket.socket] = []

    def accept() -> None:
        time.sleep(0.2)
        for _ in range(3):
            taken.append(full.accept()[0])

    helper = threading.Thread(target=accept, daemon=True)
    helper.start()
    # The first SYN is lost; the second attempt's comes when there is room again.
    found, sock = dial_twice(HOME, full.getsockname()[1], 5.0, 0.5)
    assert sock is not None
    with sock:
        assert [each.outcome for each in found] == ["connected"]
        assert found[0].duration_s < 0.4  # by the second attempt, which began later
        assert sock.gettimeout() == 5.0
    helper.join(5.0)
    for each in taken:
        each.close()


def test_what_is_answered_at_once_needs_no_second_attempt() -> None:
    with socket.socket() as sock:
        sock.bind((HOME, 0))
        port = sock.getsockname()[1]
        found, none = dial_twice(HOME, port, 1.0, 0.0)
        assert (found[-1].outcome, none) == ("refused", None)
        sock.listen()
        found, made = dial_twice(HOME, port, 1.0, 0.3)
        assert made is not None
        made.close()
        assert [each.outcome for each in found] == ["connected"]


def test_a_zone_is_given_apart() -> None:
    """bind(("fe80::1%3", 0)) is EINVAL: Python takes the zone from the fourth place only."""
    assert sockaddr("fe80::1%3", 5) == ("fe80::1", 5, 0, 3)
    assert sockaddr("fe80::1", 5) == ("fe80::1", 5)
    assert sockaddr("192.0.2.1", 5) == ("192.0.2.1", 5)


def test_an_own_address_that_is_none_is_an_end_and_no_exception() -> None:
    found, sock = dial_twice(HOME, 9, 1.0, 0.3, Origin("192.0.2.77"))
    assert (len(found), sock) == (1, None)
    assert found[0].outcome == "unreachable"
    assert "Cannot assign requested address" in found[0].detail
