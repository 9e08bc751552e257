"""Faults of the roster: who is missing, who is there twice, who tells another story."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.lab import Lab
from tests.lab.reading import SIGN_IN_S, check_cause, check_clean


@pytest.mark.wide
def test_a_host_is_absent(lab: Lab) -> None:
    run = lab.plain_doctor(nproc=2, hosts=["nd0"])
    check_clean(run, SIGN_IN_S)
    check_cause(run, run.report, "host-absent", nodes=[1], ranks=[2, 3])
    assert run.codes == [1, 1], str(run)


@pytest.mark.wide
def test_two_hosts_claim_one_node_rank(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    run = lab.plain_doctor(per_host={"nd2": {"RANK": "1", "NODE_RANK": "1"}})
    check_clean(run, SIGN_IN_S)
    check_cause(run, run.report, "node-rank-duplicate", hosts=["nd1", "nd2"], nodes=[1], ranks=[1])
    assert run.codes == [1, 1, 1], str(run)


def test_one_of_three_hosts_counts_differently(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    run = lab.plain_doctor(per_host={"nd2": {"WORLD_SIZE": "4", "NNODES": "4"}})
    check_clean(run, SIGN_IN_S)
    check_cause(run, run.report, {"nnodes-differs", "world-size-differs"}, hosts=["nd2"])
    assert run.codes == [1, 1, 1], str(run)


def test_two_hosts_count_differently_and_nobody_knows_who_is_right(lab: Lab) -> None:
    run = lab.plain_doctor(per_host={"nd1": {"WORLD_SIZE": "3", "NNODES": "3"}})
    check_clean(run, SIGN_IN_S)
    check_cause(run, run.report, {"nnodes-differs", "world-size-differs"}, hosts=["nd0", "nd1"])
    assert run.codes == [1, 1], str(run)
