"""The own launcher: a host signs in, then starts its ranks; and what keeps it out."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.lab import faults
from tests.lab.lab import JOIN_S, MASTER_PORT, Lab
from tests.lab.reading import (
    SETTLE_S,
    START_S,
    check_cause,
    check_clean,
    check_healthy,
    loud,
    view_of,
)
from tests.lab.run import Run

SOON_S = 8.0
"""For a verdict that needs no join time-out."""
JOIN_AND_S = JOIN_S + 5.0
"""For one that does."""


def ranks_of(run: Run) -> list[tuple[int, str]]:
    assert run.report is not None, str(run)
    return [(rank["rank"], rank["host"]) for rank in run.report["ranks"]]


@pytest.mark.wide
def test_uneven_hosts_pass(lab: Lab) -> None:
    run = lab.own_doctor(per_host={"nd1": ["--nproc-per-node", "1"]})
    check_healthy(run, ranks=3)
    assert ranks_of(run) == [(0, "nd0"), (1, "nd0"), (2, "nd1")]
    assert run.codes == [0, 0]


@pytest.mark.wide
@pytest.mark.parametrize("host", ["nd0", "nd1"])
def test_a_late_host_is_waited_for(lab: Lab, host: str) -> None:
    run = lab.own_doctor("--join-timeout", "12", late_s={host: 4.0})
    check_clean(run)
    assert run.report is not None, str(run)
    assert run.report["verdict"] == "pass", str(run)
    assert loud(run.report) == [], str(run)


@pytest.mark.wide
@pytest.mark.parametrize("node", [0, 1])
def test_node_rank_twice(make_lab: Callable[..., Lab], node: int) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    run = lab.own_doctor(nproc=1, per_host={"nd2": ["--node-rank", str(node)]})
    check_clean(run, SOON_S)
    root = check_cause(
        run,
        run.report,
        "node-rank-duplicate",
        hosts=[f"nd{node}", "nd2"],
        ranks=[node],
        nodes=[node],
    )
    assert f"node rank {node}" in root["message"]
    assert run.codes == [1, 1, 1], str(run)


@pytest.mark.wide
def test_nnodes_differs_on_one_host(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    run = lab.own_doctor(nproc=1, per_host={"nd1": ["--nnodes", "4"]})
    check_clean(run, SOON_S)
    check_cause(run, run.report, "nnodes-differs", hosts=["nd1"])


@pytest.mark.wide
def test_nnodes_differs_on_node_0(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    run = lab.own_doctor(nproc=1, per_host={"nd0": ["--nnodes", "4"]})
    check_clean(run, SOON_S)
    check_cause(run, run.report, "nnodes-differs", hosts=["nd0"])


@pytest.mark.wide
def test_rdzv_ids_differ(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    run = lab.own_doctor(
        nproc=1,
        job=["never_started.py"],
        rendezvous="c10d",
        per_host_env={"nd1": {"PET_RDZV_ID": "yesterday"}},
    )
    check_clean(run)
    root = check_cause(run, run.report, "launch-run-id-differs", hosts=["nd1"])
    assert "yesterday" in root["message"], str(run)
    assert run.codes == [1, 1, 1], str(run)


@pytest.mark.wide
def test_absent_host(lab: Lab) -> None:
    run = lab.own_doctor(hosts=["nd0"])
    check_clean(run, JOIN_AND_S)
    check_cause(run, run.report, "host-absent", nodes=[1], ranks=[2, 3])


@pytest.mark.wide
def test_master_addr_is_another_host(lab: Lab) -> None:
    elsewhere = {name: ["--master-addr", "nd1"] for name in lab.names}
    run = lab.own_doctor(per_host=elsewhere)
    check_clean(run, JOIN_AND_S)
    check_cause(run, run.report, "addr-not-on-master", hosts=["nd0"])
    check_cause(run, view_of(run, 1), "addr-not-on-master", hosts=["nd1"])
    assert run.codes == [1, 1], str(run)


def test_master_addr_is_the_bridge_of_docker(lab: Lab) -> None:
    for host in lab.hosts:
        host.call("ip", "link", "add", "docker0", "type", "veth", "peer", "name", "docker0p")
        host.call("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        host.call("ip", "link", "set", "docker0", "up")
        host.call("ip", "link", "set", "docker0p", "up")
    bridge = {name: ["--master-addr", "172.17.0.1"] for name in lab.names}
    run = lab.own_doctor(per_host=bridge)
    check_clean(run, JOIN_AND_S)
    root = check_cause(run, run.report, "addr-not-shared", hosts=["nd0"], interfaces=["docker0"])
    assert f"--master-addr {lab['nd0'].address}" in root["fix"], str(run)
    assert run.codes == [1, 1], str(run)


@pytest.mark.wide
def test_port_is_taken_on_node_0(lab: Lab) -> None:
    faults.foreign_server(lab["nd0"], MASTER_PORT, "http")
    run = lab.own_doctor()
    check_clean(run, SOON_S)
    check_cause(run, view_of(run, 0), "port-in-use", hosts=["nd0"])


def test_a_shared_folder_lets_a_lost_host_be_heard(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd0=""))
    views = lab.folder / "views"
    views.mkdir()
    (views / "node1.json").write_text("from an earlier run, and no report")
    run = lab.own_doctor("--output-dir", str(views))
    check_clean(run, JOIN_AND_S)
    check_cause(run, run.report, "addr-unresolvable", hosts=["nd1"])
    assert sorted(path.name for path in views.iterdir()) == ["node0.json", "node1.json"]


@pytest.mark.wide
def test_a_shared_folder_tells_that_ports_differ(lab: Lab) -> None:
    views = lab.folder / "views"
    views.mkdir()
    run = lab.own_doctor("--output-dir", str(views), per_host={"nd1": ["--master-port", "29501"]})
    check_clean(run, JOIN_AND_S)
    root = check_cause(run, run.report, "master-port-differs", hosts=["nd1"])
    assert "29501" in root["message"]


def test_a_first_process_is_killed_and_takes_its_ranks_with_it(lab: Lab) -> None:
    with lab.strike(None, signal.SIGKILL, hosts=["nd1"], parent=True) as strike:
        run = lab.own_doctor(nproc=2)
    assert strike.pid, str(run)
    check_clean(run)
    assert run.report is not None, str(run)
    named = {host for found in loud(run.report) for host in found["where"]["hosts"]}
    assert named <= {"nd1"}, str(run)
    assert run.codes[0] == {"fail": 1, "unknown": 3}[run.report["verdict"]], str(run)


def test_a_host_that_comes_after_the_roll_call_says_so_itself(lab: Lab) -> None:
    run = lab.own_doctor(late_s={"nd1": JOIN_S + 4})
    check_clean(run, 2 * JOIN_S + SETTLE_S)
    check_cause(run, run.report, "host-absent", nodes=[1], ranks=[2, 3])
    assert run.partial[1]["verdict"] == "fail", str(run)
    assert run.codes == [1, 1], str(run)


def test_a_wait_is_told_within_seconds(lab: Lab) -> None:
    run = lab.own_doctor("--join-timeout", "12", hosts=["nd1"])
    check_clean(run, JOIN_AND_S + 6)
    told = [line for line in run.done[0].lines if "refuses connections; trying for" in line.text]
    assert len(told) == 1, str(run)
    assert told[0].seconds < START_S + 5, str(run)
