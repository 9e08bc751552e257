"""A rank that dies or freezes in the middle of a collective is named; its victims are not."""

from __future__ import annotations

import signal

import pytest

from tests.lab.lab import Lab
from tests.lab.reading import ROUND_S, SIGN_IN_S, check_cause, check_clean


@pytest.mark.wide
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, "rank-crashed"), (signal.SIGSTOP, "rank-frozen")],
    ids=["killed", "stopped"],
)
def test_a_rank_is_lost_during_a_collective(lab: Lab, number: int, code: str) -> None:
    with lab.strike(1, number) as strike:
        run = lab.plain_doctor()
    assert strike.pid, f"no collective was seen\n{run}"
    check_clean(run, SIGN_IN_S + 2 * ROUND_S)
    check_cause(run, run.report, code, hosts=["nd1"], ranks=[1])
    assert run.codes == [1, 1], str(run)
