"""Answers of NCCL's RAS service: ranks that are behind, processes that are gone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.autopsy.examine import examine
from nccl_doctor.autopsy.inputs import Content, content_of
from nccl_doctor.autopsy.ras import findings_of_ras, read_ras
from nccl_doctor.model.findings import Confidence, Finding

HEAD = """\
NCCL version 2.24.3 compiled with CUDA 12.6
CUDA runtime version 12060, driver version 12060

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          4            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         4         8         8   RUNNING  MISMATCH
    1         4         2         1         2         8   RUNNING      OK

"""
LATE = """\
Errors
======

Warnings
========

#0-0 (b6db6a1ec5e4b5c8) MISMATCH
  Communicator ranks have different {what} operation counts
  7 ranks have launched up to operation {usual}
  Rank 5 has launched up to operation {late} -- GPU 1 managed by process 4715 on node 10.0.0.2

"""
DEAD = """\
Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 4715 on node 10.0.0.2 managing GPU 1

#0-0 (b6db6a1ec5e4b5c8) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 5

Warnings
========

"""


def text(part: str = LATE, late: int = 6650, what: str = "AllReduce") -> str:
    return HEAD + part.format(late=late, usual=6651, what=what)


def status(*communicators: dict[str, Any]) -> str:
    """An answer of NCCL 2.28.7 and later, in its order of keys."""
    every = {"nccl_version": "2.30.7", "communicators_count": len(communicators)}
    return json.dumps({**every, "communicators": [*communicators]}, indent=2)


def communicator(counts: list[int], missing: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    """One of ranks 0, 1, … with this number of all-reduces each; `missing`: ranks that are dead."""
    ranks = [
        {
            "rank": rank,
            "host": f"10.0.0.{1 + rank // 4}",
            "pid": 4710 + rank,
            "status": {"init_state": 0, "abort_flag": False},
            "collective_counts": {"AllReduce": count, "Broadcast": 1},
        }
        for rank, count in enumerate(counts)
        if rank not in missing
    ]
    gone = [
        {
            "rank": rank,
            "host": "10.0.0.2",
            "pid": 4710 + rank,
            "status": {"unresponsive": True, "considered_dead": True},
        }
        for rank in missing
    ]
    size = len(counts)
    return {"hash": "0xb6", "size": size, "ranks": ranks, "missing_ranks": gone, **more}


def found(*answers: str) -> Finding:
    read = [read_ras(answer.encode(), f"ras{i}.txt") for i, answer in enumerate(answers)]
    (cause,) = findings_of_ras(read)
    return cause


def test_content_tells_what_it_is() -> None:
    assert content_of(text().encode()) is Content.RAS
    assert content_of(status().encode()) is Content.RAS
    assert content_of(b"NCCL version 2.21.5+cuda12.4\nJob summary of step 3\n") is Content.CONSOLE


@pytest.mark.parametrize("what", ["AllReduce", "collective"])
def test_the_rank_that_has_launched_less_is_waited_for(what: str) -> None:
    cause = found(text(what=what))
    assert (cause.code, cause.where.hosts) == ("collective-missing", ("10.0.0.2",))
    assert (cause.where.ranks, cause.confidence) == ((5,), Confidence.POSSIBLE)
    assert f"has launched 6650 {what}, most have launched 6651" in cause.message
    assert "ask it twice" in cause.message
    again = found(text(what=what), text(what=what))
    assert (again.where.ranks, again.confidence) == ((5,), Confidence.LIKELY)
    moved = found(text(what=what, late=6648), text(what=what))
    assert moved.confidence is Confidence.POSSIBLE


def test_ranks_that_have_launched_nothing_and_are_listed_below_their_number() -> None:
    lines = "  2 ranks have not launched any operations\n"
    lines += "".join(
        f"  Rank {rank} -- GPU {rank} managed by process 471{rank} on node 10.0.0.1\n"
        for rank in (1, 3)
    )
    part = LATE.replace(LATE.splitlines(keepends=True)[9], lines).replace("7 ranks", "6 ranks")
    cause = found(text(part))
    assert (cause.where.ranks, cause.where.hosts) == ((1, 3), ("10.0.0.1",))
    assert "launched 0 AllReduce" in cause.message


def test_a_rank_of_a_smaller_communicator_is_named_by_its_rank_in_the_world() -> None:
    small = communicator([7, 6, 7])
    for rank, number in enumerate((2, 5, 7)):
        small["ranks"][rank].update(pid=4710 + number, host=f"10.0.0.{1 + number // 4}")
    cause = found(status(communicator([9] * 8), small))
    assert (cause.where.ranks, cause.where.hosts) == ((5,), ("10.0.0.2",))
    assert cause.message.startswith("rank 1 of communicator 0xb6 (3 ranks)")
    alone = found(text().replace("#0-0", "#1-0"))  # of two ranks; the text tells no more
    assert (alone.where.ranks, alone.where.hosts) == ((), ("10.0.0.2",))


def test_half_of_the_ranks_are_not_behind_the_other_half() -> None:
    for counts in ([7, 6], [7, 7, 6, 6], [7, 7, 7, 7]):
        assert findings_of_ras([read_ras(status(communicator(counts)).encode(), "x")]) == []
    assert found(status(communicator([7, 6, 7]))).where.ranks == (1,)


def test_a_dead_process_outranks_ranks_that_are_behind() -> None:
    both = status(communicator([7, 7, 6, 7, 7, 7, 7, 7], missing=(5,)))
    world = HEAD + DEAD.replace("  The missing rank: 5\n", MISSING)
    for cause in (found(both), found(world)):
        assert (cause.code, cause.confidence) == ("rank-silent", Confidence.LIKELY)
        assert cause.where.hosts == ("10.0.0.2",)
        assert cause.message.startswith("process 4715 is dead for RAS")
    assert found(world).where.ranks == (5,)
    older = found(HEAD + DEAD)  # 2.24.3 tells the rank, and not that it is of this process
    assert (older.where.ranks, older.where.hosts) == ((), ("10.0.0.2",))


MISSING = "  Rank 5 -- GPU 1 managed by process 4715 on node 10.0.0.2\n"


@pytest.mark.parametrize(
    "data",
    [
        '{"nccl_version": "2.30.7", "communicators_count": 1, "communicators": [{',
        '{"nccl_version": "2.30.7", "communicators": ' + "[" * 5000,
    ],
)
def test_json_that_is_cut_off_is_said(data: str) -> None:
    with pytest.raises(ValueError, match=r"ras\.json: the JSON of this answer .* damaged"):
        read_ras(data.encode(), "ras.json")


@pytest.mark.parametrize(
    "each",
    [
        1,
        {},
        {"size": "8", "ranks": 3, "missing_ranks": [{}, {"rank": 1}]},
        {"ranks": [{"rank": -1}, {"rank": 1 << 40}, {"rank": 0, "collective_counts": {"A": "x"}}]},
        {"ranks": [{"rank": 1, "host": 7, "pid": "x", "collective_counts": 3}]},
    ],
)
def test_json_of_another_form_blames_nobody(each: Any) -> None:
    assert findings_of_ras([read_ras(status(each).encode(), "x")]) == []


def test_the_report_has_its_ranks_and_hosts(tmp_path: Path) -> None:
    (tmp_path / "ras.json").write_text(status(communicator([9] * 5 + [8] + [9] * 2)))
    report = examine([str(tmp_path)], io.BytesIO(), started="2026-11-27T10:00:00+00:00")
    assert (report.verdict, report.exit_code) == ("fail", 1)
    assert [finding.where.ranks for finding in report.root_causes] == [(5,)]
    assert [host.name for host in report.cluster.hosts] == ["10.0.0.1", "10.0.0.2"]
    assert report.cluster.world_size == 8
