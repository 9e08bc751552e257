"""Faults of one rail of a host, while everything else between the hosts is well."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.lab import faults
from tests.lab.lab import PATIENT, Lab
from tests.lab.rails import add_rails, address, nic
from tests.lab.reading import PEERS_S, check_cause, check_clean, loud
from tests.lab.run import Run

CHECKS = "interfaces,firewall,rdma,fabric_ports,roce_gids,rails,rail_reach"
"""What concerns the hosts' networks; without a GPU, NCCL itself cannot be tried."""


def examine(lab: Lab, env: Mapping[str, str]) -> Run:
    run = lab.plain_doctor(*PATIENT, "--backend", "nccl", "--select", CHECKS, env=env)
    check_clean(run, PEERS_S)
    return run


def facts_of(run: Run, rank: int) -> Any:
    assert run.report is not None, str(run)
    return run.report["ranks"][rank]["checks"]


def test_a_rail_of_one_host_leads_elsewhere(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    env = add_rails(lab)
    run = examine(lab, env)
    assert run.report is not None, str(run)
    assert loud(run.report) == [], str(run)
    assert {check["name"]: check["status"] for check in run.report["checks"]} == dict.fromkeys(
        CHECKS.split(","), "pass"
    ), str(run)

    # Its cable is in a switch port of another network, for longer than kernels remember addresses.
    lab.in_switch("ip", "link", "set", "r1p2", "nomaster")
    for host in lab.hosts:
        host.call("ip", "neigh", "flush", "dev", nic(1))
    run = examine(lab, env)
    root = check_cause(run, run.report, "rail-unreachable", hosts=["nd2"], interfaces=["mlx5_1:1"])
    assert "no host answers for the address on the local network" in root["message"], str(run)
    assert nic(1) in root["message"], str(run)
    assert f"ping -c 3 -I {nic(1)} {address(lab['nd2'], 1)}" in root["fix"], str(run)
    assert root["confidence"] == "likely", str(run)


@pytest.mark.wide
def test_a_switch_port_without_jumbo_frames(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    env = add_rails(lab)
    for host in lab.hosts:
        host.call("ip", "link", "set", "dev", nic(0), "mtu", "9000")
        lab.in_switch("ip", "link", "set", "dev", f"r0p{host.index}", "mtu", "9000")
        host.call("ethtool", "-K", nic(0), "tso", "off", "gso", "off", "gro", "off")
    faults.on_the_path(lab, 'oifname "r0p1" meta length > 1500 drop')
    run = examine(lab, env)
    assert run.report is not None, str(run)
    (found,) = loud(run.report)
    assert found["code"] == "rail-mtu-blackhole", str(run)
    assert found["where"]["hosts"] == ["nd1"], str(run)
    assert found["where"]["interfaces"] == ["mlx5_0:1"], str(run)
    assert run.report["verdict"] == "warn", str(run)


@pytest.mark.wide
def test_a_firewall_that_bars_tcp_between_rails(make_lab: Callable[..., Lab]) -> None:
    """It may be on purpose, as RoCE passes it: a warning, and no more than a possibility."""
    lab = make_lab("nd0", "nd1", "nd2")
    env = add_rails(lab)
    faults.incoming(lab["nd1"], "tcp flags syn drop", nic(1))
    run = examine(lab, env)
    assert run.report is not None, str(run)
    (found,) = loud(run.report)
    assert (found["code"], found["severity"], found["confidence"]) == (
        "rail-unreachable",
        "warn",
        "possible",
    ), str(run)
    assert found["where"]["hosts"] == ["nd1"], str(run)
    assert run.codes == [0, 0, 0], str(run)
