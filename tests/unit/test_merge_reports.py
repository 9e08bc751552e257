"""Reports of hosts that never met, made into one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Confidence, Finding, Layer, Severity, Where
from nccl_doctor.judge.conclusion import judge_again
from nccl_doctor.judge.merge import merge_reports
from nccl_doctor.model import kinds
from nccl_doctor.model.findings import CheckResult, Scope, Status
from nccl_doctor.model.launch import LaunchProblem
from tests.support.clusters import change_rank, make_cluster
from tests.support.merging import (
    HEALTHY,
    REGISTRY,
    THREE,
    coordinators,
    keyed,
    master_addr,
    own_view,
    parts,
    port,
    report_of,
    roots,
    with_facts,
)
from tests.support.reports import kind, read_with, through_json

# -- one verdict -----------------------------------------------------------------------------------


def test_the_failure_that_the_host_saw_explains_its_absence():
    seen = {name: master_addr(name, "192.168.77.1") for name in THREE}
    cluster = with_facts(HEALTHY, "master_addr", {**seen, "nd1": master_addr("nd1")})
    for order in itertools.permutations(parts(cluster, 1)):
        merged = merge_reports(order, REGISTRY)
        assert roots(merged) == {"addr-unresolvable": Where(hosts=("nd1",))}
        explained = {f.code: f.explained_by for f in merged.findings if f.explained_by}
        assert explained == {
            "host-absent": "addr-unresolvable",
            "coordinator-lost": "addr-unresolvable",
        }
        assert merged.exit_code == 1
        assert merged.summary.endswith("does not resolve (nd1)")


def test_a_link_that_fails_explains_it_as_well():
    seen = {"nd0": port("connected", "store", "self"), "nd1": port("dropped")}
    cluster = with_facts(HEALTHY, "port", {**seen, "nd2": port("connected", "store")})
    merged = merge_reports(parts(cluster, 1), REGISTRY)
    assert roots(merged) == {"port-blocked": Where(links=(("nd1", "nd0"),))}
    assert {f.explained_by for f in merged.findings if f.code == "host-absent"} == {"port-blocked"}


@pytest.mark.parametrize(
    ("number", "code", "met"),
    [(98, "port-in-use", port("connected", "other")), (13, "port-privileged", port("refused"))],
)
def test_that_rank_0_could_not_serve_explains_what_others_met(
    number: int, code: str, met: Mapping[str, Any]
):
    own = port("refused", server="self", bind_errno=number, bind_error="no", holder=None)
    del own["knock"]
    cluster = with_facts(HEALTHY, "port", {"nd0": own, "nd1": met, "nd2": met})
    views = [report_of(own_view(cluster, node)) for node in range(3)]
    assert roots(merge_reports(views, REGISTRY)) == {code: Where(hosts=("nd0",))}


def test_causes_of_several_hosts_stand_side_by_side():
    cluster = with_facts(HEALTHY, "master_addr", {"nd1": master_addr("nd1")})
    cluster = everywhere_on(cluster, "nd2", master_port=29511)
    cluster = with_facts(cluster, "port", {"nd2": port("refused", port=29511)})
    merged = merge_reports(parts(cluster, 1, 2), REGISTRY)
    assert roots(merged) == {
        "addr-unresolvable": Where(hosts=("nd1",)),
        "master-port-differs": Where(hosts=("nd2",)),
    }
    lost = {f.where: f.explained_by for f in merged.findings if f.code == "coordinator-lost"}
    assert lost == {
        Where(links=(("nd1", "nd0"),)): "addr-unresolvable",
        Where(links=(("nd2", "nd0"),)): "master-port-differs",
    }


def everywhere_on(cluster: Cluster, host: str, **launch: Any) -> Cluster:
    for rank in cluster.ranks:
        if rank.host.name == host:
            cluster = change_rank(cluster, rank.seat, launch=launch)
    return cluster


def test_a_host_with_no_failure_of_its_own_is_named_with_doubt():
    cluster = with_facts(HEALTHY, "port", {"nd1": port("connected", "store")})
    merged = merge_reports(parts(cluster, 1), REGISTRY)
    assert roots(merged) == {"host-absent": Where(hosts=("nd1",), ranks=(2, 3))}
    assert merged.root_causes[0].confidence is Confidence.LIKELY
    assert "of the others" in merged.root_causes[0].fix


def test_a_host_whose_road_nobody_looked_at_is_not_blamed():
    examined = with_facts(HEALTHY, "memory", {"nd1": {}})
    merged = merge_reports(parts(examined, 1), REGISTRY)
    assert roots(merged) == {"host-absent": Where(links=(("nd1", "nd0"),))}


def test_a_host_that_examined_nothing_yet_is_the_place_and_not_its_road():
    merged = merge_reports(parts(HEALTHY, 1), REGISTRY)
    assert roots(merged) == {"host-absent": Where(hosts=("nd1",), ranks=(2, 3))}


def test_a_host_that_sent_nothing_is_still_absent_to_the_coordinator():
    cluster = with_facts(HEALTHY, "master_addr", {"nd1": master_addr("nd1")})
    seen, view, _ = parts(cluster, 1, 2)
    merged = merge_reports([seen, view], REGISTRY)
    assert roots(merged) == {
        "addr-unresolvable": Where(hosts=("nd1",)),
        "host-absent": Where(nodes=(2,), ranks=(4, 5)),
    }


def test_without_the_coordinator_hosts_without_a_report_are_not_blamed():
    cluster = with_facts(HEALTHY, "master_addr", {"nd1": master_addr("nd1")})
    views = [report_of(own_view(cluster, node)) for node in (1, 2)]
    merged = merge_reports(views, REGISTRY)
    assert roots(merged) == {"addr-unresolvable": Where(hosts=("nd1",))}
    assert not any(0 in f.where.nodes or "nd0" in f.where.hosts for f in merged.findings)
    assert [host.reported for host in merged.cluster.hosts] == [True, True, False]
    assert any("no report from it (node 0)" in check.reason for check in merged.checks)
    silent = merge_reports([report_of(own_view(HEALTHY, node)) for node in (1, 2)], REGISTRY)
    assert (silent.verdict, silent.exit_code) == ("unknown", 3)
    assert "no report from node 0" in silent.summary


def test_nothing_that_ran_on_one_side_only_passes():
    cluster = with_facts(HEALTHY, "port", {name: port("connected", "store") for name in THREE})
    seen, view = parts(cluster, 1)
    without = own_view(HEALTHY, 1)
    for merged in (
        merge_reports([seen, report_of(without)], REGISTRY),
        merge_reports([seen], REGISTRY),
    ):
        statuses = {check.name: check.status for check in merged.checks}
        assert statuses["port"] in (Status.UNKNOWN, Status.BLOCKED)
    both = {check.name: check.status for check in merge_reports([seen, view], REGISTRY).checks}
    assert both["port"] is Status.PASS
    assert both["collectives"] is not Status.PASS


def test_two_node_0s_that_each_served_a_store_of_their_own():
    twin = everywhere_on(keyed(make_cluster(("twin", "nd1", "nd2"))), "twin", master_addr="twin")
    reports = [report_of(coordinators(HEALTHY, 1, 2)), report_of(coordinators(twin, 1, 2))]
    merged = merge_reports(reports, REGISTRY)
    found = roots(merged)
    assert found["node-rank-duplicate"] == Where(hosts=("nd0", "twin"), ranks=(0, 1), nodes=(0,))


@pytest.mark.parametrize(
    ("flags", "code", "where"),
    [
        ({"nnodes": 4}, "nnodes-differs", Where(hosts=("nd2",))),
        ({"world_size": 8}, "world-size-differs", Where(hosts=("nd2",), ranks=(4,))),
    ],
)
def test_flags_that_disagree(flags: Mapping[str, int], code: str, where: Where):
    cluster = everywhere_on(HEALTHY, "nd2", **flags)
    merged = merge_reports(parts(cluster, 2), REGISTRY)
    assert roots(merged)[code] == where


def test_a_host_that_claims_the_node_rank_of_another():
    twin = own_view(keyed(make_cluster(("nd0", "twin", "nd2"))), 1)
    merged = merge_reports([report_of(coordinators(HEALTHY, 2)), report_of(twin)], REGISTRY)
    where = Where(hosts=("nd1", "twin"), ranks=(2, 3), nodes=(1,))
    assert roots(merged) == {"node-rank-duplicate": where}


def test_a_host_without_a_rank_is_the_one_that_is_missing():
    problem = LaunchProblem("launch-missing-variable", "RANK is not set", {"RANK": None})
    view = own_view(HEALTHY, 1)
    host = replace(view.hosts[0], node_rank=None)
    launch = {"rank": None, "node_rank": None, "problems": (problem,)}
    view = change_rank(view, 0, rank=None, local_rank=0, host=host, launch=launch)
    view = replace(view, hosts=(host,))
    merged = merge_reports([report_of(coordinators(HEALTHY, 1)), report_of(view)], REGISTRY)
    assert roots(merged) == {"launch-missing-variable": Where(hosts=("nd1",))}


def test_a_merged_report_can_be_judged_and_merged_again():
    cluster = with_facts(HEALTHY, "master_addr", {"nd1": master_addr("nd1")})
    reports = parts(cluster, 1)
    merged = through_json(merge_reports(reports, REGISTRY))
    again = merge_reports([merged, *reports], REGISTRY)
    for other in (judge_again(merged, REGISTRY), again):
        assert other.to_json()["findings"] == merged.to_json()["findings"]
        assert other.verdict == merged.verdict
    assert [h.name for h in again.cluster.hosts] == [h.name for h in merged.cluster.hosts]


def test_one_report_alone_and_twice():
    (seen,) = parts(HEALTHY)
    once, twice = merge_reports([seen], REGISTRY), merge_reports([seen, seen], REGISTRY)
    assert once.findings == twice.findings == seen.findings
    assert once.cluster.hosts == twice.cluster.hosts == seen.cluster.hosts
    assert once.verdict == seen.verdict


# -- what the reports themselves say ---------------------------------------------------------------


def test_which_reports_it_was_made_of():
    seen, view = parts(HEALTHY, 1)
    merged = merge_reports([view, seen], REGISTRY)
    assert [(part["hosts"], part["complete"]) for part in merged.run.extra["merged"]] in (
        [(["nd0", "nd2"], True), (["nd1"], False)],
        [(["nd1"], False), (["nd0", "nd2"], True)],
    )
    assert merged.run.command == seen.run.command


def test_what_the_engine_said_of_one_host_stays():
    stopped = Finding(kinds.RUN_INTERRUPTED, "received SIGTERM", Where(hosts=("nd1",)))
    seen = report_of(coordinators(HEALTHY, 1))
    merged = merge_reports([seen, report_of(own_view(HEALTHY, 1), stopped)], REGISTRY)
    (kept,) = (f for f in merged.findings if f.code == "run-interrupted")
    assert kept.where == Where(hosts=("nd1",))


def test_a_host_that_came_in_and_then_lost_rank_0_says_so_still():
    merged = merge_reports([report_of(HEALTHY), report_of(own_view(HEALTHY, 1))], REGISTRY)
    assert "coordinator-lost" in {f.code for f in merged.findings}
    assert merged.cluster.hosts == HEALTHY.hosts


def test_an_old_view_of_a_host_that_came_in_is_left_out_and_doubted():
    old = change_rank(own_view(HEALTHY, 1), 0, pid=7)
    merged = merge_reports([report_of(HEALTHY), report_of(old)], REGISTRY)
    codes = {f.code: f.where for f in merged.findings}
    assert codes.get("merge-doubtful") == Where(hosts=("nd1",))
    assert "coordinator-lost" not in codes


def test_of_two_own_views_of_one_host_the_newest_counts():
    old = with_facts(own_view(HEALTHY, 1), "master_addr", {"nd1": master_addr("nd1")})
    old = change_rank(old, 0, pid=7)
    good = with_facts(
        own_view(HEALTHY, 1), "master_addr", {"nd1": master_addr("nd1", "192.168.77.1")}
    )
    reports = [
        report_of(coordinators(HEALTHY, 1)),
        report_of(old, started="2026-11-21T06:59:00+00:00"),
        report_of(good, started="2026-11-21T07:00:30+00:00"),
    ]
    merged = merge_reports(reports, REGISTRY)
    assert "addr-unresolvable" not in {f.code for f in merged.findings}
    assert {f.where for f in merged.findings if f.code == "merge-doubtful"} == {
        Where(hosts=("nd1",))
    }


@pytest.mark.parametrize(
    ("started", "words"),
    [
        ("2026-11-21T07:10:00+00:00", None),
        ("2026-11-21T10:00:00+03:00", None),
        ("2026-11-21T07:05:00Z", None),
        ("2026-11-21T07:05:00", None),
        ("2026-11-21T10:30:00+00:00", "the runs started 3.5 h apart"),
        ("yesterday", "the runs started an unknown time apart"),
        (None, "the runs started an unknown time apart"),
    ],
)
def test_reports_of_different_times_are_doubted(started: object, words: str | None):
    seen, view = parts(HEALTHY, 1)
    view = read_with(view, started=started)
    found = [
        f for f in merge_reports([seen, view], REGISTRY).findings if f.code == "merge-doubtful"
    ]
    assert bool(found) == (words is not None)
    for finding in found:
        assert finding.message.startswith(str(words))
        assert finding.level is Severity.WARN


def test_reports_of_different_versions_are_doubted():
    seen, view = parts(HEALTHY, 1)
    view = replace(view, tool={"name": "nccl-doctor", "version": "0.0.1"})
    (found,) = (
        f for f in merge_reports([seen, view], REGISTRY).findings if f.code == "merge-doubtful"
    )
    assert "0.0.1 and" in found.message


def test_a_check_that_is_not_installed_here_keeps_its_failure_and_nothing_else():
    def foreign(status: Status) -> CheckResult:
        return CheckResult("moon", Layer.HOST, Scope.HOST, status, "", 0.1, ("nd1",))

    down = Finding(kind("moon-down"), "it is down", Where(hosts=("nd1",)), check="moon")
    seen = report_of(coordinators(HEALTHY, 1), others=[foreign(Status.PASS)])
    good = report_of(own_view(HEALTHY, 1), others=[foreign(Status.PASS)])
    bad = report_of(own_view(HEALTHY, 1), down, others=[foreign(Status.FAIL)])
    for view, status in ((good, Status.UNKNOWN), (bad, Status.FAIL)):
        merged = merge_reports([seen, view], REGISTRY)
        assert [c.status for c in merged.checks if c.name == "moon"] == [status]
    assert "moon-down" in roots(merged)


# -- what cannot be merged -------------------------------------------------------------------------


def test_no_report():
    with pytest.raises(ValueError, match="no report to merge"):
        merge_reports([], REGISTRY)


def test_pseudonyms_cannot_be_matched_with_names():
    seen, view = parts(HEALTHY, 1)
    with pytest.raises(ValueError, match="some reports are redacted"):
        merge_reports([seen, replace(view, redacted=True)], REGISTRY)
    both = [replace(report, redacted=True) for report in (seen, view)]
    assert merge_reports(both, REGISTRY).redacted


def test_a_host_examined_by_itself_is_no_part_of_a_run():
    seen, view = parts(HEALTHY, 1)
    with pytest.raises(ValueError, match="nccl-doctor env"):
        merge_reports([seen, read_with(view, alone=True)], REGISTRY)
