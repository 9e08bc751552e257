"""A cable is pulled: the host that lost it is named, and no healthy one, in no report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.lab import faults
from tests.lab.lab import Lab
from tests.lab.reading import ROUND_S, SIGN_IN_S, Report, check_cause, check_clean
from tests.lab.run import Run
from tests.lab.test_lab_merge import merge

STORE_S = 10.0
"""After which an operation of the store is given up."""
LOOK_S = 4.0


def blamed(report: Report | None) -> set[str]:
    """Hosts that the root causes name, by name or by a rank of theirs."""
    assert report is not None
    on = {rank["rank"]: rank["host"] for rank in report["ranks"]}
    places = [root["where"] for root in report["root_causes"]]
    named = {on.get(rank) or "" for where in places for rank in where["ranks"]}
    return named | {host for where in places for host in where["hosts"]}


def check_views(run: Run, *nodes: int) -> None:
    """These hosts cannot reach node 0: each says so, and blames no host, itself least of all."""
    assert sorted(run.partial) == list(nodes), str(run)
    for node in nodes:
        view = run.partial[node]
        assert view["verdict"] == "fail", str(run)
        assert blamed(view) == set(), str(run)
        links = {
            tuple(sorted(link)) for root in view["root_causes"] for link in root["where"]["links"]
        }
        assert links == {("nd0", f"nd{node}")}, str(run)


def test_the_cable_of_node_0_is_out(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    faults.pull_cable(lab, lab["nd0"])
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_cause(run, run.report, "host-cut-off", hosts=["nd0"], interfaces=["eth0"])
    assert root["message"] == "eth0 has no carrier"
    check_views(run, 1, 2)
    check_cause(run, merge(run), "host-cut-off", hosts=["nd0"], interfaces=["eth0"])


def test_the_card_of_node_1_is_down(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    faults.set_link_down(lab["nd1"])
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    check_cause(run, run.report, "host-absent", nodes=[1], ranks=[1])
    assert sorted(run.partial) == [1], str(run)
    where = {"hosts": ["nd1"], "interfaces": ["eth0"]}
    root = check_cause(run, run.partial[1], "host-cut-off", **where)
    assert root["fix"] == "on nd1: ip link set eth0 up"
    check_cause(run, merge(run), "host-cut-off", **where)


def test_two_hosts_and_the_cable_between_them_is_out(lab: Lab) -> None:
    faults.pull_cable(lab, lab["nd0"])
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    check_cause(run, run.report, "host-cut-off", hosts=["nd0"], interfaces=["eth0"])
    check_views(run, 1)


def test_the_cable_of_node_0_is_pulled_during_the_run(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    pull = partial(faults.pull_cable, lab, lab["nd0"])
    with lab.strike(0, 0, act=pull) as strike:
        run = lab.plain_doctor("--join-timeout", "30")
    assert strike.pid, str(run)
    check_clean(run, SIGN_IN_S + ROUND_S + STORE_S + LOOK_S)
    check_cause(run, run.report, "host-cut-off", hosts=["nd0"], interfaces=["eth0"])
    check_views(run, 1, 2)
    check_cause(run, merge(run), "host-cut-off", hosts=["nd0"], interfaces=["eth0"])
