"""Faults on the way to the master: name, route, port.

The host that cannot get in says why in a report of its own; the coordinator says who is missing.
"""

from __future__ import annotations

import pytest

from tests.lab import faults
from tests.lab.lab import MASTER_PORT, Lab, Run
from tests.lab.reading import SIGN_IN_S, check_cause, check_clean, view_of


def check_absent(run: Run) -> None:
    """The coordinator misses node 1 and accuses nobody."""
    check_cause(run, run.report, "host-absent", nodes=[1], ranks=[1])


def test_name_unresolvable_on_one_host(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd0=""))
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_cause(run, view_of(run, 1), "addr-unresolvable", hosts=["nd1"])
    assert "nd0" in root["message"] + root["fix"]
    check_absent(run)
    assert run.codes == [1, 1], str(run)


def test_own_name_is_a_loopback_address(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd1="127.0.1.1"))
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_cause(run, run.report, "addr-loopback", hosts=["nd1"])
    assert "127.0.1.1" in root["message"]
    assert run.codes == [1, 1], str(run)
    assert run.partial == {}


def test_stale_address_of_the_master(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd0="192.168.77.99"))
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_cause(
        run,
        view_of(run, 1),
        {"no-route", "addr-differs"},
        hosts=["nd1"],
    )
    assert "192.168.77.99" in root["message"]
    check_absent(run)
    assert run.codes == [1, 1], str(run)


def test_master_port_is_taken(lab: Lab) -> None:
    taker = faults.foreign_server(lab["nd0"], MASTER_PORT, "http")
    pid = faults.pid_inside(taker)
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_cause(run, view_of(run, 0), "port-in-use", hosts=["nd0"])
    assert str(pid) in root["message"] + root["fix"], str(run)
    assert "python" in root["message"], str(run)
    check_cause(run, view_of(run, 1), "port-not-the-store", hosts=["nd0"])
    assert run.codes == [1, 1], str(run)
    assert taker.poll() is None, "the doctor must not touch the process that holds the port"


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("drop", "port-blocked"),
        ("icmp type admin-prohibited", "port-blocked"),
        ("tcp reset", "port-refused"),
    ],
)
def test_master_port_is_behind_a_firewall(lab: Lab, how: str, code: str) -> None:
    if how == "drop":
        faults.drop_master_port(lab["nd0"])
    else:
        faults.reject_master_port(lab["nd0"], how)
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_cause(run, view_of(run, 1), code, links=[("nd1", "nd0")])
    assert str(MASTER_PORT) in root["message"], str(run)
    check_absent(run)
    assert run.codes == [1, 1], str(run)
