"""`nccl_doctor.check()`, called inside the ranks of a job and in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nccl_doctor
from tests.ranks.ranks import free_port, rank_env

pytestmark = pytest.mark.xdist_group("torch")

LIMIT_S = 100.0
"""The job's own limit for check(), 60 s, and the imports of torch on a busy machine."""


def job(**changes: str) -> list[list[str]]:
    """What the two ranks of the job print; `changes` of their variables."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.checked_job"],
            env=rank_env(rank, 2, port, **changes),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return [rank.communicate(timeout=LIMIT_S)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def test_ranks_examine_the_cluster_and_then_form_their_group() -> None:
    assert job() == [["pass 0 ", "2.0"], ["pass 0 ", "2.0"]]


def test_both_ranks_know_that_it_failed_and_rank_0_knows_why() -> None:
    first, second = job(GLOO_SOCKET_IFNAME="nosuch0")
    assert first == ["fail 1 interface-missing"]
    assert second == ["fail 1 "]


def test_a_report_as_a_notebook_shows_it() -> None:
    report = nccl_doctor.check("quick", nproc_per_node=1, select=["kernel_limits"])
    assert (report.verdict, report.causes) == ("pass", ())
    assert str(report).startswith("nccl-doctor: PASS: 1 check passed")
    assert report._repr_html_().startswith("<!")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"frobnicate": True}, TypeError, r"unexpected keyword argument 'frobnicate'"),
        ({"json": "report.json"}, TypeError, r"unexpected keyword argument 'json'"),
        ({"nnodes": "x"}, ValueError, r"'--nnodes': 'x' is not a whole number"),
        ({"level": "deep"}, ValueError, r"'deep' is not one of 'quick', 'standard', 'full'"),
        ({"select": ["rank"]}, ValueError, r'named "rank"; did you mean "ranks"'),
    ],
)
def test_what_is_wrong_with_the_call_is_said(
    options: dict[str, object],
    error: type[Exception],
    words: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(error, match=words):
        nccl_doctor.check(**options)  # type: ignore[arg-type]
    assert capfd.readouterr() == ("", "")
