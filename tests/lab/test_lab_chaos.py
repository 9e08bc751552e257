"""The first forty runs of `make chaos`: whatever strikes them, no promise is broken."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.lab.chaos import SEED, plan
from tests.lab.chaos.runs import run
from tests.lab.lab import Lab

RUNS = 40
AT_ONCE = 5
"""Most of them wait for somebody who will not come, and need no core meanwhile."""
PATIENCE = 2.0
"""Factor of all time-outs: other tests run beside this one."""


@pytest.mark.parametrize("first", range(0, RUNS, AT_ONCE))
def test_a_run_that_is_struck(make_lab: Callable[..., Lab], tmp_path: Path, first: int) -> None:
    plans = [plan(SEED, number) for number in range(first, first + AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        records = list(pool.map(lambda each: run(each, tmp_path, PATIENCE), plans))
    # Once more, by itself: the moment of a strike is not the same twice, and a busy machine makes
    # healthy hosts late. `make chaos` counts every run.
    again = [run(r.plan, tmp_path, PATIENCE) for r in records if r.judgement.failed]
    failed = [record for record in again if record.judgement.failed]
    texts = [path.read_text() for path in sorted(tmp_path.glob("run-*.txt"))]
    assert not failed, "\n".join([*(f"{each.plan}: {each.judgement}" for each in failed), *texts])
