"""A slice of the corpus: faults of every layer, alone and in pairs, and odd but healthy clusters.

`make accuracy` runs all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nccl_doctor.gather.ends import QUIET_S
from nccl_doctor.observe.child import BUSY_HOST
from tests.lab.corpus import Case, load
from tests.lab.corpus.runs import run
from tests.lab.lab import Lab
from tests.lab.reading import SETTLE_S, START_S

JOIN_S = 8.0
PATIENCE_S = 30.0
"""Where nobody is waited for in vain: time to start on a machine that is busy."""
MATRIX_S = 12.0
"""Calls between hosts, where one in each batch fails twice, and the rules of both ends."""


def chosen(cases: tuple[Case, ...]) -> list[Case]:
    return [case for case in cases if case.slice]


@pytest.mark.parametrize("case", chosen(load().faults), ids=lambda case: str(case.id))
def test_cause_and_place(make_lab: Callable[..., Lab], case: Case) -> None:
    join_s = JOIN_S if case.waits else PATIENCE_S
    result = run(case, join_s)
    if not result.score.is_right_everywhere and BUSY_HOST in result.text:
        # A host that had no processor came after the others were counted: wait longer for it.
        join_s *= 2
        result = run(case, join_s)
    assert result.score.is_right_everywhere, f"{result.score}\n{result.text}"
    assert None not in result.codes, result.text
    assert set(result.codes) == {1}, result.text
    assert result.leftovers == (), result.text
    most = join_s + SETTLE_S if case.waits else MATRIX_S
    assert result.seconds < START_S + most, result.text


@pytest.mark.parametrize("case", chosen(load().healthy), ids=lambda case: str(case.id))
def test_nothing_above_info(make_lab: Callable[..., Lab], case: Case) -> None:
    result = run(case, PATIENCE_S)
    assert result.score.is_right_everywhere, f"{result.score}\n{result.text}"
    assert set(result.codes) == {0}, result.text
    assert result.leftovers == (), result.text


def test_where_a_group_hangs_hosts_call_each_other_at_once(make_lab: Callable[..., Lab]) -> None:
    """A firewall that comes up during the run is found before more rounds hang behind it."""
    (case,) = (case for case in load().faults if case.id == "firewall-in-collectives")
    result = run(case, PATIENCE_S)
    assert result.score.is_right, f"{result.score}\n{result.text}"
    assert result.answer is not None
    for rank in result.answer["ranks"]:
        ends = {name: end["status"] for name, end in rank["facts"]["collectives"].items()}
        assert [name for name, end in ends.items() if end == "hung"] == ["world"], result.text


def test_a_host_that_stops_is_not_waited_for_to_the_deadline(make_lab: Callable[..., Lab]) -> None:
    """The round in which hosts call each other may take 48 s."""
    (case,) = (case for case in load().faults if case.id == "hangs-in-firewall")
    result = run(replace(case, options=("--timeout", "100")), PATIENCE_S)
    assert result.score.is_right, f"{result.score}\n{result.text}"
    assert result.seconds < START_S + QUIET_S + SETTLE_S, result.text
    assert result.answer is not None
    assert "nothing came from its host for 10 s" in str(result.answer["hosts"]), result.text
