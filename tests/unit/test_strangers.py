"""Callers that do not belong to the run: who is counted at a port, and what is said of them."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Severity
from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.toolkit.peers.echo import MAGIC, Talk, call
from nccl_doctor.toolkit.peers.listeners import Listeners
from nccl_doctor.toolkit.peers.visitors import Visitors, in_words
from tests.support.clusters import change_rank, outcome
from tests.support.findings import judge
from tests.support.peers import DROPPED, World
from tests.support.rows import each_row

CHECK = Firewall()
HOME, ELSEWHERE = "127.0.0.1", "127.0.0.9"


def say(port: int, what: bytes, source: str) -> None:
    with socket.socket() as sock:
        sock.bind((source, 0))
        sock.connect((HOME, port))
        sock.sendall(what)


def test_a_scraper_and_a_scan_are_counted_and_callers_of_the_run_are_not() -> None:
    with Listeners([HOME]) as listeners:
        (door,) = listeners.doors
        assert call(door, talk=Talk(large=False, burst=8)).outcome == "ok"
        say(door.port, b"GET /metrics?token=secret HTTP/1.1\r\nHost: x\r\n\r\n", ELSEWHERE)
        say(door.port, b"", ELSEWHERE)
        say(door.port, MAGIC + b"of another run", ELSEWHERE)
        until = time.monotonic() + 5
        while len(listeners.strangers()) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        found = {(each["source"], each["first"], each["times"]) for each in listeners.strangers()}
    assert found == {(ELSEWHERE, "GET /metrics", 1), (ELSEWHERE, "", 1)}


def test_silence_from_a_host_of_the_run_is_no_stranger_but_other_words_are() -> None:
    visitors = Visitors()
    visitors.note("10.0.0.2", 4, b"", known=False)
    visitors.note("10.0.0.2", 4, MAGIC, known=True)
    visitors.note("10.0.0.2", 5, b"SSH-2.0-x\r\n", known=False)
    assert [each["first"] for each in visitors.strangers()] == ["SSH-2.0-x"]


@each_row(
    "shown",
    [
        b"GET /metrics HTTP/1.1\r\nAuthorization: x",
        b"GET /a?password=x HTTP/1.1",
        b"\x00\x1b[31m\\",
        b"\n\n\n\nx",
        b"\x16\x03\x01\x02" + bytes(99),
        b"x" * 99,
    ],
)
def test_words_are_escaped_and_short(shown: bytes) -> None:
    text = in_words(shown)
    assert text
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= 40
    assert "password" not in text
    assert "Authorization" not in text


def stranger(source: str, first: str, port: int = 40007) -> dict[str, Any]:
    return {"source": source, "port": port, "first": first, "times": 2}


def world(*strangers: dict[str, Any], backend: str = "nccl", nccl: str = "") -> Cluster:
    made = World(3, backend)
    made.facts["nd1"]["strangers"] = list(strangers)
    cluster = made.cluster()
    library = {"loaded": {"version": nccl}, "cuda": "13.0"}
    for rank in cluster.ranks if nccl else ():
        facts = {**rank.facts, "nccl_library": {ALONE: outcome(library)}}
        cluster = change_rank(cluster, rank.seat, facts=facts)
    return cluster


@pytest.mark.parametrize(
    ("backend", "nccl", "level"),
    [
        ("nccl", "", Severity.WARN),
        ("nccl", "2.28.9", Severity.WARN),
        ("nccl", "2.30.7", Severity.INFO),
        ("gloo", "", Severity.INFO),
    ],
)
def test_a_stranger_is_named_at_the_host_that_was_called(
    backend: str, nccl: str, level: Severity
) -> None:
    seen = [stranger("10.9.9.9", "GET /metrics HTTP/1.1"), stranger("10.9.9.9", "", 40009)]
    (found,) = judge(CHECK, world(*seen, backend=backend, nccl=nccl))
    assert (found.code, found.level, found.where.hosts) == ("stranger-connects", level, ("nd1",))
    assert "10.9.9.9 connected 4 times to 2 ports" in found.message
    assert ("NCCL" in found.message) == (backend == "nccl")
    assert 'said "GET /metrics HTTP/1.1"' in found.message
    assert "10.9.9.9" in found.fix


def test_a_host_of_the_job_whose_call_broke_off_is_no_stranger() -> None:
    assert judge(CHECK, world(stranger("192.168.77.1", ""))) == []


def test_silence_where_calls_broke_off_may_be_a_translated_host_of_the_job() -> None:
    made = World(3, "nccl").fail([("nd0", "nd1")], DROPPED)
    made.facts["nd1"]["strangers"] = [stranger("10.9.9.9", ""), stranger("10.9.9.8", "GET /")]
    said = [f.message for f in judge(CHECK, made.cluster()) if f.code == "stranger-connects"]
    assert len(said) == 1
    assert said[0].startswith("10.9.9.8 ")


def test_a_scan_of_every_port_from_many_addresses_gives_a_few_findings() -> None:
    seen = [stranger(f"10.9.9.{i}", "") for i in range(30)]
    assert len(judge(CHECK, world(*seen))) == 5
