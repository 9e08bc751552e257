"""What became of each check, on made-up clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor.api import Finding, Layer, Outcome, OutcomeStatus, Round, Scope, Where
from nccl_doctor.judge.status import check_results
from nccl_doctor.model.findings import Status
from tests.support.clusters import make_cluster
from tests.support.reports import made_check
from tests.support.verdicts import HOST, OK, PORT, RANKS, RISK, at


def result_of(check, cluster, findings=(), **more):
    (result,) = check_results(cluster, [check], list(findings), **more)
    return result


def test_pass_needs_everybody():
    check = made_check("shm")
    cluster = make_cluster(check="shm", by_host={"nd0": OK, "nd1": OK})
    result = result_of(check, cluster)
    assert (result.status, result.tested, result.reason) == (Status.PASS, ("nd0", "nd1"), "")
    cluster = make_cluster(check="shm", by_host={"nd0": OK})
    result = result_of(check, cluster)
    assert (result.status, result.tested) == (Status.UNKNOWN, ("nd0",))
    assert result.reason == "no outcome (nd1)"


@pytest.mark.parametrize("status", ["raised", "hung", "died", "silent", "untested"])
def test_what_was_not_observed_is_unknown(status):
    bad = Outcome(
        OutcomeStatus(status), reason="because", breadcrumbs=({"step": "barrier", "at_s": 1.0},)
    )
    check = made_check("gpu", scope=Scope.RANK)
    cluster = make_cluster(check="gpu", by_rank={0: OK, 1: OK, 2: bad, 3: bad})
    result = result_of(check, cluster)
    assert result.status is Status.UNKNOWN
    assert result.tested == ("0", "1")
    assert "ranks 2–3" in result.reason
    assert "because" in result.reason
    assert ("barrier" in result.reason) == (status in ("hung", "died"))


def test_what_was_observed_in_part_is_unknown():
    part = Outcome(OutcomeStatus.OK, facts=OK, reason="one of two could not be read")
    cluster = make_cluster(check="shm", by_host={"nd0": OK, "nd1": part})
    result = result_of(made_check("shm"), cluster)
    assert (result.status, result.tested) == (Status.UNKNOWN, ("nd0", "nd1"))
    assert result.reason == "could not be tested: one of two could not be read (nd1)"


def test_what_a_lower_failure_covers_is_blocked_by_it():
    check = made_check("gpu", Layer.DEVICE, Scope.RANK)
    hung = Outcome(OutcomeStatus.HUNG)
    cluster = make_cluster(check="gpu", by_rank={0: OK, 1: OK, 2: hung, 3: hung})
    result = result_of(check, cluster, [Finding(HOST, "", at("nd1"))])
    assert (result.status, result.reason) == (Status.BLOCKED, "blocked by low-host")
    result = result_of(check, cluster, [Finding(HOST, "", at("nd0"))])
    assert result.status is Status.UNKNOWN
    result = result_of(check, cluster, [Finding(RISK, "", at("nd1"))])
    assert result.status is Status.UNKNOWN


def test_an_absent_host_blocks_what_should_have_run_there():
    check = made_check("shm")
    cluster = make_cluster(check="shm", by_host={"nd0": OK}, absent_nodes=[1])
    assert result_of(check, cluster).reason == "never signed in (node 1)"
    gone = Finding(RANKS, "", Where(nodes=(1,)))
    result = result_of(check, cluster, [gone])
    assert (result.status, result.reason) == (Status.BLOCKED, "blocked by host-gone")
    assert result.tested == ("nd0",)


def test_a_group_is_blocked_by_one_bad_member():
    check = made_check(
        "coll", Layer.COLLECTIVE, Scope.RANK, rounds=[Round("all", ((0, 1, 2, 3),), 5.0)]
    )
    hung = Outcome(OutcomeStatus.HUNG)
    cluster = make_cluster(check="coll", by_rank=dict.fromkeys(range(4), hung), round_name="all")
    result = result_of(check, cluster, [Finding(HOST, "", at("nd1", ranks=(3,)))])
    assert (result.status, result.reason) == (Status.BLOCKED, "blocked by low-host")


def test_a_round_that_was_never_held_is_unknown():
    check = made_check("coll", Layer.COLLECTIVE, Scope.RANK, rounds=[Round("all", ((0, 1),), 5.0)])
    cluster = make_cluster(check="coll", by_rank={0: OK, 1: OK}, round_name="first")
    result = result_of(check, cluster)
    assert (result.status, result.reason) == (Status.UNKNOWN, "no outcome of all (ranks 0–1)")


def test_together_with_nobody_is_skipped_but_not_where_somebody_is_absent():
    check = made_check("wall", rounds=[])
    assert result_of(check, make_cluster(("nd0",))).status is Status.SKIPPED
    assert result_of(check, make_cluster(absent_nodes=[1])).status is Status.UNKNOWN


def test_a_plan_that_breaks_is_unknown():
    check = made_check("coll", rounds=[])
    type(check).plan = lambda self, cluster: 1 / 0
    result = result_of(check, make_cluster())
    assert result.status is Status.UNKNOWN
    assert "plan raised ZeroDivisionError" in result.reason


def test_skipped_only_where_all_is_skipped():
    skip = Outcome(OutcomeStatus.SKIPPED, reason="no GPU")
    check = made_check("gpu")
    result = result_of(check, make_cluster(check="gpu", by_host={"nd0": skip, "nd1": skip}))
    assert (result.status, result.reason) == (Status.SKIPPED, "no GPU")
    result = result_of(check, make_cluster(check="gpu", by_host={"nd0": skip, "nd1": OK}))
    assert (result.status, result.tested) == (Status.PASS, ("nd1",))


def test_what_the_engine_did_not_run():
    check = made_check("shm")
    assert result_of(check, make_cluster(), skipped={"shm": "needs --level full"}) == replace(
        result_of(check, make_cluster()), status=Status.SKIPPED, reason="needs --level full"
    )


def test_a_group_held_back_by_the_engine_is_blocked_by_what_it_names():
    held = Outcome(OutcomeStatus.UNTESTED, reason="blocked by mid-port")
    check = made_check("coll", Layer.COLLECTIVE, Scope.RANK, rounds=[Round("a", ((0, 1),), 5)])
    cluster = make_cluster(check="coll", by_rank={0: held, 1: held}, round_name="a")
    result = result_of(check, cluster, [Finding(PORT, "", at(links=(("x", "y"),)))])
    assert (result.status, result.reason) == (Status.BLOCKED, "blocked by mid-port")
    assert result_of(check, cluster).status is Status.UNKNOWN


def test_unknown_outweighs_a_warning_and_a_failure_outweighs_both():
    cluster = make_cluster(check="shm", by_host={"nd0": OK})
    warn = Finding(RISK, "", at("nd0"), check="shm")
    assert result_of(made_check("shm"), cluster, [warn]).status is Status.UNKNOWN
    fail = Finding(HOST, "", at("nd0"), check="shm")
    result = result_of(made_check("shm"), cluster, [warn, fail])
    assert result.status is Status.FAIL
    assert "low-host" in result.reason
    assert "no outcome (nd1)" in result.reason


def test_a_broken_judge_is_unknown():
    cluster = make_cluster(check="shm", by_host={"nd0": OK, "nd1": OK})
    result = result_of(made_check("shm"), cluster, broken={"shm": "KeyError: 'x'"})
    assert (result.status, result.reason) == (Status.UNKNOWN, "KeyError: 'x'")


def test_time_is_the_slowest_of_each_round():
    check = made_check("shm")
    slow = Outcome(OutcomeStatus.OK, facts=OK, duration_s=2.0)
    fast = Outcome(OutcomeStatus.OK, facts=OK, duration_s=0.5)
    cluster = make_cluster(check="shm", by_host={"nd0": slow, "nd1": fast})
    assert result_of(check, cluster).duration_s == 2.0
