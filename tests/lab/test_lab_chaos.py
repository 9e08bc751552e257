"""Forty runs of `make chaos` at level quick, with at most four ranks: whatever strikes, no promise
breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lab.chaos import SEED, Plan, plan
from tests.lab.chaos.runs import run
from tests.lab.lab import Lab

RUNS = range(40)
AT_ONCE, WAITING_AT_ONCE = 5, 8
PATIENCE = 2.0
"""Factor of the time-outs: other tests run beside this one."""
_WAITS = {"kill", "stop", "cable", "drop", "reject", "path"}
"""After these a run may wait for somebody who will not come, and needs no core meanwhile."""


def _side_by_side() -> Iterator[list[int]]:
    """Numbers of runs that go together; those that wait for the same time wait together."""
    for waits, most in ((True, WAITING_AT_ONCE), (False, AT_ONCE)):
        numbers = [n for n in RUNS if (plan(SEED, n).strike in _WAITS) == waits]
        for first in range(0, len(numbers), most):
            yield numbers[first : first + most]


def _small(each: Plan) -> Plan:
    return replace(each, nproc=1) if each.hosts > 2 else each


@pytest.mark.parametrize("numbers", list(_side_by_side()), ids=lambda n: "-".join(map(str, n)))
def test_a_run_that_is_struck(
    make_lab: Callable[..., Lab], tmp_path: Path, numbers: list[int]
) -> None:
    with ThreadPoolExecutor(len(numbers)) as pool:
        plans = [_small(plan(SEED, number)) for number in numbers]
        records = list(pool.map(lambda each: run(each, tmp_path, PATIENCE, short=True), plans))
    # Once more, by itself: the moment of a strike is not the same twice, and a busy machine makes
    # healthy hosts late. `make chaos` counts every run.
    again = [run(r.plan, tmp_path, PATIENCE, short=True) for r in records if r.judgement.failed]
    failed = [record for record in again if record.judgement.failed]
    texts = [path.read_text() for path in sorted(tmp_path.glob("run-*.txt"))]
    assert not failed, "\n".join([*(f"{each.plan}: {each.judgement}" for each in failed), *texts])
