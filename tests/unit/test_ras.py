"""The client of NCCL's RAS, against servers that speak its protocol, badly or not at all."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nccl_doctor.toolkit.nccl.ras import LIMIT_S, ask_ras, ask_ras_twice, own_address, summary

PID = 4242
Behave = Callable[[socket.socket], None]


SLACK_S = 5.0
"""Slack for a busy machine: a wait that lasts longer never ends."""


@contextmanager
def server(behave: Behave, clients: int = 1) -> Iterator[str]:
    """A server for one client, or for several in turn; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                for _ in range(clients):
                    client, _address = listener.accept()
                    with client:
                        behave(client)
            except OSError:
                return

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    thread.join(2)


def rank(number: int, count: int, **fields: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "host": "10.0.0.1",
        "pid": PID + number,
        "status": {"init_state": 0, "finalize_called": False, "abort_flag": False},
        "collective_counts": {"AllReduce": count, "Broadcast": 0},
        **fields,
    }


def status(*communicators: dict[str, Any]) -> dict[str, Any]:
    return {
        "nccl_version": "2.29.1",
        "timestamp": "2025-12-19 13:06:53",
        "communicators_count": len(communicators),
        "communicators": list(communicators),
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
    }


LATE = {
    "hash": "0xae94423cfbb2ef4a",
    "size": 4,
    "ranks": [rank(0, 7), rank(1, 6), rank(2, 7)],
    "missing_ranks": [
        {"rank": 3, "pid": 9, "status": {"unresponsive": True, "considered_dead": False}}
    ],
}
TEXT = "NCCL version 2.24.3 compiled with CUDA 12.6\nJob summary\n===========\n"


def ras(payload: str, *, knows_json: bool = True) -> Behave:
    """As src/ras/client_support.cc answers: line by line, and it closes after the status."""

    def behave(client: socket.socket) -> None:
        for line in client.makefile("r"):
            command = line.strip().upper()
            if command.startswith("CLIENT PROTOCOL"):
                client.sendall(b"SERVER PROTOCOL 2\n")
            elif command == "TIMEOUT 1" or (command == "SET FORMAT JSON" and knows_json):
                client.sendall(b"OK\n")
            elif command == "VERBOSE STATUS":
                client.sendall(payload.encode())
                return
            else:
                client.sendall(f"ERROR: Unknown command {command}\n".encode())

    return behave


def test_who_is_missing_and_who_is_behind() -> None:
    with server(ras(json.dumps(status(LATE), indent=2))) as address:
        found = ask_ras(address, pid=PID)
    assert (found["answer"], found["nccl"], found["own_process"]) == ("json", "2.29.1", True)
    (one,) = found["communicators"]
    assert (one["size"], one["missing"], one["unresponsive"], one["dead"]) == (4, "3", "3", "")
    assert one["behind"] == "1"
    assert one["status"] == {"RUNNING": "0–2"}
    assert one["collectives"] == {"AllReduce": {"6": "1", "7": "0, 2"}}


def test_another_jobs_process_that_answers_is_known_by_its_processes() -> None:
    with server(ras(json.dumps(status(LATE)))) as address:
        assert ask_ras(address, pid=1)["own_process"] is False


def test_an_old_server_answers_in_text() -> None:
    with server(ras(TEXT, knows_json=False)) as address:
        found = ask_ras(address)
    assert found == {"answer": "text", "text": TEXT.strip()}


def test_json_without_its_commas_is_read() -> None:
    # NCCL 2.28.9 leaves them out between the lines of `missing_ranks`.
    text = json.dumps(status(LATE), indent=2).replace('"rank": 3,', '"rank": 3')
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)
    assert summary(text, PID)["communicators"][0]["missing"] == "3"


def test_every_command_is_one_that_it_takes() -> None:
    """NCCL reads whole seconds: `TIMEOUT 0.3` is an error for every version."""
    asked: list[str] = []

    def behave(client: socket.socket) -> None:
        asked.append(client.recv(4096).decode())
        client.sendall(b"SERVER PROTOCOL 2\n")
        asked.append(client.recv(4096).decode())
        client.sendall(f"OK\nOK\n{json.dumps(status(LATE))}".encode())

    with server(behave) as address:
        assert ask_ras(address, pid=PID)["own_process"] is True
    lines = "".join(asked).splitlines()
    assert lines == ["CLIENT PROTOCOL 2", "TIMEOUT 1", "SET FORMAT json", "VERBOSE STATUS"]


def test_the_last_of_two_answers_counts() -> None:
    """What is in flight at the first one is done at the second."""
    done = {**LATE, "ranks": [rank(0, 7), rank(1, 7), rank(2, 7)], "missing_ranks": []}
    answers = [status(LATE), status(done)]

    def behave(client: socket.socket) -> None:
        ras(json.dumps(answers.pop(0)))(client)

    with server(behave, 2) as address:
        found = ask_ras_twice(address, 5.0)
    assert found["asked"] == 2
    assert (found["communicators"][0]["missing"], found["communicators"][0]["behind"]) == ("", "")


def test_one_answer_is_better_than_none_in_time() -> None:
    answers = [json.dumps(status(LATE))]

    def behave(client: socket.socket) -> None:
        if answers:
            ras(answers.pop())(client)

    with server(behave, 2) as address:
        found = ask_ras_twice(address, 5.0)
    assert (found["asked"], found["communicators"][0]["missing"]) == (1, "3")
    assert ask_ras_twice("127.0.0.1:1", 1.0)["answer"] == "none"


def silent(client: socket.socket) -> None:
    time.sleep(1)


def slow(client: socket.socket) -> None:
    for _ in range(20):
        client.sendall(b"S")
        time.sleep(0.1)


def half(client: socket.socket) -> None:
    client.sendall(b"SERVER PROTOCOL 2\n")
    time.sleep(1)


def garbage(client: socket.socket) -> None:
    client.sendall(bytes(range(256)) * 100)


def endless(client: socket.socket) -> None:
    client.sendall(b"SERVER PROTOCOL 2\n")
    while True:
        client.sendall(b"\xff" * 65536)


@pytest.mark.parametrize("behave", [silent, slow, half, garbage, lambda _: None])
def test_whoever_is_no_ras_is_no_answer_and_no_error(behave: Behave) -> None:
    started = time.monotonic()
    with server(behave) as address:
        found = ask_ras(address)
        assert time.monotonic() - started < LIMIT_S + SLACK_S
    assert found["answer"] == "none"
    assert found["why"]


def test_an_endless_answer_ends_in_time_and_is_cut() -> None:
    started = time.monotonic()
    with server(endless) as address:
        found = ask_ras(address)
    assert time.monotonic() - started < LIMIT_S + SLACK_S
    assert len(json.dumps(found)) < 20_000


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense", "host:port", ":", "[::1]:70000"])
def test_a_closed_port_or_no_address_is_no_answer(address: str) -> None:
    assert ask_ras(address)["answer"] == "none"


@pytest.mark.parametrize(
    ("text", "communicators"),
    [
        ("{}", 0),
        ('{"communicators": 1}', 0),
        ('{"communicators": [1, {}, {"ranks": 3, "missing_ranks": [{}]}]}', 2),
        ('{"communicators": [{"ranks": [{"rank": "x", "collective_counts": {"a": "b"}}]}]}', 1),
    ],
)
def test_an_answer_of_another_shape_blames_no_rank(text: str, communicators: int) -> None:
    found = json.loads(json.dumps(summary(text, 1)))
    assert (found["answer"], found["own_process"]) == ("json", False)
    assert len(found["communicators"]) == communicators
    for each in found["communicators"]:
        assert each["unresponsive"] == each["dead"] == each["behind"] == ""


@pytest.mark.parametrize("text", ["[]", '{"broken": ', '{"deep": ' + "[" * 1500])
def test_an_answer_that_is_no_object_is_kept_as_text(text: str) -> None:
    assert summary(text, 1) == {"answer": "text", "text": text.strip()}


def test_many_communicators_stay_small_and_the_late_one_comes_first() -> None:
    good = {"size": 500, "ranks": [rank(n, 5) for n in range(0, 1000, 2)]}
    found = summary(json.dumps(status(*[good] * 50, LATE)), PID)
    assert found["communicators"][0]["behind"] == "1"
    assert found["communicators_left_out"] == 43
    assert len(json.dumps(found)) < 8000


def test_an_own_address_can_be_bound() -> None:
    host, _, port = own_address().rpartition(":")
    with socket.create_server((host, int(port))):
        pass
