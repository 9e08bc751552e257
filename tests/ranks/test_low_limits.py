"""Little allowed (processes, files, CPU time, netlink): that is named, nobody else is blamed."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import CLEAN
from tests.ranks.ranks import MAIN, Ended, Ranks
from tests.support.forkserver import Forked
from tests.support.limited import (
    HAS_NETLINK_FILTER,
    NO_NETLINK,
    few_files,
    few_processes,
    group,
    little_cpu_time,
    tasks_of,
)
from tests.support.reports import validate

TIMEOUT_S = 60.0
LATE_S = 3.0
OPTIONS = ("--timeout=60", "--join-timeout=15", "--collective-timeout=5")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def user() -> Iterator[int]:
    """A user of whom there is no process, before and after."""
    number = 1_000_000 + secrets.randbelow(1_000_000_000)
    yield number
    assert tasks_of(number) == []


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in which every user may write: pytest's own folders are closed to others."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o777)
        yield Path(made)


def own(folder: Path, before: str, *more: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, stderr and report of a run of one host without a launcher."""
    out, err = folder / "out", folder / "err"
    arguments = ["run", "--backend=gloo", "--json", str(folder / "report.json"), *OPTIONS]
    arguments += more
    env = {**CLEAN, "CUDA_VISIBLE_DEVICES": ""}
    code = f"{before}\n{MAIN}"
    process = Forked(arguments, env, folder=folder, out=out, err=err, code=code)
    try:
        ended = process.wait(TIMEOUT_S + LATE_S)
    finally:
        process.kill()
    report = json.loads((folder / "report.json").read_text())
    validate(report)
    assert "Traceback" not in err.read_text()
    return ended, err.read_text(), report


def causes(report: dict[str, Any]) -> list[tuple[str, list[int]]]:
    return [(found["code"], found["where"]["ranks"]) for found in report["root_causes"]]


@as_root
@pytest.mark.parametrize("number", [1, 4, 12])
def test_few_processes(folder: Path, user: int, number: int) -> None:
    code, _, report = own(folder, few_processes(number, user))
    assert causes(report)[0] == ("process-limit-low", [])
    assert {cause for cause, _ in causes(report)} <= {"process-limit-low", "run-interrupted"}
    found = report["root_causes"][0]
    assert f"RLIMIT_NPROC is {number}," in found["message"]
    assert found["where"]["hosts"] == [socket.gethostname()]
    assert (code, report["verdict"]) == (1, "fail")


def test_few_files_that_are_enough_for_the_job_are_enough_for_us(folder: Path) -> None:
    """With 24, a job of two ranks of gloo starts: no rank is to be blamed for what stopped us."""
    code, _, report = own(folder, few_files(24))
    assert causes(report) == [("open-files-limit-low", [])]
    assert (code, report["verdict"]) == (0, "warn")


def test_too_few_files_for_the_job(folder: Path) -> None:
    code, _, report = own(folder, few_files(16))
    assert causes(report) == [("open-files-limit-low", [])]
    assert "2 ranks need 21" in report["root_causes"][0]["message"]
    assert (code, report["verdict"]) == (1, "fail")


def one_of_two(folder: Path, rank: int, before: str) -> tuple[dict[int, Ended], dict[str, Any]]:
    ranks = Ranks(folder, 2, OPTIONS, before={rank: before})
    ended = ranks.wait(TIMEOUT_S + LATE_S)
    assert not any("Traceback" in each.stderr for each in ended.values())
    return ended, ranks.report()


@as_root
def test_few_processes_of_one_rank(folder: Path, user: int) -> None:
    ended, report = one_of_two(folder, 1, few_processes(5, user))
    for found in report["root_causes"]:
        assert found["where"]["ranks"] == [1]
    assert "limit of threads" in json.dumps(report["root_causes"])
    assert "ulimit -u" in json.dumps(report["root_causes"])
    assert ended[0].code == 1


@as_root
def test_few_processes_of_rank_0(folder: Path, user: int) -> None:
    ended, report = one_of_two(folder, 0, few_processes(5, user))
    assert causes(report)[0] == ("process-limit-low", [])
    assert {cause for cause, _ in causes(report)} <= {"process-limit-low", "run-interrupted"}
    assert ended[0].code == 1
    assert ended[1].code == 3


def test_hardly_a_file_of_one_rank(folder: Path) -> None:
    """It can sign in, and start nothing: what needs it is unknown, with the reason."""
    ended, report = one_of_two(folder, 1, few_files(9))
    assert [found for found in report["findings"] if found["severity"] == "fail"] == []
    assert {rank for _, ranks in causes(report) for rank in ranks} <= {1}
    unknown = [each["reason"] for each in report["checks"] if each["status"] == "unknown"]
    assert all("RLIMIT_NOFILE is 9 (rank 1)" in reason for reason in unknown)
    assert (report["verdict"], ended[0].code, ended[1].code) == ("unknown", 3, 3)


# CPU time -----------------------------------------------------------------------------------------


@pytest.fixture
def slow() -> Iterator[Path]:
    """A control group with a tenth of a CPU."""
    try:
        with little_cpu_time(10) as made:
            yield made
    except OSError as error:
        pytest.skip(f"nobody can limit CPU time here: {error}")


def test_ranks_that_stand_still_most_of_the_time(folder: Path, slow: Path) -> None:
    select = ("--select", "cpus,memory,ranks,collectives,groups,throttling")
    code, _, report = own(folder, group(slow), *select)
    assert causes(report) == [("cpu-throttled", [])]
    (found,) = report["root_causes"]
    assert found["where"]["hosts"] == [socket.gethostname()]
    assert found["message"].startswith("limit of 0.1 CPUs: its CPU time was used up in ")
    assert str(slow) in found["fix"]
    assert (code, report["verdict"]) == (0, "warn")
    (first, *_) = report["hosts"]
    seen = {**first["facts"], **report["ranks"][0]["facts"]}
    times = [seen["throttling"][name]["facts"]["at_s"] for name in ("before", "late")]
    took = max(each["duration_s"] for each in seen["collectives"].values())
    assert times[1] - times[0] > took  # the collectives were in between


# Calls --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_NETLINK_FILTER, reason="the filter has not this machine's numbers")
def test_without_netlink_no_group_can_be_formed(folder: Path) -> None:
    select = ("--select", "kernel_access,interfaces,ranks,collectives")
    code, _, report = own(folder, NO_NETLINK, *select)
    assert causes(report) == [("netlink-refused", [])]
    (found,) = report["root_causes"]
    assert found["where"]["hosts"] == [socket.gethostname()]
    assert found["message"].startswith("getifaddrs: EACCES (netlink EACCES, ")
    assert "guards: seccomp, no_new_privs" in found["message"]
    assert "seccomp" in found["fix"]
    (failed,) = [each for each in report["findings"] if each["code"] == "group-init-failed"]
    assert failed["explained_by"] == "netlink-refused"
    assert "Permission denied" in failed["message"]
    assert (code, report["verdict"]) == (1, "fail")
