"""Connections on which nobody sends anything for a while, with and without a firewall between."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab import faults
from tests.lab.lab import Lab
from tests.lab.reading import PEERS_S, check_cause, check_clean, loud

pytestmark = pytest.mark.wide


def test_a_firewall_that_forgets_silent_connections(make_lab: Callable[..., Lab]) -> None:
    """The road to nd1 is well for everything but a pause."""
    lab = make_lab("nd0", "nd1", "nd2")
    faults.forget_silent_connections(lab, lab["nd1"], 3)
    hold_s = 4.0
    run = lab.plain_doctor("--level", "quick", "--timeout", "100", "--hold-idle", f"{hold_s:g}")
    # Four seconds for an answer after the silence, and a new connection.
    check_clean(run, PEERS_S + hold_s + 4.0)
    pairs = [("nd0", "nd1"), ("nd1", "nd0"), ("nd1", "nd2"), ("nd2", "nd1")]
    root = check_cause(run, run.report, "idle-connection-lost", hosts=["nd1"], links=pairs)
    assert "silent for 4 s" in root["message"], str(run)
    assert "; 2 s of silence do no harm" in root["message"], str(run)
    assert run.codes == [1, 1, 1], str(run)


def test_healthy_hosts_keep_silent_connections(lab: Lab) -> None:
    run = lab.plain_doctor("--level", "quick", "--timeout", "100", "--hold-idle", "2")
    check_clean(run, PEERS_S + 2.0)
    assert run.report is not None, str(run)
    assert loud(run.report) == [], str(run)
    status = {check["name"]: check["status"] for check in run.report["checks"]}
    assert status["held_connections"] == "pass", str(run)
    assert run.codes == [0, 0], str(run)


def test_level_full_holds_them_through_the_run_and_says_how_long(lab: Lab) -> None:
    select = "--select=ranks,clock,held_connections"
    run = lab.plain_doctor("--level", "full", "--timeout", "100", select)
    assert run.report is not None, str(run)
    assert loud(run.report) == [], str(run)
    status = {check["name"]: check["status"] for check in run.report["checks"]}
    assert status["held_connections"] == "pass", str(run)
    hosts = run.report["hosts"]
    for host in hosts:
        facts = host["facts"]["held_connections"]["through"]["facts"]
        assert facts["note"].startswith(f"silent for {facts['idle_s']:g} s: nothing is known of a")
