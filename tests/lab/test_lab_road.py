"""Faults on the way to the master: name, route, port.

The host that cannot get in says why in a report of its own; the coordinator says who is missing.
"""

from __future__ import annotations

import os
import sysconfig
import threading
from pathlib import Path

import pytest

import nccl_doctor
from nccl_doctor.toolkit.containers import container_of
from tests.lab import faults
from tests.lab.lab import MASTER_PORT, MEET, PATIENT, Lab
from tests.lab.reading import SIGN_IN_S, check_cause, check_clean, loud, view_of
from tests.lab.run import Run
from tests.lab.test_lab_merge import check_merged

LATE_S = 6.0


def check_shut(run: Run, rule: str) -> None:
    """The coordinator misses node 1, and names the rule of its own host that keeps it out."""
    root = check_cause(run, run.report, "port-blocked", hosts=["nd0"])
    assert root["confidence"] == "certain"
    assert rule in root["message"], str(run)
    assert root["fix"].startswith("on nd0: nft insert rule inet fault input "), str(run)


def check_absent(run: Run) -> None:
    """The coordinator misses node 1 and accuses nobody."""
    check_cause(run, run.report, "host-absent", nodes=[1], ranks=[1])


@pytest.mark.wide
def test_name_unresolvable_on_one_host(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd0=""))
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_cause(run, view_of(run, 1), "addr-unresolvable", hosts=["nd1"])
    assert "nd0" in root["message"] + root["fix"]
    check_absent(run)
    assert run.codes == [1, 1], str(run)


@pytest.mark.wide
def test_own_name_is_a_loopback_address(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd1="127.0.1.1"))
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_cause(run, run.report, "addr-loopback", hosts=["nd1"])
    assert "127.0.1.1" in root["message"]
    assert run.codes == [1, 1], str(run)
    assert run.partial == {}


@pytest.mark.wide
def test_stale_address_of_the_master(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd0="192.168.77.99"))
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    # By itself nd1 cannot know: nd0 may be off. Merged with nd0's report, it is nd1's own mistake.
    root = check_cause(run, view_of(run, 1), "no-route", links=[("nd1", "nd0")])
    assert "192.168.77.99" in root["message"]
    check_absent(run)
    assert run.codes == [1, 1], str(run)


@pytest.mark.wide
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
        pytest.param("icmp type admin-prohibited", "port-blocked", marks=pytest.mark.wide),
        ("icmp type port-unreachable", "port-blocked"),
        pytest.param("tcp reset", "port-refused", marks=pytest.mark.wide),
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
    check_shut(run, f"tcp dport {MASTER_PORT} {'drop' if how == 'drop' else 'reject'}")
    assert run.codes == [1, 1], str(run)


def test_a_firewall_that_is_sure_to_stay_is_not_waited_for(lab: Lab) -> None:
    """A host that cannot get in leaves when no waiting can help, not at the join time-out."""
    faults.drop_master_port(lab["nd0"])
    run = lab.plain_doctor("--join-timeout", "20")
    check_clean(run)
    root = check_cause(run, view_of(run, 1), "port-blocked", links=[("nd1", "nd0")])
    assert "but port 29501 of that host does" in root["message"], str(run)
    assert "is up" in root["evidence"]["final"], str(run)
    assert run.done[1].seconds < run.done[0].seconds - 5, str(run)


def test_a_host_that_drops_its_own_calls_is_the_one_to_blame(lab: Lab) -> None:
    faults.drop_calls_out(lab["nd1"])
    run = lab.plain_doctor("--join-timeout", "12")
    check_clean(run, 12 + SIGN_IN_S)
    root = check_cause(run, view_of(run, 1), "port-blocked", hosts=["nd1"])
    assert "nft inet fault output" in root["message"], str(run)
    assert root["fix"].startswith("on nd1: nft insert rule inet fault output "), str(run)
    check_absent(run)
    assert run.codes == [1, 1], str(run)


def test_a_name_that_comes_late_is_waited_for(lab: Lab) -> None:
    lab["nd1"].set_hosts(lab.names_text(nd0=""))
    born = threading.Timer(LATE_S, lab.restore_names)
    born.start()
    try:
        run = lab.plain_doctor("--join-timeout", "20")
    finally:
        born.join()
    check_clean(run)
    assert run.codes == [0, 0], str(run)
    assert run.report is not None, str(run)
    assert run.report["verdict"] == "pass", str(run)
    assert loud(run.report) == [], str(run)
    assert run.partial == {}


def test_a_host_that_does_not_reach_its_own_address(lab: Lab) -> None:
    faults.drop_own_address(lab["nd1"])
    run = lab.plain_doctor(*PATIENT, nproc=2)
    check_clean(run)
    root = check_cause(run, run.report, "own-address-blocked", hosts=["nd1"])
    assert lab["nd1"].address in root["message"], str(run)
    assert run.partial == {}


def test_two_hosts_with_one_address(lab: Lab) -> None:
    """They never meet; only their reports together tell what neither could know."""
    lab["nd1"].call("ip", "addr", "flush", "dev", "eth0")
    lab["nd1"].call("ip", "addr", "add", f"{lab['nd0'].address}/24", "dev", "eth0")
    for host in lab.hosts:
        host.set_hosts(lab.names_text(nd1=lab["nd0"].address))
    run = lab.plain_doctor()
    check_clean(run, SIGN_IN_S)
    root = check_cause(run, view_of(run, 1), "addr-not-on-master", hosts=["nd1"])
    assert lab["nd0"].address in root["message"], str(run)
    check_absent(run)
    merged = check_merged(run, "address-duplicate", hosts=["nd0", "nd1"], interfaces=["eth0"])
    assert lab["nd0"].address in merged["message"], str(run)


_BRIDGED = """
mount --make-rprivate / && mount -t tmpfs tmpfs /run && mkdir /run/netns
ip netns add box
ip link add inside type veth peer name eth0 netns box
ip addr add 172.17.0.1/16 dev inside
ip link set inside up
ip -n box addr add 172.17.0.2/16 dev eth0
ip -n box link set eth0 up
ip -n box link set lo up
ip -n box route add default via 172.17.0.1
echo 1 > /proc/sys/net/ipv4/ip_forward
nft -f - <<END
table ip nat {
    chain pre {
        type nat hook prerouting priority -100
        fib daddr type local tcp dport PORT dnat to 172.17.0.2
    }
    chain post {
        type nat hook postrouting priority 100
        oifname eth0 masquerade
        ip saddr 172.17.0.2 ip daddr 172.17.0.2 masquerade
    }
}
END
"""
"""What Docker's default bridge and `docker run -p PORT:PORT` make of a machine."""


@pytest.mark.wide  # the rules have tests on made-up clusters
def test_containers_behind_a_bridge_of_each_machine(lab: Lab) -> None:
    """They meet at the published port, and then publish an address that is each one's own."""
    for host in lab.hosts:
        host.call("sh", "-ec", _BRIDGED.replace("PORT", str(MASTER_PORT)))
        host.set_hosts(f"127.0.0.1 localhost\n172.17.0.2 {host.name}\n")
    run = lab.own_doctor(
        *PATIENT,
        nproc=1,
        wrap={name: ["ip", "netns", "exec", "box"] for name in lab.names},
        per_host={name: ["--master-addr", lab["nd0"].address] for name in lab.names},
    )
    check_clean(run)
    root = check_cause(
        run, run.report, "address-duplicate", hosts=["nd0", "nd1"], interfaces=["eth0"]
    )
    assert root["message"].startswith("172.17.0.2 is the address of 2 hosts")
    assert ("--network=host" in root["fix"]) is bool(container_of(Path("/"), os.environ))
    assert run.codes == [1, 1], str(run)


@pytest.mark.wide
def test_a_host_behind_an_address_translation(lab: Lab) -> None:
    """As a virtual machine: its calls come from its machine, and nobody can call it."""
    nd0, nd1 = lab.hosts
    nd1.call("sh", "-ec", _BRIDGED.replace("PORT", str(MASTER_PORT)))
    nd1.set_hosts(f"172.17.0.2 {nd1.name}\n{nd0.address} {nd0.name}\n127.0.0.1 localhost\n")
    run = lab.own_doctor(
        nproc=1,
        job=["never_started.py"],
        rendezvous="c10d",
        wrap={"nd0": [], "nd1": ["ip", "netns", "exec", "box"]},
        env={"GLOO_SOCKET_IFNAME": "eth0"},
    )
    check_clean(run)
    root = check_cause(run, run.report, "peer-no-route", hosts=["nd1"], links=[("nd0", "nd1")])
    told = f"nd1 tells 172.17.0.2, and others see it call from {nd1.address}; "
    assert root["message"].startswith(told), str(run)
    assert run.codes == [1, 1], str(run)


_WHO = """
import sys
from nccl_doctor.toolkit.net.dial import dial
for each in sys.argv[1:]:
    address, port = each.rsplit("@", 1)
    call, _ = dial(address, int(port), 2.0)
    print(call.outcome, call.icmp.sender if call.icmp else "", sep=" ")
"""


def test_a_router_that_cannot_deliver_is_no_firewall(lab: Lab) -> None:
    """One error number, four causes: only the kernel's copy of the message tells them apart."""
    nd0, nd1 = lab.hosts
    router = "192.168.77.254"
    lab.in_switch(
        *("sh", "-c"),
        f"ip addr add {router}/24 dev br0; cd /proc/sys/net/ipv4;"
        "echo 1 > ip_forward; echo 0 > icmp_ratelimit;"
        "ip route add unreachable 10.8.1.0/24; ip route add prohibit 10.8.2.0/24",
    )
    nd1.call("ip", "route", "add", "10.8.0.0/16", "via", router)
    for host in (nd0, nd1):
        host.call("ip", "addr", "add", f"fd00::{host.index + 1}/64", "dev", "eth0", "nodad")
    faults.incoming(nd0, "tcp dport 5001 reject with icmpx type host-unreachable")
    faults.incoming(nd0, "tcp dport 5002 reject with icmpx type admin-prohibited")
    faults.incoming(nd0, "tcp dport 5004 reject")
    asked = {
        "10.8.3.1@9": f"turned-back {router}",  # no route there: ENETUNREACH
        "10.8.1.1@9": f"turned-back {router}",  # the host is off: EHOSTUNREACH
        "10.8.2.1@9": f"rejected {router}",  # a firewall on the way
        f"{nd0.address}@5001": f"rejected {nd0.address}",  # the host itself
        f"{nd0.address}@5002": f"rejected {nd0.address}",
        "fd00::1@5002": "rejected fd00::1",  # EACCES, and no rule of the caller
        f"{nd0.address}@5003": "refused ",
        f"{nd0.address}@5004": f"rejected {nd0.address}",  # the same error number
        "fd00::1@5004": "rejected fd00::1",
        "10.9.0.1@9": "unreachable ",  # nd1 itself has no route
    }
    ours = [str(Path(nccl_doctor.__file__).parents[1]), sysconfig.get_paths()["purelib"]]
    process = nd1.python(_WHO, *asked, env={"PYTHONPATH": os.pathsep.join(ours)})
    assert process.wait(20) == 0, process.stderr
    assert process.stdout.splitlines() == list(asked.values())


@pytest.mark.wide
def test_a_silent_address_before_the_one_that_answers(lab: Lab) -> None:
    """The job would start two minutes late; the report comes in time, and says so."""
    nd0, nd1 = lab.hosts
    silent = "192.168.77.3"  # before nd0's own address, as it has more bits in common with nd1's
    nd0.call("ip", "addr", "add", f"{silent}/24", "dev", "eth0")
    faults.incoming(nd0, f"ip daddr {silent} drop")
    nd1.set_hosts(f"{silent} nd0\n" + lab.names_text())
    run = lab.plain_doctor(*PATIENT, *MEET)
    assert run.codes == [0, 0], str(run)
    (said,) = loud(run.report)
    assert said["code"] == "port-blocked", str(run)
    assert said["where"]["links"] == [["nd1", "nd0"]]
    assert silent in said["message"]
