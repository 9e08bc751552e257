"""Hosts that have one address."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from nccl_doctor.api import Cluster, Context, Launch, Severity
from nccl_doctor.checks.duplicate_address import DuplicateAddress
from nccl_doctor.toolkit.containers import USER_NAT
from tests.support.clusters import make_cluster, on_one_machine, shut_out
from tests.support.findings import judge, only
from tests.support.rows import each_row

CHECK = DuplicateAddress()


def host(address: str | None, *others: str, nic: str = "eth0") -> dict[str, Any]:
    return {"likely": [nic, address] if address else None, "others": list(others)}


def cluster(*hosts: dict[str, Any], **fields: Any) -> Cluster:
    names = [f"nd{i}" for i in range(len(hosts))]
    seen = dict(zip(names, hosts, strict=True))
    return make_cluster(names, check="duplicate_address", by_host=seen, **fields)


def test_hosts_with_addresses_of_their_own_are_fine_whatever_their_bridges_have() -> None:
    bridges = [host(f"192.168.77.{i}", "172.17.0.1") for i in (1, 2, 3)]
    assert judge(CHECK, cluster(*bridges)) == []
    assert judge(CHECK, cluster(host(None), host(None))) == []


def test_two_hosts_with_one_address_are_both_named_and_no_other() -> None:
    same = host("192.168.77.2")
    made = cluster(host("192.168.77.1"), same, same)
    for seen in (made, shut_out(made, "nd2")):
        found = only(CHECK, seen, "address-duplicate", hosts=["nd1", "nd2"], interfaces=["eth0"])
        assert found.level is Severity.FAIL
        assert "192.168.77.2 is the address of 2 hosts" in found.message


def test_hosts_that_met_by_another_address_are_only_told() -> None:
    """As in virtual machines that all have 10.0.2.15 behind address translation."""
    made = cluster(host("10.0.2.15", "192.168.56.2"), host("10.0.2.15", "192.168.56.3"))
    (found,) = judge(CHECK, made)
    assert found.level is Severity.INFO
    (found,) = judge(CHECK, shut_out(made, "nd1"))
    assert found.level is Severity.FAIL


def test_a_host_that_has_the_address_of_another_one_beside_its_own() -> None:
    extra = {**host("192.168.77.3", "192.168.77.2"), "places": {"192.168.77.2": ["eth0:1", 24]}}
    made = cluster(host("192.168.77.1"), host("192.168.77.2"), extra)
    where = {"hosts": ["nd1", "nd2"], "interfaces": ["eth0", "eth0:1"]}
    found = only(CHECK, made, "address-duplicate", **where)
    assert found.level is Severity.FAIL
    assert "the address of nd1, and nd2 has it too" in found.message
    assert "ip addr del 192.168.77.2/24 dev eth0:1" in found.fix
    older = {key: value for key, value in extra.items() if key != "places"}
    made = cluster(host("192.168.77.1"), host("192.168.77.2"), older)
    found = only(CHECK, made, "address-duplicate", hosts=["nd1", "nd2"], interfaces=["eth0"])
    assert "ip addr show to 192.168.77.2" in found.fix
    floating = [host(f"192.168.77.{i}", "192.168.77.99") for i in (1, 2)]
    assert judge(CHECK, cluster(*floating)) == [], "no host is reached by it alone"


@each_row(
    ("runtimes", "fix"),
    [
        (("docker", "docker"), "# docker run --network=host (on the machine itself)"),
        (("podman", "podman"), "# podman run --network=host (on the machine itself)"),
        (("docker", "podman"), "# docker run --network=host (on the machine itself)"),
        (("kubernetes", "kubernetes"), "hostNetwork: true in the spec of every pod"),
        (("docker", ""), "arping -D -c 3 172.17.0.2 (who answers); or give all but one"),
        ((USER_NAT, USER_NAT), "give the virtual machine an interface in the network of the mach"),
    ],
)
def test_containers_behind_bridges_of_their_own(runtimes: tuple[str, str], fix: str) -> None:
    """They met at a published port, and publish an address that leads each to itself."""
    a, b = ({**host("172.17.0.2"), "container": name} for name in runtimes)
    made = cluster(a, b, host("192.168.77.3"))
    for seen in (made, shut_out(made, "nd1")):
        found = only(CHECK, seen, "address-duplicate", hosts=["nd0", "nd1"], interfaces=["eth0"])
        assert found.level is Severity.FAIL
        assert found.fix.removeprefix("on every host: ").startswith(fix)
        assert (", each a " in found.message) is all(runtimes)
        assert ("a virtual machine behind" in found.message) is (USER_NAT in runtimes)


def test_a_container_with_a_network_of_the_job_beside_the_bridge() -> None:
    a, b = ({**host("172.17.0.2", f"10.0.0.{i}"), "container": "docker"} for i in (1, 2))
    (found,) = judge(CHECK, cluster(a, b))
    assert found.level is Severity.INFO
    assert "keep the job off it" in found.fix


def test_two_node_ranks_on_one_machine_have_one_address() -> None:
    made = cluster(host("192.168.77.1"), host("192.168.77.1"))
    same = made.hosts[0]
    hosts = tuple(replace(h, name=same.name, addresses=same.addresses) for h in made.hosts)
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    assert judge(CHECK, replace(made, hosts=hosts, ranks=ranks)) == []


def test_containers_with_the_network_of_their_machine_have_one_address() -> None:
    same = host("192.168.77.1", "192.168.77.9")
    made = cluster(same, {**same, "others": ["192.168.77.1"]})
    assert len(judge(CHECK, made)) == 2
    assert judge(CHECK, on_one_machine(made, "nd0", "nd1")) == []


def test_this_host() -> None:
    found = json.loads(json.dumps(CHECK.observe(Context(launch=Launch(), env={}))))
    assert found["likely"] is None or not found["likely"][1].startswith("127.")
