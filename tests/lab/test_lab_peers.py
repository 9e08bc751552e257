"""Faults between hosts that all reach the master: ephemeral ports, interfaces, packet size.

Where a rule of a host does it, the host is named and the rule quoted; where it happens on the path,
nobody but the link is named.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab import faults
from tests.lab.lab import Lab
from tests.lab.reading import PEERS_S, check_cause, check_clean


@pytest.mark.wide
def test_ephemeral_ports_are_dropped_by_firewalls_of_both_hosts(lab: Lab) -> None:
    for host in lab.hosts:
        faults.drop_ephemeral(host)
    run = lab.plain_doctor()
    check_clean(run, PEERS_S)
    root = check_cause(
        *(run, run.report, "peer-blocked"),
        hosts=["nd0", "nd1"],
        links=[("nd0", "nd1"), ("nd1", "nd0")],
    )
    assert "32768-60999" in root["message"], str(run)
    assert "drop" in root["message"], str(run)
    assert run.codes == [1, 1], str(run)


@pytest.mark.wide
def test_ephemeral_ports_are_dropped_one_way(lab: Lab) -> None:
    faults.drop_ephemeral(lab["nd0"])
    run = lab.plain_doctor()
    check_clean(run, PEERS_S)
    check_cause(run, run.report, "peer-one-way", hosts=["nd0"], links=[("nd1", "nd0")])
    assert run.codes == [1, 1], str(run)


@pytest.mark.wide
def test_one_pair_of_three_hosts(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab("nd0", "nd1", "nd2")
    faults.break_pair(lab, lab["nd1"], lab["nd2"])
    run = lab.plain_doctor()
    check_clean(run, PEERS_S)
    check_cause(run, run.report, "peer-blocked", links=[("nd1", "nd2"), ("nd2", "nd1")])
    assert run.codes == [1, 1, 1], str(run)


@pytest.mark.wide
def test_a_proxy_that_accepts_and_passes_nothing_on(lab: Lab) -> None:
    faults.intercept_ephemeral(lab["nd0"])
    run = lab.plain_doctor()
    check_clean(run, PEERS_S)
    root = check_cause(run, run.report, "peer-intercepted", hosts=["nd0"], links=[("nd1", "nd0")])
    assert "redirect to :15001" in root["message"], str(run)
    assert run.codes == [1, 1], str(run)


def test_large_packets_vanish(lab: Lab) -> None:
    faults.black_hole_large_packets(lab)
    run = lab.plain_doctor()
    check_clean(run, PEERS_S)
    check_cause(run, run.report, "mtu-blackhole", links=[("nd0", "nd1"), ("nd1", "nd0")])
    assert run.codes == [1, 1], str(run)


@pytest.mark.wide
def test_interface_that_does_not_exist(lab: Lab) -> None:
    run = lab.plain_doctor(per_host={"nd1": {"GLOO_SOCKET_IFNAME": "ib7"}})
    check_clean(run, PEERS_S)
    root = check_cause(run, run.report, "interface-missing", hosts=["nd1"], interfaces=["ib7"])
    assert "GLOO_SOCKET_IFNAME" in root["message"] + root["fix"], str(run)
    assert run.codes == [1, 1], str(run)


@pytest.mark.wide
def test_a_filter_that_drops_what_it_would_answer_elsewhere(lab: Lab) -> None:
    """No firewall: nd1 is called at eth1, and its way back is eth0."""
    host, port = lab["nd1"], "q1"
    ends = ("type", "veth", "peer", "name", "eth1", "netns", str(host.init))
    lab.in_switch("ip", "link", "add", port, *ends)
    lab.in_switch("ip", "link", "set", port, "master", "br0", "up")
    host.call("ip", "addr", "add", "10.88.0.2/24", "dev", "eth1")
    host.call("ip", "link", "set", "eth1", "up")
    settings = "for each in all/rp_filter all/arp_ignore; do echo 1 > $each; done"
    host.call("sh", "-ec", f"cd /proc/sys/net/ipv4/conf; {settings}")
    lab["nd0"].call("ip", "route", "add", "10.88.0.0/24", "dev", "eth0")
    run = lab.plain_doctor(per_host={"nd1": {"GLOO_SOCKET_IFNAME": "eth1"}})
    check_clean(run, PEERS_S)
    # That the hosts chose two networks is explained by the calls, and these by the filter.
    codes = ("rp-filter-strict", "interface-unroutable")
    root = check_cause(run, run.report, codes, hosts=["nd1"], interfaces=["eth1"])
    assert root["code"] == "rp-filter-strict", str(run)
    assert "packets from 192.168.77.1 are dropped on arrival" in root["message"], str(run)
    assert "leave by eth0" in root["message"], str(run)
    assert run.codes == [1, 1], str(run)


def test_a_firewall_that_limits_new_connections(make_lab: Callable[..., Lab]) -> None:
    """One connection at a time is accepted, and a job makes many."""
    lab = make_lab("nd0", "nd1", "nd2")
    faults.incoming(
        lab["nd1"],
        "tcp dport 32768-60999 tcp flags & (syn | ack) == syn "
        "limit rate over 1/second burst 3 packets drop",
    )
    run = lab.plain_doctor("--select", "firewall", nproc=2)
    check_clean(run, PEERS_S)
    root = check_cause(run, run.report, "peer-blocked", hosts=["nd1"])
    assert "connections in 2 s, begun at once, twice" in root["message"], str(run)
    assert set(run.codes) == {1}, str(run)


def test_addresses_that_programs_would_tell(lab: Lab) -> None:
    """nd1's default route is in a network of its own, and both hosts tell the address of nd0."""
    host = lab["nd1"]
    ends = ("type", "veth", "peer", "name", "mgmt0", "netns", str(host.init))
    lab.in_switch("ip", "link", "add", "q1", *ends)
    lab.in_switch("ip", "link", "set", "q1", "up")
    for command in (
        ("addr", "add", "10.99.0.2/24", "dev", "mgmt0"),
        ("link", "set", "mgmt0", "up"),
        ("route", "replace", "default", "dev", "mgmt0"),
    ):
        host.call("ip", *command)
    few = ("--select", "advertised_addresses")
    run = lab.plain_doctor("--select", "advertised_addresses,firewall")
    check_clean(run, PEERS_S)
    assert run.report is not None, str(run)
    (found,) = (f for f in run.report["findings"] if f["check"] == "advertised_addresses")
    assert (found["code"], found["where"]["hosts"]) == ("advertised-unreachable", ["nd1"]), str(run)
    assert "default route 10.99.0.2" in found["message"], str(run)
    assert (found["severity"], run.codes) == ("info", [0, 0]), str(run)

    run = lab.plain_doctor(*few, env={"VLLM_HOST_IP": "192.168.77.1"})
    root = check_cause(run, run.report, "advertised-same", hosts=["nd1"])
    assert root["fix"] == "on nd1: export VLLM_HOST_IP=192.168.77.2", str(run)


@pytest.mark.wide
def test_only_a_window_of_ports_is_open(lab: Lab) -> None:
    """The fix moves the ports of the job into the window, and then it works."""
    host = lab["nd0"]
    faults.incoming(host, "tcp dport { 1024-29499, 29501-39999, 40051-65535 } ct state new drop")
    few = ("--select", "firewall")
    run = lab.plain_doctor(*few)
    check_clean(run, PEERS_S)
    root = check_cause(
        run, run.report, ("peer-blocked", "peer-one-way"), hosts=["nd0"], links=[("nd1", "nd0")]
    )
    said = 'on nd0: sysctl -w net.ipv4.ip_local_port_range="40000 40050" (51 ports are '
    assert said in root["fix"], str(run)
    host.call("sh", "-c", "echo 40000 40050 > /proc/sys/net/ipv4/ip_local_port_range")
    run = lab.plain_doctor(*few)
    check_clean(run, PEERS_S)
    assert run.codes == [0, 0], str(run)


@pytest.mark.wide
def test_two_data_interfaces_in_one_network(lab: Lab) -> None:
    """Either answers for both, until the fix keeps them apart."""
    host = lab["nd1"]
    ends = ("type", "veth", "peer", "name", "eth1", "netns", str(host.init))
    lab.in_switch("ip", "link", "add", "q1", *ends)
    lab.in_switch("ip", "link", "set", "q1", "master", "br0", "up")
    host.call("ip", "addr", "add", "192.168.77.102/24", "dev", "eth1")
    host.call("ip", "link", "set", "eth1", "up")
    few = ("--backend", "nccl", "--select", "interfaces,rp_filter,neighbours")
    run = lab.plain_doctor(*few)
    check_clean(run, PEERS_S)
    assert run.report is not None, str(run)
    (found,) = run.report["root_causes"]
    assert (found["code"], found["where"]["hosts"]) == ("arp-flux", ["nd1"]), str(run)
    assert found["where"]["interfaces"] == ["eth0", "eth1"], str(run)
    assert "what is sent from 192.168.77.102 does not leave by eth1" in found["message"], str(run)
    host.call("sh", "-c", found["fix_steps"][0]["command"])
    run = lab.plain_doctor(*few)
    check_clean(run, PEERS_S)
    assert run.report is not None, str(run)
    assert run.report["root_causes"] == [], str(run)
