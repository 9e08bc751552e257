"""The own name of each host, as gloo reads it."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Context, Finding, Launch, Severity
from nccl_doctor.checks.host_identity import HostIdentity
from nccl_doctor.checks.own_name import OwnName
from nccl_doctor.judge.causes import explain, root_causes
from nccl_doctor.toolkit.nccl.interface_choice import gloo_choice
from nccl_doctor.toolkit.net.interfaces import Interface, first_bindable
from nccl_doctor.toolkit.net.names import LookUp
from tests.support.clusters import make_cluster, outcome, reread, shut_out
from tests.support.findings import judge
from tests.support.peers import World, choice

CHECK = OwnName()
NAMES = ("nd0", "nd1", "nd2")
ND0, ND1, ND2 = ADDRESSES = ("192.168.77.1", "192.168.77.2", "192.168.77.3")


def look(query: str, *answers: str) -> Any:
    error = "" if answers else "Name or service not known"
    return LookUp(query, answers, error, (0.001,)).to_json()


def facts(host: str, own: Any = None) -> Any:
    """What a host sees; healthy but for what is said."""
    mine = ADDRESSES[NAMES.index(host)]
    return {
        "own": own or look(host, mine),
        "interfaces": [["docker0", ["172.17.0.1"]], ["eth0", [mine, "fe80::1"]]],
    }


def cluster_of(by_host: Any, **fields: Any) -> Cluster:
    return make_cluster(tuple(by_host), check="own_name", by_host=by_host, **fields)


def judged(cluster: Cluster) -> list[Finding]:
    return judge(CHECK, cluster)


def only(cluster: Cluster) -> Finding:
    (found,) = judged(cluster)
    return found


def test_a_silent_name_server_is_only_likely_to_stay_so():
    by_host = {name: facts(name) for name in NAMES}
    by_host["nd1"] = facts("nd1", look("nd1"))
    assert only(cluster_of(by_host, backend="gloo")).confidence is Confidence.CERTAIN
    by_host["nd1"]["own"]["timed_out"] = True
    found = only(cluster_of(by_host, backend="gloo"))
    assert (found.where.hosts, found.confidence) == (("nd1",), Confidence.LIKELY)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_healthy_cluster_has_no_findings(backend: str, complete: bool):
    by_host = {name: facts(name) for name in NAMES}
    assert judged(cluster_of(by_host, backend=backend, complete=complete)) == []


def test_a_link_local_address_that_comes_first_is_the_one_that_gloo_takes():
    """nss-myhostname lists every address, and a loopback one of /etc/hosts may come after."""
    by_host = {name: facts(name) for name in NAMES}
    by_host["nd1"] = facts("nd1", look("nd1", "fe80::1%eth0", "127.0.1.1"))
    assert judged(cluster_of(by_host, backend="gloo")) == []
    by_host["nd1"] = facts("nd1", look("nd1", "fe80::9%eth0", "127.0.1.1"))  # not its own
    assert "127.0.1.1" in only(cluster_of(by_host, backend="gloo")).message


@pytest.mark.parametrize(
    ("answers", "published"),
    [
        (["192.168.77.1"], "192.168.77.1"),
        (["fe80::1%eth0", "192.168.77.1"], "fe80::1"),
        (["10.0.0.9", "192.168.77.1"], "192.168.77.1"),
        (["127.0.1.1", "192.168.77.1"], "127.0.1.1"),
        (["10.0.0.9"], ""),
        ([], ""),
    ],
)
def test_what_gloo_publishes_is_one_rule_for_both_who_ask(answers: list[str], published: str):
    own = ("192.168.77.1", "fe80::1")
    assert first_bindable(answers, own) == published
    nics = [Interface("eth0", own, up=True, running=True, loopback=False, mtu=1500)]
    (pick,) = gloo_choice(nics, {}, "nd0", answers).picks
    assert pick[1] == (published or "127.0.0.1")


def test_one_host_may_call_itself_loopback():
    seen = facts("nd0", look("nd0", "127.0.1.1"))
    for complete in (True, False):
        assert judged(cluster_of({"nd0": seen}, complete=complete)) == []


def test_two_node_ranks_on_one_machine_may_too():
    assert judged(cluster_of({"nd0": facts("nd0", look("nd0", "127.0.0.1"))}, nnodes=2)) == []


@pytest.mark.parametrize(
    ("own", "code", "words"),
    [
        (look("nd1", "127.0.1.1"), "addr-loopback", "127.0.1.1"),
        (look("nd1", "127.0.1.1", ND1), "addr-loopback", "127.0.1.1"),
        (look("nd1", "10.9.9.9"), "addr-loopback", "10.9.9.9"),
        (look("nd1"), "addr-unresolvable", "Name or service not known"),
        (look("6841231", "0.104.99.143"), "addr-digits-only", "0.104.99.143"),
    ],
)
def test_the_own_name_as_gloo_reads_it(own: Any, code: str, words: str):
    by_host = {"nd0": facts("nd0"), "nd1": facts("nd1", own), "nd2": facts("nd2")}
    found = only(cluster_of(by_host))
    assert (found.code, found.where.hosts) == (code, ("nd1",))
    assert found.level is Severity.FAIL
    assert f"own host name {own['query']}" in found.message
    assert words in found.message
    nobody_s = "that the host does not have" in found.kind.title
    assert nobody_s is (words == "10.9.9.9")
    hosts_file = "/etc/hosts" in found.fix
    assert hosts_file is (code != "addr-digits-only")  # no file makes a name of a number
    assert "GLOO_SOCKET_IFNAME=eth0" in found.fix
    assert only(cluster_of(by_host, backend="nccl")).level is Severity.WARN
    told = {2: {"GLOO_SOCKET_IFNAME": "eth0"}, 3: {"GLOO_SOCKET_IFNAME": "eth0"}}
    assert judged(cluster_of(by_host, env=told)) == []


def test_a_host_that_took_the_address_of_another_has_lost_its_own():
    by_host = {name: facts(name) for name in NAMES}
    by_host["nd2"] = facts("nd2", look("nd2", "10.9.9.9"))
    by_host["nd2"]["interfaces"][1][1][0] = ND1
    found = only(cluster_of(by_host))
    assert (found.where.hosts, found.explained_by) == (("nd2",), "address-duplicate")
    by_host["nd2"]["interfaces"][1][1][0] = "192.168.77.9"  # nobody else has this one
    assert only(cluster_of(by_host)).explained_by is None


def test_a_clone_is_led_to_the_host_whose_name_it_has():
    told = {0: facts("nd0"), 2: facts("nd1", look("nd0", ND0)), 4: facts("nd2")}
    known = {rank: {ALONE: outcome(each)} for rank, each in told.items()}
    made = make_cluster(("nd0", "nd0", "nd2"))
    hosts = tuple(
        replace(host, facts=reread({"own_name": known[2 * host.id], **identity(host.id)}))
        for host in made.hosts
    )
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in made.ranks)
    cluster = replace(made, hosts=hosts, ranks=ranks)
    found = [*judged(cluster), *judge(HostIdentity(), cluster)]
    assert {each.code for each in found} == {"addr-loopback", "hostname-duplicate"}
    (root,) = root_causes(explain(found, cluster))
    assert (root.code, root.where.hosts) == ("hostname-duplicate", ("nd0",))
    assert root.level is Severity.FAIL


def identity(host: int) -> Any:
    seen = {"boot_id": "b", "machine_id": None, "image": False, "netns": host}
    return {"host_identity": {ALONE: outcome(seen)}}


def test_a_name_whose_first_usable_address_is_on_the_network_is_fine():
    own = look("nd1", "10.9.9.9", ND1, "127.0.1.1")
    assert judged(cluster_of({"nd0": facts("nd0"), "nd1": facts("nd1", own)})) == []


def test_the_own_name_is_not_why_a_host_did_not_come_in():
    """A failure of this layer would explain the port's, which it is not the cause of."""
    seen = facts("nd1", look("nd1", "127.0.1.1"))
    found = only(cluster_of({"nd1": seen}, nnodes=2, complete=False))
    assert found.level is Severity.WARN


def test_in_a_merged_report_only_hosts_that_came_in_fail_for_their_own_name():
    by_host = {"nd0": facts("nd0", look("nd0", "127.0.1.1")), "nd1": facts("nd1")}
    assert only(shut_out(cluster_of(by_host), "nd1")).level is Severity.FAIL
    assert only(shut_out(cluster_of(by_host), "nd0")).level is Severity.WARN


def test_the_facts_of_this_host():
    """Also where nothing was launched: `env` looks at the name too."""
    started = time.monotonic()
    found = json.loads(json.dumps(CHECK.observe(Context(launch=Launch(), env={}))))
    assert time.monotonic() - started < 5.0
    assert found["own"]["query"] == socket.gethostname()
    assert all(nic != "lo" for nic, _ in found["interfaces"])


def choosing(*addresses: str, backend: str = "gloo") -> Cluster:
    """Hosts whose gloo takes these addresses, whatever decides it."""
    world = World(len(addresses), backend)
    for name, address in zip(world.names, addresses, strict=True):
        world.facts[name]["choices"]["gloo"] = choice([("eth0", address)])
    return world.cluster()


@pytest.mark.parametrize(
    ("addresses", "hosts"),
    [
        ((ND0, "fd00::2", ND2), ["nd1"]),
        (("fd00::1", "fd00::2", ND2), ["nd2"]),
        ((ND0, "fd00::2"), ["nd0", "nd1"]),  # a tie
    ],
)
def test_gloo_stops_where_one_host_has_the_other_family(
    addresses: tuple[str, ...], hosts: list[str]
) -> None:
    found = only(choosing(*addresses))
    assert (found.code, list(found.where.hosts)) == ("gloo-families-differ", hosts)
    assert found.level is Severity.FAIL
    assert "IPv6 on" in found.message
    assert "IPv4 on" in found.message
    assert found.fix.startswith("on every host: export GLOO_SOCKET_IFNAME=eth0")


@pytest.mark.parametrize(
    "addresses", [(ND0, ND1), ("fd00::1", "fe80::2"), (ND0, "::1"), (ND0, "127.0.1.1")]
)
def test_one_family_is_well_and_loopback_is_another_fault(addresses: tuple[str, ...]) -> None:
    assert judged(choosing(*addresses)) == []


def test_a_job_with_nccl_may_have_groups_of_gloo() -> None:
    assert only(choosing(ND0, "fd00::2", backend="nccl")).level is Severity.WARN
