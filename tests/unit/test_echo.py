"""The echo between two hosts, over loopback: right answers, wrong answers, none."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from nccl_doctor.toolkit.peers.burst import connect_many
from nccl_doctor.toolkit.peers.calm import GROUP_BYTES, MARK, REPLY, Calm
from nccl_doctor.toolkit.peers.echo import (
    LARGE_BYTES,
    LARGE_MARK,
    MAGIC,
    SEGMENT_MARK,
    SEGMENT_REPLY,
    Call,
    ListeningAddress,
    Talk,
    _random_content,
    address_words,
    call,
    call_all,
    scoped,
)
from nccl_doctor.toolkit.peers.listeners import Listeners

HOME = "127.0.0.1"


@contextmanager
def server(behave: Callable[[socket.socket], object]) -> Iterator[ListeningAddress]:
    """Some other program on a port."""
    with socket.create_server((HOME, 0)) as listening:
        listening.settimeout(10)

        def run() -> None:
            try:
                client, _ = listening.accept()
                with client:
                    client.settimeout(10)
                    behave(client)
            except OSError:
                pass

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield ListeningAddress(HOME, listening.getsockname()[1], "a" * 32, "b" * 32)
        listening.close()
        thread.join(10)


def test_both_echoes_come_back() -> None:
    with Listeners([HOME]) as listeners:
        result = call(listeners.doors[0])
    assert (result.outcome, result.detail) == ("ok", "")
    assert (result.uploaded, result.downloaded) == (LARGE_BYTES, LARGE_BYTES)
    assert result.duration_s < 2


def test_listeners_end_at_once() -> None:
    took = []
    for _ in range(5):
        listeners = Listeners([HOME])
        started = time.monotonic()
        listeners.close()
        took.append(time.monotonic() - started)
    assert min(took) < 0.05


def test_a_brief_call_leaves_the_large_echo_out() -> None:
    with Listeners([HOME, "127.0.0.2"]) as listeners:
        (full,), (brief,) = call_all(listeners.doors, 10, brief=[False, True])
    assert [(each.outcome, each.downloaded) for each in (full, brief)] == [
        ("ok", LARGE_BYTES),
        ("ok", 0),
    ]


def test_the_caller_learns_from_which_address_it_is_seen() -> None:
    """A relay with an address of its own, as an address translation has."""

    def pass_on(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    with Listeners([HOME]) as listeners:
        (door,) = listeners.doors

        def relay(client: socket.socket) -> None:
            with socket.create_connection((HOME, door.port), 5, ("127.0.0.9", 0)) as far:
                back = threading.Thread(target=pass_on, args=(far, client))
                back.start()
                pass_on(client, far)
                back.join(5)

        with server(relay) as between:
            made = call(replace(door, port=between.port))
        assert call(door).seen == ""
    assert (made.outcome, made.seen) == ("ok", "127.0.0.9")
    assert made.to_json()["seen"] == "127.0.0.9"
    assert "seen" not in Call("ok", "", 0.1).to_json()


def test_each_address_has_its_own_port_and_tokens() -> None:
    with Listeners([HOME, "127.0.0.2"]) as listeners:
        one, other = listeners.doors
        assert (one.address, other.address) == (HOME, "127.0.0.2")
        assert len({one.token, one.answer, other.token, other.answer}) == 4
        assert [call(door).outcome for door in listeners.doors] == ["ok", "ok"]


def test_many_callers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are first callers, so that each might make its own content of the large echo."""
    made: list[int] = []

    def urandom(size: int, real: Callable[[int], bytes] = os.urandom) -> bytes:
        if size == LARGE_BYTES:
            made.append(size)
            time.sleep(0.2)
        return real(size)

    monkeypatch.setattr(os, "urandom", urandom)
    _random_content.cache_clear()
    outcomes: list[str] = []
    with Listeners([HOME]) as listeners:
        door = listeners.doors[0]
        threads = [
            threading.Thread(target=lambda: outcomes.append(call(door).outcome)) for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert outcomes == ["ok"] * 12
    assert len(made) == 1


def test_a_listener_keeps_silent_before_a_stranger() -> None:
    with Listeners([HOME]) as listeners:
        door = listeners.doors[0]
        with socket.create_connection((HOME, door.port), timeout=5) as stranger:
            stranger.sendall(MAGIC + b"x" * 32)
            assert stranger.recv(100) == b""


def test_a_stranger_that_trickles_is_not_served_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then keeps no slot: what counts is the whole, not the pause."""
    monkeypatch.setattr("nccl_doctor.toolkit.peers.listeners._PATIENCE_S", 0.5)
    began = time.monotonic()
    ended = False
    with Listeners([HOME]) as listeners:
        port = listeners.doors[0].port
        with contextlib.closing(socket.create_connection((HOME, port))) as stranger:
            stranger.settimeout(0.2)
            while not ended and time.monotonic() < began + 6:
                try:
                    stranger.sendall(b"n")
                    ended = stranger.recv(1) == b""
                except TimeoutError:
                    continue
                except ConnectionError:
                    ended = True
    assert ended
    assert time.monotonic() - began < 5


def test_another_listener_is_not_taken_for_the_right_one() -> None:
    with Listeners([HOME, "127.0.0.2"]) as listeners:
        one, other = listeners.doors
        result = call(replace(one, port=other.port, address=other.address))
    assert result.outcome == "intercepted"


def test_a_closed_listener_refuses() -> None:
    with Listeners([HOME]) as listeners:
        door = listeners.doors[0]
    assert call(door).outcome == "refused"


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with Listeners(["192.0.2.77", HOME]) as listeners:
        assert [door.address for door in listeners.doors] == [HOME]
        assert "192.0.2.77" in listeners.failed


def test_a_failed_call_is_made_twice_and_a_good_one_once() -> None:
    with Listeners([HOME, "127.0.0.2"]) as listeners:
        good, other = listeners.doors
        wrong = replace(other, token="x" * 32)
        attempts = call_all([wrong, good], budget_s=10)
    assert [[one.outcome for one in each] for each in attempts] == [["intercepted"] * 2, ["ok"]]


def test_no_call_begins_after_the_budget() -> None:
    with Listeners([HOME]) as listeners:
        assert call_all(listeners.doors, budget_s=0) == [[]]


def test_a_call_that_takes_long_does_not_cost_the_others_theirs() -> None:
    over = threading.Event()
    with server(lambda client: bool(over.wait(10))) as mute, Listeners([HOME]) as listeners:
        slow, good = call_all([mute, *listeners.doors], budget_s=1.0)
        over.set()
    assert slow == []
    assert [each.outcome for each in good] == ["ok"]


def test_a_proxy_that_accepts_and_says_nothing() -> None:
    started = time.monotonic()
    with server(lambda client: time.sleep(3.5)) as door:
        result = call(door)
    assert result.outcome == "intercepted"
    assert "no proof" in result.detail
    assert time.monotonic() - started < 8


def answer_wrongly(client: socket.socket) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def close_at_once(client: socket.socket) -> None:
    client.recv(4096)


@pytest.mark.parametrize("behave", [answer_wrongly, close_at_once])
def test_another_program_on_the_port(behave: Callable[[socket.socket], None]) -> None:
    with server(behave) as door:
        assert call(door).outcome == "intercepted"


def read(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = client.recv(size - len(data))
        assert part
        data += part
    return data


def identified(client: socket.socket) -> None:
    read(client, len(MAGIC) + 32)
    client.sendall(b"b" * 32 + address_words(client.getpeername()[0]))
    client.sendall(read(client, 64))


def echo_small_then(
    rest: Callable[[socket.socket], None], packet: str = "echo"
) -> Callable[[socket.socket], None]:
    """A listener up to the large echo; of the full packet it may `take` only, or not even that."""

    def behave(client: socket.socket) -> None:
        identified(client)
        while read(client, 1) == MARK:
            read(client, GROUP_BYTES - 1)
            client.sendall(REPLY)
        mark = SEGMENT_MARK
        while mark == SEGMENT_MARK:
            size = int.from_bytes(read(client, 2), "big")
            content = read(client, size)
            if packet in ("echo", "take"):
                client.sendall(SEGMENT_REPLY)
            if packet == "echo":
                client.sendall(content)
            mark = read(client, 1) if packet == "echo" else LARGE_MARK
        rest(client)

    return behave


def swallow(client: socket.socket) -> None:
    time.sleep(3.5)


def answer_no_segments(client: socket.socket) -> None:
    identified(client)
    swallow(client)


def answer_segments_wrongly(client: socket.socket) -> None:
    identified(client)
    read(client, GROUP_BYTES)
    client.sendall(b"?")
    swallow(client)


@pytest.mark.parametrize(
    ("behave", "words"),
    [
        (answer_no_segments, "connected, then silent for 3 s"),
        (answer_segments_wrongly, "a wrong answer to small segments: b'?'"),
        (identified, "connected, then: "),
    ],
)
def test_who_stops_at_small_segments_is_not_the_right_listener(
    behave: Callable[[socket.socket], None], words: str
) -> None:
    with server(behave) as door:
        result = call(door)
    assert result.outcome == "intercepted"
    assert words in result.detail


def test_segments_are_counted_and_none_is_lost_on_loopback() -> None:
    with Listeners([HOME]) as listeners:
        result = call(listeners.doors[0], talk=Talk(Calm(groups=50), large=False))
        assert (result.outcome, result.lost, result.uploaded) == ("ok", 0, 0)
        assert result.segments >= 200
        (few,), *_ = call_all(listeners.doors * 400, 30.0, talk=Talk(large=False))
    assert 48 <= few.segments < 100


def test_small_segments_stop_after_their_time() -> None:
    with Listeners([HOME]) as listeners:
        started = time.monotonic()
        result = call(listeners.doors[0], talk=Talk(Calm(groups=10**6, limit_s=0.2), large=False))
    assert result.outcome == "ok"
    assert 0.2 <= time.monotonic() - started < 3


def acknowledge_only(client: socket.socket) -> None:
    read(client, LARGE_BYTES)
    client.sendall(b"." * 64)
    time.sleep(3.5)


@pytest.mark.parametrize(
    ("rest", "way", "uploaded"),
    [(swallow, "upload", 0), (acknowledge_only, "download", LARGE_BYTES)],
)
def test_what_stalls_is_named(
    rest: Callable[[socket.socket], None], way: str, uploaded: int
) -> None:
    with server(echo_small_then(rest)) as door:
        result = call(door)
    assert (result.outcome, result.stalled) == ("mtu", way)
    assert (result.uploaded, result.downloaded) == (uploaded, 0)


@pytest.mark.parametrize(("packet", "way"), [("none", "upload"), ("take", "download")])
def test_a_full_packet_that_stops_is_named_before_a_stream_is_tried(packet: str, way: str) -> None:
    """A card or a virtual link may pass large pieces of a stream where a full packet is lost."""
    with server(echo_small_then(swallow, packet)) as door:
        result = call(door, talk=Talk(large=False))
    assert (result.outcome, result.stalled) == ("mtu", way)
    assert result.detail == "one packet of 16384 bytes of data stopped for 3 s"


def change_content(client: socket.socket) -> None:
    data = bytearray(read(client, LARGE_BYTES))
    data[LARGE_BYTES // 2] ^= 1
    client.sendall(b"." * 64 + bytes(data))
    time.sleep(0.5)


def test_changed_content_is_noticed() -> None:
    with server(echo_small_then(change_content)) as door:
        result = call(door)
    assert result.outcome == "intercepted"
    assert "corrupted" in result.detail


def test_as_many_connections_as_wanted_stand_at_once() -> None:
    with Listeners([HOME]) as listeners:
        result = call(listeners.doors[0], talk=Talk(burst=64))
    assert (result.outcome, result.wanted, result.stood) == ("ok", 64, 64)
    assert "wanted" not in result.to_json()


def test_a_listener_that_takes_few_connections_is_found_out() -> None:
    """With a backlog of 1 the kernel takes two, and drops the others without an answer."""
    with socket.create_server((HOME, 0), backlog=1) as full:
        started = time.monotonic()
        assert connect_many(*full.getsockname(), count=8, limit_s=0.5) == 2
        assert time.monotonic() - started < 2


def test_where_nobody_listens_no_connection_stands() -> None:
    with socket.create_server((HOME, 0)) as gone:
        at = gone.getsockname()
    assert connect_many(*at, count=8) == 0


def test_a_zone_is_added_to_link_local_addresses_alone() -> None:
    index = socket.if_nametoindex("lo")
    assert scoped("fe80::1", "lo") == f"fe80::1%{index}"
    assert scoped("192.0.2.1", "lo") == "192.0.2.1"
    assert scoped("2001:db8::1", "lo") == "2001:db8::1"
