"""A cut cable explains who was not heard, and what it shuts; healthy hosts are left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nccl_doctor.api import Cluster, Effect, Finding, Layer, Outcome, OutcomeStatus, Severity, Where
from nccl_doctor.checks.firewall import PEER_BLOCKED
from nccl_doctor.checks.port import NO_ROUTE
from nccl_doctor.checks.ranks import HOST_ABSENT, RANK_ABSENT
from nccl_doctor.checks.uplink import HOST_CUT_OFF
from nccl_doctor.judge.causes import explain, root_causes
from nccl_doctor.judge.merge import merge_reports
from nccl_doctor.model import kinds
from nccl_doctor.model.report import Report
from nccl_doctor.toolkit.groups.kinds import HANG
from nccl_doctor.toolkit.hosts import road_to_master
from tests.support.clusters import change_rank, make_cluster, shut_out
from tests.support.merging import (
    REGISTRY,
    THREE,
    coordinators,
    keyed,
    own_view,
    port,
    report_of,
    roots,
    with_facts,
)
from tests.support.reports import kind
from tests.support.uplinks import cables, calls_of, look, nic, with_looks

OUT = {"running": False}
CUT = {"hosts": ("nd0",), "interfaces": ("eth0",)}
LINK = Where(links=(("nd0", "nd1"), ("nd1", "nd0")))
CLUSTER = make_cluster(THREE, 2)


def cut(where: Where, **more: object) -> Finding:
    return Finding(HOST_CUT_OFF, "eth0 has no carrier", where, **more)  # type: ignore[arg-type]


def silent(cluster: Cluster, *seats: int) -> Cluster:
    """These participants signed in, and then posted nothing."""
    lost = Outcome(OutcomeStatus.SILENT, reason="no answer within 8 s of the order")
    for seat in seats:
        cluster = change_rank(cluster, seat, facts={"collectives": {"world": lost}})
    return cluster


def blamed(report: Report) -> set[str]:
    """Hosts that the root causes name, by name or by a rank of theirs."""
    on = {rank.rank: rank.host.name or "" for rank in report.cluster.ranks}
    named = {on[rank] for cause in report.root_causes for rank in cause.where.ranks}
    return named | {host for cause in report.root_causes for host in cause.where.hosts}


# -- what explains what ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "symptom",
    [
        Finding(kinds.RANK_SILENT, "no answer", Where(hosts=("nd1",), ranks=(2,))),
        Finding(RANK_ABSENT, "1 of 6", Where(hosts=("nd2",), ranks=(5,))),
        Finding(HANG, "all_reduce", Where(ranks=(2, 3))),
        Finding(kinds.STORE_LOST, "broke", Where(links=(("nd1", "nd0"),))),
        Finding(NO_ROUTE, "nobody has the address", Where(links=(("nd1", "nd0"),))),
        Finding(PEER_BLOCKED, "no answer", Where(links=(("nd1", "nd0"), ("nd0", "nd1")))),
    ],
    ids=lambda found: str(found.code),
)
def test_the_cable_of_rank_0_explains_every_loss(symptom: Finding) -> None:
    cause = cut(Where(**CUT), effects=(Effect.SHUTS_OUT,))
    assert root_causes(explain([symptom, cause], CLUSTER)) == [cause]


@pytest.mark.parametrize("where", [LINK, Where(hosts=("nd1",))])
def test_the_cable_of_another_explains_what_it_meets_and_nothing_else(where: Where) -> None:
    near = Finding(kinds.RANK_SILENT, "no answer", Where(hosts=("nd1",), ranks=(2,)))
    far = Finding(RANK_ABSENT, "1 of 6", Where(hosts=("nd2",), ranks=(5,)))
    found = root_causes(explain([near, far, cut(where)], CLUSTER))
    assert [each.code for each in found] == ["host-cut-off", "rank-absent"]


def test_it_explains_no_other_fault_of_another_host() -> None:
    other = Finding(kind("gpu-trouble", Layer.DEVICE), "x", Where(hosts=("nd2",)))
    cause = cut(Where(**CUT), effects=(Effect.SHUTS_OUT,))
    found = root_causes(explain([other, cause], CLUSTER))
    assert {each.code for each in found} == {"host-cut-off", "gpu-trouble"}


def test_the_cable_of_rank_0_explains_who_never_came_unless_others_answered_after_that() -> None:
    early = make_cluster(THREE, 2, absent_nodes=(1,))
    never = Finding(HOST_ABSENT, "1 of 3 hosts", Where(nodes=(1,), ranks=(2, 3)))
    cause = cut(Where(**CUT), effects=(Effect.SHUTS_OUT,))
    assert root_causes(explain([never, cause], silent(early, 4))) == [cause]
    answer = Outcome(OutcomeStatus.OK, facts={})
    late = change_rank(early, 4, facts={"clock": {"all": answer}})
    found = root_causes(explain([never, cause], silent(late, 5)))
    assert {each.code for each in found} == {"host-cut-off", "host-absent"}, (
        "it was not there before"
    )


# -- whole reports ---------------------------------------------------------------------------------


def test_at_the_start_rank_0_names_itself_and_the_others_the_link() -> None:
    first = {name: look(name) for name in THREE} | {"nd0": look("nd0", nic("nd0", **OUT))}
    all_of_them = keyed(with_looks(make_cluster(THREE), first))
    lost = port("no-neighbour")
    all_of_them = with_facts(
        all_of_them, "port", {"nd0": port("connected", "store", "self"), "nd1": lost, "nd2": lost}
    )
    zero = report_of(coordinators(all_of_them, 1, 2))
    assert roots(zero) == {"host-cut-off": Where(**CUT)}
    views = []
    for node in (1, 2):
        views.append(report_of(own_view(all_of_them, node)))
        assert roots(views[-1]) == {"no-route": Where(links=((f"nd{node}", "nd0"),))}
        assert blamed(views[-1]) == set()
    assert roots(merge_reports([zero, *views], REGISTRY)) == {"host-cut-off": Where(**CUT)}
    # Without rank 0's report the others cannot know of its cable.
    assert blamed(merge_reports(views, REGISTRY)) == set()


def test_a_cable_that_is_pulled_before_anybody_signed_in_explains_who_had_reached_the_store() -> (
    None
):
    after = {"nd0": look("nd0", nic("nd0", **OUT))}
    ports = {"nd0": port("connected", "store", "self"), "nd1": port("no-neighbour")}
    ports["nd2"] = port("connected", "store")
    views = with_facts(keyed(cables(THREE, after=after)), "port", ports)
    # In a folder that all hosts share, rank 0 reads what they say.
    report = report_of(shut_out(views, "nd1", "nd2"))
    assert roots(report) == {"host-cut-off": Where(**CUT)}
    lost = {f.explained_by for f in report.findings if f.code == "host-absent"}
    assert lost == {"host-cut-off"}


def test_at_the_start_a_host_that_cannot_come_names_itself() -> None:
    first = {"nd1": look("nd1", nic("nd1", **OUT))}
    all_of_them = keyed(cables(("nd0", "nd1"), first))
    known = {"nd0": port("connected", "store", "self"), "nd1": port("no-neighbour")}
    all_of_them = with_facts(all_of_them, "port", known)
    mine = report_of(own_view(all_of_them, 1))
    where = Where(hosts=("nd1",), interfaces=("eth0",))
    assert roots(mine) == {"host-cut-off": where}
    zero = report_of(coordinators(all_of_them, 1))
    assert roots(merge_reports([zero, mine], REGISTRY)) == {"host-cut-off": where}


def test_during_the_run_rank_0_names_itself_and_not_who_fell_silent() -> None:
    after = {"nd0": look("nd0", nic("nd0", **OUT), calls={"nd1": "silent", "nd2": "silent"})}
    report = report_of(silent(cables(THREE, after=after), 2, 3, 4, 5))
    assert roots(report) == {"host-cut-off": Where(**CUT)}
    assert blamed(report) == {"nd0"}
    assert (report.verdict, report.exit_code) == ("fail", 1)


def test_during_the_run_without_a_carrier_to_see() -> None:
    after = calls_of("nd0", nd1="silent", nd2="silent")
    assert blamed(report_of(silent(cables(THREE, after=after), 2, 3, 4, 5))) == {"nd0"}
    two = cables(("nd0", "nd1"), after=calls_of("nd0", nd1="silent"))
    report = report_of(silent(two, 2, 3))
    assert roots(report) == {"host-cut-off": LINK}
    assert not any(cause.has(Effect.DRAINS) for cause in report.root_causes)


def test_a_process_that_was_killed_on_a_host_that_answers_is_blamed_as_before() -> None:
    two = cables(("nd0", "nd1"), after=calls_of("nd0", nd1="answers"))
    report = report_of(silent(two, 2, 3))
    assert {cause.code for cause in report.root_causes} == {"rank-silent"}
    assert blamed(report) == {"nd1"}


def test_who_lost_rank_0_does_not_blame_itself() -> None:
    after = {"nd1": look("nd1", calls={"nd0": "silent", "nd2": "answers"})}
    mine = own_view(keyed(cables(THREE, after=after)), 1)
    lost = Finding(kinds.STORE_LOST, "it broke", road_to_master(mine, mine.hosts[0]))
    report = report_of(mine, lost)
    assert roots(report) == {"host-cut-off": LINK}
    assert blamed(report) == set()


def test_merged_the_second_look_of_a_host_that_was_lost_counts() -> None:
    """Rank 0 saw only that nd1 was gone; nd1 knows that its own cable was."""
    two = silent(cables(("nd0", "nd1"), after=calls_of("nd0", nd1="silent")), 2, 3)
    zero = keyed(two)
    seen = {"nd1": look("nd1", nic("nd1", **OUT), calls={"nd0": "unreachable"})}
    mine = own_view(keyed(cables(("nd0", "nd1"), after=seen)), 1)
    mine = replace(mine, hosts=tuple(replace(host, joined=False) for host in mine.hosts))
    merged = merge_reports([report_of(zero), report_of(mine)], REGISTRY)
    assert roots(merged)["host-cut-off"] == Where(hosts=("nd1",), interfaces=("eth0",))
    assert blamed(merged) == {"nd1"}
    assert all(cause.level is Severity.FAIL for cause in merged.root_causes)
