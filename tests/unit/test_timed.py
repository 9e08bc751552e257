"""The timed exchange over real sockets, and what it is made of: timetable, counters, CPU."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nccl_doctor.checks.links import wire
from nccl_doctor.checks.links.timed import Pace, exchange, hold_meetings, nic_speed, warm_part
from nccl_doctor.checks.links.wire import Gate, Stalled, Wire, call
from nccl_doctor.toolkit.cpu_wait import CpuWatch, ran_share, was_starved
from nccl_doctor.toolkit.host import load_average
from nccl_doctor.toolkit.net.tcp_info import TcpInfo, tcp_info
from nccl_doctor.toolkit.peers.schedule import in_slots, tournament

HOME = "127.0.0.1"
SHORT = Pace(burst_s=0.02, limit_s=2.0)


def together(*works: Callable[[], Any]) -> list[Any]:
    """Do several things at the same time; what each of them returned."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        results[index] = works[index]()

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOME, 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


# One pair


def test_both_directions_are_measured() -> None:
    one, other = connected()
    with one, other:
        sent = together(
            lambda: exchange(one, SHORT, leads=True), lambda: exchange(other, SHORT, leads=False)
        )
    for each in sent:
        facts = json.loads(json.dumps(each.to_json()))
        assert facts["stalled"] == ""
        assert 0 < facts["rtt_us"] < 1e6
        assert facts["rate"] > 1e6
        assert facts["tcp"]["segments"] > 0
        assert {part: len(ends) for part, ends in facts["cpu"].items()} == {"echo": 2, "burst": 2}


def test_a_fast_link_is_known_after_some_bytes() -> None:
    one, other = connected()
    pace = replace(SHORT, burst_s=30.0, burst_bytes=8 << 20, limit_s=60.0)
    started = time.monotonic()
    with one, other:
        sent, _ = together(
            lambda: exchange(one, pace, leads=True), lambda: exchange(other, pace, leads=False)
        )
    assert time.monotonic() - started < 15
    # What counts came in the last three quarters of the time; a busy machine may have spent them
    # on the last block.
    assert 1 << 16 <= sent.bytes < 16 << 20
    assert sent.rate > 1e6


def test_a_partner_that_falls_silent_costs_the_limit_and_no_more() -> None:
    one, other = connected()
    started = time.monotonic()
    with one, other:
        sent = exchange(one, replace(SHORT, limit_s=0.3), leads=True)
    assert 0.2 < time.monotonic() - started < 2
    assert (sent.stalled, sent.to_json()["rate"], sent.to_json()["rtt_us"]) == ("echo", None, None)


@pytest.mark.parametrize("leads", [True, False])
def test_a_partner_that_leaves_is_noted(leads: bool) -> None:
    one, other = connected()
    other.close()
    with one:
        sent = exchange(one, SHORT, leads=leads)
    assert sent.stalled == ("echo" if leads else "the other direction")


def test_a_partner_that_answers_to_pings_only() -> None:
    one, other = connected()

    def answer() -> None:
        wire = Wire(other, 2.0)
        while True:
            what, size = wire.next()
            wire.take(size)
            if what != b"P":
                return
            wire.reply(None)

    with one, other:
        sent, _ = together(lambda: exchange(one, replace(SHORT, limit_s=0.5), leads=True), answer)
    assert sent.stalled == "burst"
    assert sent.to_json()["rtt_us"] is not None
    assert sent.to_json()["rate"] is None


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("!cI", b"R", 1 << 30),
        struct.pack("!cI", b"R", 4) + b"nope",
        struct.pack("!cI", b"X", 4) + b"null",
    ],
    ids=["too large", "no JSON", "another kind"],
)
def test_what_makes_no_sense_is_refused(raw: bytes) -> None:
    one, other = connected()
    with one, other:
        other.sendall(raw)
        with pytest.raises(Stalled):
            Wire(one, 2.0).ask(b"P")


def test_bandwidth_is_that_of_the_warm_part() -> None:
    # A token bucket lets 1000 bytes through at once and then 100 bytes a second.
    arrived = [(10.0, 0), (10.0, 1000), *((10.0 + i, 1000 + 100 * i) for i in range(1, 9))]
    count, seconds = warm_part(arrived)
    assert count / seconds == pytest.approx(100)


def test_what_arrives_in_one_lump_took_all_the_time() -> None:
    assert warm_part([(0.0, 0), (2.0, 1000)]) == (1000, 1.5)
    assert warm_part([(0.0, 0)]) == (0, 0.0)


# The gate


def test_a_gate_keeps_early_callers_for_their_turn() -> None:
    with Gate(HOME) as gate:

        def admit() -> list[bool]:
            time.sleep(0.2)
            found = [gate.admit(seat, 5) for seat in (4, 2)]
            for sock in found:
                assert sock is not None
                sock.close()
            return [sock is not None for sock in found]

        def arrive(seat: int) -> bool:
            sock = call(gate.door, seat, 5)
            assert isinstance(sock, socket.socket)
            sock.close()
            return True

        assert together(admit, lambda: arrive(2), lambda: arrive(4)) == [[True, True], True, True]


def test_strangers_that_say_nothing_keep_no_partner_out() -> None:
    began = time.monotonic()
    with Gate(HOME) as gate:
        strangers = [socket.create_connection((HOME, gate.door.port)) for _ in range(8)]
        strangers[0].sendall(b"n")
        admitted, answer = together(lambda: gate.admit(7, 4), lambda: call(gate.door, 7, 4))
        assert isinstance(answer, socket.socket)
        for sock in (admitted, answer, *strangers):
            sock.close()
    assert time.monotonic() - began < 3


def test_a_stranger_has_to_say_who_it_is_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STALL_S", 0.2)
    with Gate(HOME) as gate, socket.create_connection((HOME, gate.door.port)) as stranger:
        stranger.sendall(b"n")
        assert gate.admit(7, 1.0) is None
        stranger.settimeout(2)
        assert stranger.recv(1) == b""


def test_more_strangers_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_MOST_CALLERS", 4)
    with Gate(HOME) as gate:
        strangers = [socket.create_connection((HOME, gate.door.port)) for _ in range(9)]
        admitted, answer = together(lambda: gate.admit(7, 4), lambda: call(gate.door, 7, 4))
        for sock in (admitted, answer, *strangers):
            sock.close()


def test_a_gate_says_nothing_to_a_stranger() -> None:
    with Gate(HOME) as gate:
        stranger = replace(gate.door, token="x" * 32)
        admitted, problem = together(lambda: gate.admit(7, 0.5), lambda: call(stranger, 7, 1.0))
    assert admitted is None
    assert problem == "the partner closed the connection"


def test_another_gate_is_not_taken_for_the_right_one() -> None:
    with Gate(HOME) as gate:
        wrong = replace(gate.door, answer="y" * 32)
        admitted, problem = together(lambda: gate.admit(7, 2), lambda: call(wrong, 7, 2))
        admitted.close()
    assert problem == "another service answered"


def test_a_closed_gate_and_a_busy_one() -> None:
    with Gate(HOME) as gate:
        assert call(gate.door, 1, 0.2) == "the partner had no time within 0.2 s"
    assert "refused" in str(call(gate.door, 1, 0.2)).lower()


def test_a_gate_needs_an_address_of_this_host() -> None:
    with pytest.raises(OSError, match="assign"):
        Gate("192.0.2.77")


# Several hosts


def meet(count: int, missing: int | None = None) -> dict[int, dict[int, dict[str, Any]]]:
    slots = tournament(range(count))
    gates = {seat: Gate(HOME) for seat in range(count)}
    doors = {seat: {**gate.door.to_json(), "more": 1} for seat, gate in gates.items()}
    end = time.monotonic() + 20
    pace = SHORT if missing is None else replace(SHORT, limit_s=0.3)

    def work(seat: int) -> Callable[[], Any]:
        return lambda: hold_meetings(slots, seat, gates[seat], doors, pace=pace, deadline=end)

    seats = [seat for seat in range(count) if seat != missing]
    found = dict(zip(seats, together(*map(work, seats)), strict=True))
    for gate in gates.values():
        gate.__exit__()
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
def test_everybody_measures_everybody(count: int) -> None:
    found = meet(count)
    for seat, sent in found.items():
        assert set(sent) == set(range(count)) - {seat}
        assert all(each["stalled"] == "" and each["rate"] > 0 for each in sent.values())


def test_who_does_not_come_is_waited_for_and_left_out() -> None:
    found = meet(3, missing=1)
    assert set(found[0][1]) == set(found[2][1]) == {"problem"}
    assert found[0][2]["rate"] > 0
    assert found[2][0]["rate"] > 0


def test_who_does_not_listen_is_not_waited_for() -> None:
    started = time.monotonic()
    with Gate(HOME) as gate:
        for meeting in ((0, 1), (1, 0)):
            found = hold_meetings([[meeting]], 0, gate, {}, pace=SHORT, deadline=started + 20)
            assert found == {1: {"problem": "the partner was not listening"}}
    assert time.monotonic() - started < SHORT.limit_s


def test_without_time_nobody_is_met() -> None:
    with Gate(HOME) as gate:
        found = hold_meetings([[(0, 1)]], 0, gate, {}, pace=SHORT, deadline=time.monotonic())
        assert found == {1: {"problem": "no time was left"}}
        found = hold_meetings([[(0, 1)]], 0, gate, {}, pace=SHORT, deadline=time.monotonic() + 2)
        assert found == {1: {"problem": "the partner was not listening"}}


def test_a_meeting_that_time_cuts_off_says_nothing_of_the_link() -> None:
    end = time.monotonic() + 1.7
    with Gate(HOME) as gate:

        def silent() -> None:
            met = call(gate.door, 1, 1.5)
            assert isinstance(met, socket.socket)
            with met:
                time.sleep(max(0.0, end + 0.5 - time.monotonic()))

        doors = {1: gate.door.to_json()}
        meet_it = partial(hold_meetings, [[(1, 0)]], 0, gate, doors, pace=SHORT, deadline=end)
        found, _ = together(meet_it, silent)
    assert found == {1: {"problem": "no time was left"}}


# The timetable


@given(st.sets(st.integers(0, 500), min_size=2, max_size=60))
def test_a_tournament_is_complete_and_nobody_has_two_partners(seats: set[int]) -> None:
    slots = tournament(sorted(seats))
    met = [frozenset(meeting) for slot in slots for meeting in slot]
    assert len(met) == len(set(met)) == len(seats) * (len(seats) - 1) // 2
    for slot in slots:
        busy = [seat for meeting in slot for seat in meeting]
        assert len(busy) == len(set(busy))


@given(st.integers(17, 200), st.integers(2, 9))
def test_few_partners_still_join_everybody(count: int, most: int) -> None:
    slots = tournament(range(count), most)
    assert len(slots) == most
    partners: dict[int, set[int]] = {seat: set() for seat in range(count)}
    for a, b in (meeting for slot in slots for meeting in slot):
        assert b not in partners[a]
        partners[a].add(b)
        partners[b].add(a)
    assert {len(each) for each in partners.values()} <= {most - 1, most}
    reached: set[int] = set()
    todo = {0}
    while todo:
        seat = todo.pop()
        reached.add(seat)
        todo |= partners[seat] - reached
    assert reached == set(range(count))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(10, 19)), unique=True))
def test_any_meetings_find_a_slot(meetings: list[tuple[int, int]]) -> None:
    slots = in_slots(meetings)
    assert sorted(meeting for slot in slots for meeting in slot) == sorted(meetings)
    for slot in slots:
        busy = [seat for meeting in slot for seat in meeting]
        assert len(busy) == len(set(busy))


# Counters of the kernel


def test_tcp_info_counts_what_was_sent() -> None:
    one, other = connected()
    with one, other:
        before = tcp_info(one)
        for _ in range(10):
            one.sendall(b"x")
            assert other.recv(1) == b"x"
        after = tcp_info(one)
    assert after.segments - before.segments == 10
    assert after.mss > 500
    assert after.rtt_us > 0
    assert after.lost == 0


def raw_info(**fields: int) -> bytes:
    offsets = {"mss": 16, "rtt_us": 68, "retransmits": 100, "segments": 156, "duplicates": 216}
    raw = bytearray(232)
    for name, value in fields.items():
        struct.pack_into("=I", raw, offsets[name], value)
    return bytes(raw)


def test_what_was_sent_again_for_nothing_is_not_lost() -> None:
    info = TcpInfo.parse(raw_info(mss=1448, rtt_us=90, retransmits=7, segments=100, duplicates=5))
    assert (info.mss, info.rtt_us, info.segments, info.lost) == (1448, 90, 100, 2)
    assert TcpInfo.parse(raw_info(retransmits=1, duplicates=3)).lost == 0


@pytest.mark.parametrize("size", [0, 18, 104, 192, 216])
def test_an_older_kernel_knows_less(size: int) -> None:
    info = TcpInfo.parse(raw_info(mss=1448, retransmits=7, segments=100, duplicates=5)[:size])
    assert info.mss == (1448 if size >= 20 else 0)
    assert info.retransmits == (7 if size >= 104 else 0)
    assert info.segments == (100 if size >= 160 else 0)
    assert info.duplicates == 0


# The CPU


def test_the_watch_tells_work_from_sleep() -> None:
    watch = CpuWatch()
    time.sleep(0.05)
    slept = watch.report()
    assert slept["wall_s"] >= 0.05
    assert slept["cpu_s"] < 0.04
    watch = CpuWatch()
    while watch.report()["cpu_s"] < 0.02:
        pass
    assert watch.report()["wall_s"] >= 0.02


@pytest.mark.parametrize(
    ("waited", "preempted", "starved", "ran"),
    [
        (0.0, 500, False, 1.0),
        (0.09, 0, False, 0.91),
        (0.11, 0, True, 0.89),
        (1.5, 0, True, 0.0),
        (None, 99, False, 1.0),
        (None, 101, True, 0.0),
    ],
)
def test_who_waited_for_a_cpu_was_starved(
    waited: float | None, preempted: int, starved: bool, ran: float
) -> None:
    report = {"wall_s": 1.0, "cpu_s": 0.5, "waited_s": waited, "preempted": preempted}
    assert was_starved(report) is starved
    assert ran_share(report) == pytest.approx(ran)


def test_without_a_report_nothing_is_known_of_the_cpu() -> None:
    assert was_starved(None)
    assert ran_share(None) == 0.0
    nothing = {"wall_s": 0.0, "cpu_s": 0.0, "waited_s": 0.0, "preempted": 0}
    assert was_starved(nothing)
    assert ran_share(nothing) == 0.0


def test_the_load_average_is_a_number() -> None:
    load = load_average()
    assert load is None or load >= 0


# The line rate


@pytest.mark.parametrize(
    ("device", "text", "speed"),
    [
        (True, "25000\n", 25000),
        (True, "-1\n", None),
        (True, "", None),
        (False, "10000\n", None),
    ],
    ids=["hardware", "not known", "unreadable", "virtual"],
)
def test_the_line_rate_of_hardware(
    tmp_path: Path, device: bool, text: str, speed: int | None
) -> None:
    nic = tmp_path / "sys/class/net/eth9"
    nic.mkdir(parents=True)
    (nic / "speed").write_text(text)
    if device:
        (nic / "device").mkdir()
    assert nic_speed("eth9", tmp_path) == speed


def test_the_line_rate_of_an_interface_that_is_gone(tmp_path: Path) -> None:
    assert nic_speed(f"eth{random.randint(1000, 9999)}", tmp_path) is None
