"""Messages of strangers, of other versions, with other keys: a report, nobody blamed, no wait.

The store is served by the test, as an agent's would be, so that anything can lie in it.
"""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from nccl_doctor.gather.envelope import Seal, wrap
from nccl_doctor.gather.messages import Reason, Roster
from nccl_doctor.gather.opening import MEETING, open_run, opened, prefix_of
from nccl_doctor.model.codec import encode
from tests.ranks.ranks import Ended, Ranks
from tests.ranks.strangers.job import (
    AGENT,
    JOIN_S,
    OPTIONS,
    SIGN_IN,
    WAIT_S,
    Job,
    meeting_of,
    put,
    run_of,
    store_of,
)
from tests.support.rows import also
from tests.support.waiting import until

pytestmark = pytest.mark.xdist_group("torch")


SHORT_S = 4.0
SHORT = (f"--join-timeout={SHORT_S:g}", "--timeout=40", "--select=ranks,launch_record")


@pytest.fixture
def ranks(job: Job) -> Ranks:
    return job.ranks


def sign_in_as_a_stranger(ranks: Ranks, message: bytes) -> int:
    """Seat in which a message lies as a sign-in of the run that rank 0 opens."""
    box = run_of(ranks)
    seat = box.add("seats", 1) - 1
    put(ranks, f"{box.prefix}seat/{seat}", message)
    return seat


def found(ranks: Ranks, ended: Ended) -> dict[str, dict[str, Any]]:
    """The findings of rank 0, by code; asserts that the verdict is unknown, and nothing failed."""
    assert "Traceback" not in ended.stderr
    assert ended.code == 3
    assert ended.seconds < JOIN_S
    report = ranks.report()
    assert report["verdict"] == "unknown"
    assert not [f for f in report["findings"] if f["severity"] == "fail"]
    return {finding["code"]: finding for finding in report["findings"]}


def sealed_elsewhere(value: Any) -> bytes:
    return wrap("seat", value)


@pytest.mark.parametrize(
    ("message", "code", "words", "hosts"),
    [
        (
            zlib.compress(json.dumps(SIGN_IN).encode()),
            "doctor-version-differs",
            "it is of an older version of nccl-doctor",
            ["nd9"],
        ),
        (
            b'nccl-doctor {"protocol": 9, "version": "7.1"}\n'
            + zlib.compress(json.dumps(SIGN_IN).encode()),
            "doctor-version-differs",
            "it is of nccl-doctor 7.1, here is",
            ["nd9"],
        ),
        (
            sealed_elsewhere({**SIGN_IN, "pid": "seven"}),
            "message-refused",
            "seat {seat}: sign-in.pid is a text, not a whole number",
            ["nd9"],
        ),
        (
            sealed_elsewhere(
                {**SIGN_IN, "launch": {**SIGN_IN["launch"], "local_world_size": 10**9}}
            ),
            "message-refused",
            "launch.local_world_size is 1000000000, outside",
            ["nd9"],
        ),
        (b"anything", "message-refused", "it is no message of nccl-doctor", []),
    ],
    ids=["older", "newer", "a wrong type", "a huge number", "rubbish"],
)
def test_a_sign_in_that_cannot_be_taken_names_its_sender(
    ranks: Ranks, message: bytes, code: str, words: str, hosts: list[str]
) -> None:
    ranks.start([0])
    seat = sign_in_as_a_stranger(ranks, message)
    findings = found(ranks, ranks.wait(WAIT_S)[0])
    assert words.format(seat=seat) in findings[code]["message"]
    assert findings[code]["where"]["hosts"] == hosts
    assert findings[code]["where"]["ranks"] == ([1] if hosts else [])
    assert findings["rank-absent"]["explained_by"] == code
    assert set(findings) == {code, "rank-absent"}


def test_a_number_of_participants_that_cannot_be_costs_no_memory(ranks: Ranks) -> None:
    ranks.start([0])
    run_of(ranks).add("seats", 10**12)
    findings = found(ranks, ranks.wait(WAIT_S)[0])
    words = "the number of participants in the store is 1000000000001, for 2 ranks"
    assert words in findings["message-refused"]["message"]
    assert not any(findings["message-refused"]["where"].values())
    assert set(findings) == {"message-refused", "rank-absent"}


def test_a_stranger_who_takes_the_name_of_a_rank_that_is_here_blames_it_for_nothing(
    ranks: Ranks,
) -> None:
    ranks.start([0])
    sign_in_as_a_stranger(ranks, sealed_elsewhere({**SIGN_IN, "facts": 7}))
    ranks.start([1])
    findings = found(ranks, ranks.wait(WAIT_S)[0])
    assert set(findings) == {"message-refused"}
    assert not findings["message-refused"]["where"]["ranks"]


def test_a_raised_counter_does_not_make_a_follower_of_rank_0(ranks: Ranks) -> None:
    store_of(ranks).add(f"{MEETING}coordinators", 1)
    ranks.start([0, 1])
    ended = ranks.wait(WAIT_S)
    assert [each.code for each in ended.values()] == [0, 0]
    assert ranks.report()["verdict"] == "pass"


def test_a_stranger_who_plays_rank_0_does_not_end_it_with_success(job: Job, tmp_path: Path) -> None:
    """Without a key, whoever reaches the port can be rank 0: its report says that there was one."""
    ranks = job.ranks
    meeting = meeting_of(ranks)
    meeting.add("coordinators", 1)
    ranks.start([0])
    question = meeting.get("doubt/0", WAIT_S)
    open_run(meeting, "nonce")
    stranger = run_of(ranks)
    meeting.put("sure/0", question)
    token = stranger.get("seat/0", WAIT_S)["token"]
    stranger.put("roster", encode(Roster({0: token}, "nonce", "gloo", next_s=9.0)))
    stranger.put("order/0", {"finish": 0})
    (ended,) = ranks.wait(WAIT_S).values()
    assert ended.code == 3
    assert "another process that says it is rank 0" in " ".join(ended.stderr.split())
    report = json.loads((tmp_path / "report.node0.json").read_text())
    assert (report["verdict"], report["exit_code"]) == ("unknown", 3)


def test_a_rank_whose_time_is_over_does_not_blame_rank_0(job: Job, tmp_path: Path) -> None:
    """Rank 0 may be there, and have more to do: it still has the time that it said."""
    limits = ["--timeout=10", "--join-timeout=5"]
    first = {**AGENT, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"}
    alone = Ranks(tmp_path, 2, OPTIONS, start=[], changes={1: first}, extra={1: limits})
    alone.port = job.ranks.port
    open_run(meeting_of(alone), "nonce")
    store = run_of(alone)
    alone.start([1])
    token = store.get("seat/0", WAIT_S)["token"]
    store.put("roster", encode(Roster({0: token}, "nonce", "gloo", next_s=60.0)))
    (ended,) = alone.wait(WAIT_S).values()
    assert ended.code == 3
    assert ended.seconds < JOIN_S
    report = json.loads((tmp_path / "report.node1.json").read_text())
    (lost,) = [found for found in report["findings"] if found["severity"] != "info"]
    assert (lost["code"], any(lost["where"].values())) == ("coordinator-lost", False)
    assert "the time of this run (--timeout) was over" in lost["message"]


def test_a_rank_that_is_refused_says_why(job: Job, tmp_path: Path) -> None:
    alone = Ranks(tmp_path, 2, OPTIONS, start=[], changes={1: AGENT})
    alone.port = job.ranks.port
    open_run(meeting_of(alone), "nonce")
    store = run_of(alone)
    alone.start([1])
    store.get("seat/0", WAIT_S)
    why = {0: Reason("message-refused", "seat 0: sign-in.pid is not an integer")}
    told = Roster({}, "nonce", "gloo", next_s=9.0, refused=why)
    store.put("roster", encode(told))
    store.put("late/0", True)  # nobody opens another run
    (ended,) = alone.wait(WAIT_S).values()
    assert ended.code == 3
    said = " ".join(ended.stderr.split())
    assert "rank 0 did not take this sign-in: seat 0: sign-in.pid is not an integer" in said


def test_a_second_rank_0_follows_the_first(job: Job, tmp_path: Path) -> None:
    ranks, again = job.ranks, tmp_path / "again"
    again.mkdir()
    ranks.start([0])
    store = run_of(ranks)
    second = Ranks(again, 2, OPTIONS, start=[], changes={0: AGENT})
    second.port = ranks.port
    second.start([0])
    store.get("seat/1", WAIT_S)
    ranks.start([1])
    ended = {**ranks.wait(WAIT_S), 2: second.wait(WAIT_S)[0]}
    codes = {found["code"] for found in ranks.report()["root_causes"]}
    assert codes == {"rank-duplicate"}
    assert [each.code for each in ended.values()] == [1, 1, 1]


def test_of_two_ranks_0_that_doubt_at_the_same_time_one_coordinates(
    job: Job, tmp_path: Path
) -> None:
    """Each finds the counter raised and asks: nobody is there yet to answer."""
    ranks, again = job.ranks, tmp_path / "again"
    again.mkdir()
    store_of(ranks).add(f"{MEETING}coordinators", 1)
    second = Ranks(again, 2, OPTIONS, start=[], changes={0: AGENT})
    second.port = ranks.port
    ranks.start([0])
    second.start([0])
    ranks.start([1])
    ended = {**ranks.wait(WAIT_S), 2: second.wait(WAIT_S)[0]}
    path = next(each.report_path for each in (ranks, second) if each.report_path.exists())
    report = json.loads(path.read_text())
    assert {found["code"] for found in report["root_causes"]} == {"rank-duplicate"}
    assert [each.code for each in ended.values()] == [1, 1, 1]
    assert max(each.seconds for each in ended.values()) < JOIN_S


# -- with a key ------------------------------------------------------------------------------------


def test_ranks_of_one_key_meet(job: Job) -> None:
    ranks = job.of("secret", "secret")
    ranks.start([0, 1])
    ended = ranks.wait(WAIT_S)
    assert [each.code for each in ended.values()] == [0, 0]
    assert ranks.report()["verdict"] == "pass"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("secret", "other"), "it was written with another key"),
        (("secret", ""), "it was written without the key of this run"),
        (("", "secret"), "it was written with a key; here is none"),
    ],
)
def test_another_key_is_told_on_both_sides(job: Job, names: tuple[str, ...], words: str) -> None:
    """With a key, what is not sealed shortens no wait; without one, nobody waits for whom it has
    refused.
    """
    ranks = job.of(*names, options=SHORT)
    ranks.start([0, 1])
    ended = ranks.wait(WAIT_S)
    findings = found(ranks, ended[0])
    assert words in findings["key-differs"]["message"]
    assert findings["key-differs"]["where"]["ranks"] == [1]
    assert set(findings) == {"key-differs", "rank-absent"}
    assert ended[0].seconds > SHORT_S or not names[0]
    assert ended[1].code == 3
    assert "does not have the key of this run" in " ".join(ended[1].stderr.split())


def test_a_refused_rank_that_is_slow_is_told_too(job: Job) -> None:
    """Rank 0 clears the store when it leaves: the other has read before that it is refused."""
    ranks = job.of("secret", "", options=SHORT)
    ranks.start([0, 1])
    store = run_of(ranks, Seal(b"secret" * 8)).public()
    until(lambda: store.wait(["seat/0"], WAIT_S))
    frozen = []
    with suppress(psutil.NoSuchProcess):
        slow = psutil.Process(ranks.processes[1].pid)
        frozen = [slow, *slow.children(recursive=True)]
    for each in frozen:
        with suppress(psutil.NoSuchProcess):  # it has left already
            each.suspend()
    until(ranks.report_path.exists)
    ranks.processes[0].wait(WAIT_S)
    for each in frozen:
        with suppress(psutil.NoSuchProcess):
            each.resume()
    ended = ranks.wait(WAIT_S)
    assert set(found(ranks, ended[0])) == {"key-differs", "rank-absent"}
    assert ended[1].code == 3
    assert "does not have the key of this run" in " ".join(ended[1].stderr.split())


def test_a_raised_counter_and_an_answer_of_an_earlier_run_change_nothing(job: Job) -> None:
    ranks = job.of("secret", "secret")
    seal = Seal(b"secret" * 8)
    old = {"token": "of an earlier run", "address": f"127.0.0.1:{ranks.port}"}
    box = meeting_of(ranks, seal)
    box.put("sure/0", old)
    open_run(box, "earlier")
    store_of(ranks).add(f"{MEETING}coordinators", 1)
    ranks.start([0])
    until(lambda: opened(box, WAIT_S) != "earlier")
    ranks.start([1])
    ended = ranks.wait(WAIT_S)
    assert [each.code for each in ended.values()] == [0, 0]
    assert ranks.report()["verdict"] == "pass"


@pytest.mark.parametrize("secret", [None, also(b"guessed" * 4)])
def test_a_forged_order_ends_nobody_who_has_a_key(job: Job, secret: bytes | None) -> None:
    ranks = job.of("", "secret", options=SHORT)

    forger = meeting_of(ranks, Seal(secret))
    open_run(forger, "mine")
    forger.beside(prefix_of("mine"), Seal(secret, "mine")).put("order/0", {"finish": 0})
    ranks.start([1])
    (ended,) = ranks.wait(WAIT_S).values()
    assert ended.code == 3
    assert SHORT_S < ended.seconds < JOIN_S
    assert "does not have the key of this run" in " ".join(ended.stderr.split())
