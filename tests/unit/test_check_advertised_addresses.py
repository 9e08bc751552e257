"""Addresses that vLLM, SGLang and Ray would tell the other hosts."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import pytest

from nccl_doctor.api import Cluster, Context, Finding, Launch, Severity, Skip, Untested
from nccl_doctor.checks.advertised_addresses import AdvertisedAddresses
from nccl_doctor.checks.advertised_addresses.rules import DATA, FQDN, ROUTE
from tests.support.clusters import make_cluster
from tests.support.findings import judge, only
from tests.support.peers import DROPPED, OK, OWN, SILENT_PROXY

CHECK = AdvertisedAddresses()
HOSTS = ("nd0", "nd1", "nd2")
FROM = "10.9.8.7"
"""Where failed calls come from."""


def address(index: int, net: str = "192.168.77.") -> str:
    return f"{net}{index + 1}"


def told(by: str, value: str, leads: str | None = None) -> dict[str, str]:
    return {"by": by, "value": value, "address": value if leads is None else leads}


class World:
    """Three hosts whose default route is on a management network, all well, to be spoilt."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, str], Mapping[str, Any]] = {}
        """Attempt of every call to an address of a host, where it is not a good one."""
        self.net = "192.168.77."
        self.routes = {i: address(i, "10.9.9.") for i in range(3)}
        self.variables: dict[int, list[dict[str, str]]] = {}
        self.late: dict[str, float] = {}

    def facts(self, index: int) -> dict[str, Any]:
        return {
            "own": sorted({address(index, self.net), self.routes[index]}),
            "data": address(index, self.net),
            "advertised": self.told(index),
            "late": self.late,
            "peers": {
                str(2 * other): [
                    self.entry(other, address(other, self.net), [DATA]),
                    self.entry(
                        other, self.routes[other], [each["by"] for each in self.told(other)]
                    ),
                ]
                for other in range(3)
                if other != index
            },
        }

    def told(self, index: int) -> list[dict[str, str]]:
        route = told(ROUTE, self.routes[index])
        name = told(FQDN, f"nd{index}.example", address(index, self.net))
        return [*self.variables.get(index, ()), route, name]

    def entry(self, other: int, to: str, roles: list[str]) -> dict[str, Any]:
        attempt = self.calls.get((other, to), OK)
        attempts = [attempt] * (1 if attempt in (OK, OWN) else 2)
        nic = "eth0" if DATA in roles else "mgmt0"
        entry = {"address": to, "interface": nic, "port": 4, "roles": roles, "attempts": attempts}
        return entry if attempt is OK else {**entry, "source": FROM}

    def cluster(self) -> Cluster:
        facts = {f"nd{i}": self.facts(i) for i in range(3)}
        return make_cluster(HOSTS, check=CHECK.name, by_host=facts, round_name="calls")

    def judge(self) -> list[Finding]:
        return judge(CHECK, self.cluster())


def test_a_management_network_that_can_be_reached_is_not_worth_a_word() -> None:
    assert World().judge() == []


def test_hosts_with_ipv6_alone_are_well() -> None:
    world = World()
    world.net, world.routes = "fd00::", {i: f"fd00::{i + 1}" for i in range(3)}
    for i in range(3):
        world.variables[i] = [told("VLLM_HOST_IP", f"fd00::{i + 1}")]
    assert world.judge() == []


def test_addresses_that_check_firewall_has_called_are_not_called_again() -> None:
    world = World()
    facts = {f"nd{i}": world.facts(i) for i in range(3)}
    for i in range(3):
        data, routed = address(i, world.net), world.routes[i]
        facts[f"nd{i}"] = {**facts[f"nd{i}"], "reached": [data]}
        for entries in facts[f"nd{i}"]["peers"].values():
            entries[:] = [entry for entry in entries if DATA not in entry["roles"]]
        if i == 1:
            world.calls[i, routed] = DROPPED
    for i in (0, 2):
        facts[f"nd{i}"]["peers"]["2"] = [world.entry(1, world.routes[1], [ROUTE])]
    cluster = make_cluster(HOSTS, check=CHECK.name, by_host=facts, round_name="calls")
    only(CHECK, cluster, "advertised-unreachable", hosts=["nd1"])


def test_the_round_knows_what_check_firewall_has_reached() -> None:
    matrix = {
        f"nd{i}": {
            "peers": {
                str(2 * other): [
                    {"address": "fe80::1%2", "attempts": [OK]},
                    {"address": f"10.0.0.{other}", "attempts": [OK if other < 2 else DROPPED]},
                    {"address": "10.1.0.9", "attempts": []},
                ]
                for other in range(3)
                if other != i
            }
        }
        for i in range(3)
    }
    cluster = make_cluster(HOSTS, check="firewall", by_host=matrix, round_name="matrix")
    (round_,) = CHECK.plan(cluster)
    assert round_.params["reached"] == {
        "0": ["10.0.0.0", "fe80::1"],
        "2": ["10.0.0.1", "fe80::1"],
        "4": ["fe80::1"],
    }
    (round_,) = CHECK.plan(World().cluster())
    assert round_.params["reached"] is None


def test_own_values_of_the_variables_are_right() -> None:
    world = World()
    for i in range(3):
        world.variables[i] = [told("VLLM_HOST_IP", address(i)), told("HOST_IP", address(i))]
    assert world.judge() == []


def test_a_default_route_into_a_closed_network_is_information_on_its_host() -> None:
    world = World()
    world.calls[1, world.routes[1]] = DROPPED
    found = only(CHECK, world.cluster(), "advertised-unreachable", hosts=["nd1"])
    assert found.level is Severity.INFO
    assert "default route 10.9.9.2: no answer" in found.message
    assert "on nd1: export VLLM_HOST_IP=192.168.77.2" in found.fix


def test_the_same_address_of_nat_on_every_host_is_out_of_reach() -> None:
    world = World()
    world.routes = dict.fromkeys(range(3), "10.0.2.15")
    world.calls = {(i, "10.0.2.15"): OWN for i in range(3)}
    found = only(CHECK, world.cluster(), "advertised-unreachable", hosts=HOSTS)
    assert (found.level, found.message.endswith("the caller has the same address")) == (
        Severity.INFO,
        True,
    )


def test_nobody_asks_for_the_default_route_where_a_variable_says_the_address() -> None:
    world = World()
    for i in range(3):
        world.variables[i] = [told("SGLANG_HOST_IP", address(i))]
        world.calls[i, world.routes[i]] = DROPPED
    assert world.judge() == []


def test_an_address_at_which_a_host_read_late_is_not_out_of_reach() -> None:
    world = World()
    world.calls[1, world.routes[1]] = SILENT_PROXY
    assert [found.code for found in world.judge()] == ["advertised-unreachable"]
    world.late = {FROM: 3.4}
    assert world.judge() == []


def test_a_host_that_nobody_reaches_at_all_is_not_the_matter_of_this_check() -> None:
    world = World()
    world.calls = {(1, world.routes[1]): DROPPED, (1, address(1)): DROPPED}
    assert world.judge() == []


def test_a_variable_with_the_address_of_another_network_is_a_failure() -> None:
    world = World()
    world.variables[2] = [told("VLLM_HOST_IP", world.routes[2])]
    world.calls[2, world.routes[2]] = DROPPED
    codes = {(f.code, f.level, f.where.hosts) for f in world.judge()}
    assert codes == {("advertised-unreachable", Severity.FAIL, ("nd2",))}


@pytest.mark.parametrize(("value", "leads"), [("10.1.1.1", None), ("nobody", "")])
def test_a_value_that_is_no_address_of_the_host(value: str, leads: str | None) -> None:
    world = World()
    world.variables[1] = [told("VLLM_HOST_IP", value, leads)]
    found = only(CHECK, world.cluster(), "advertised-not-own", hosts=["nd1"])
    assert found.level is Severity.FAIL
    assert found.fix == "on nd1: export VLLM_HOST_IP=192.168.77.2"


def test_one_value_on_every_host_names_those_that_do_not_have_it() -> None:
    world = World()
    for i in range(3):
        world.variables[i] = [told("VLLM_HOST_IP", address(0))]
    found = only(CHECK, world.cluster(), "advertised-same", hosts=["nd1", "nd2"])
    assert (
        found.level,
        "192.168.77.1: on 3 hosts, which is an address of nd0" in found.message,
    ) == (
        Severity.FAIL,
        True,
    )


@pytest.mark.parametrize(("value", "level"), [("192.168.77.1", "warn"), ("172.20.0.9", "info")])
def test_host_ip_of_a_pod_is_its_node_and_only_information(value: str, level: str) -> None:
    world = World()
    for i in range(3):
        world.variables[i] = [told("HOST_IP", value)]
    (found,) = world.judge()
    assert (found.code, found.level.value) == ("advertised-same", level)


def test_loopback_is_information_as_engines_may_stay_on_their_hosts() -> None:
    world = World()
    for i in range(3):
        world.variables[i] = [told("VLLM_HOST_IP", "127.0.0.1")]
    found = only(CHECK, world.cluster(), "advertised-unreachable", hosts=HOSTS)
    assert found.level is Severity.INFO


def test_hosts_call_each_other_in_groups_of_eight_and_nobody_is_alone() -> None:
    (many,) = CHECK.plan(make_cluster([f"nd{i}" for i in range(17)], nproc=1))
    assert [len(group) for group in many.groups] == [8, 7, 2]
    assert sorted(seat for group in many.groups for seat in group) == list(range(17))
    with pytest.raises(Skip):
        CHECK.plan(make_cluster(["nd0"]))


def test_observe_says_what_a_variable_leads_to_without_others() -> None:
    env = {"VLLM_HOST_IP": "192.0.2.7", "HOST_IP": " "}
    context = Context(launch=Launch(master_addr=socket.gethostname()), env=env, round="calls")
    with pytest.raises(Untested) as alone:
        CHECK.observe(context)
    facts = alone.value.facts or {}
    assert facts["advertised"][0] == told("VLLM_HOST_IP", "192.0.2.7")
    assert "HOST_IP" not in {each["by"] for each in facts["advertised"]}
