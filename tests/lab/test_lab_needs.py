"""What the job needs besides its hosts, on hosts that have it, and where one has not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.lab import Lab
from tests.lab.reading import PEERS_S, check_cause, check_clean, loud

pytestmark = pytest.mark.wide
QUICK = ("--level", "quick", "--timeout", "60")


def test_storage_ports_and_a_file_of_healthy_hosts(tmp_path: Path, lab: Lab) -> None:
    (tmp_path / "shared").mkdir()
    shared, own = str(tmp_path / "shared"), "/dev/shm"
    run = lab.plain_doctor(
        *(*QUICK, "--path", shared, "--path", own, "--endpoint", "nd0:8265", "--endpoint"),
        *("1:8000", "--reach", "tcp://nd0:29500", "--init-method", f"file://{shared}/init"),
    )
    check_clean(run, PEERS_S)
    assert run.report is not None, str(run)
    assert loud(run.report) == [], str(run)
    status = {check["name"]: check["status"] for check in run.report["checks"]}
    for name in ("paths", "endpoints", "reach", "init_method"):
        assert status[name] == "pass", str(run)
    owner = run.report["hosts"][0]["facts"]["endpoints"]["calls"]["facts"]["endpoints"]
    assert [(each["mine"], each.get("late")) for each in owner] == [(True, {}), (False, None)]
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_port_that_the_host_of_the_service_shuts(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    faults.drop_master_port(lab["nd1"], 8000)
    run = lab.plain_doctor(*QUICK, "--endpoint", "nd1:8000")
    check_clean(run, PEERS_S)
    links = [("nd0", "nd1"), ("nd2", "nd1")]
    root = check_cause(run, run.report, "endpoint-blocked", hosts=["nd1"], links=links)
    assert "; dropped by this rule: nft" in root["message"], str(run)
    assert "on nd1: " in root["fix"], str(run)
