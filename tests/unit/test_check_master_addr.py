"""What check `master_addr` says of made-up names and addresses: code, place, nobody else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Effect, Finding, Severity, Where
from nccl_doctor.checks.master_addr import MasterAddr
from nccl_doctor.judge.causes import explain
from nccl_doctor.model.kinds import COORDINATOR_LOST
from nccl_doctor.toolkit.net.names import LookUp
from tests.support.clusters import change_rank, make_cluster, outcome, shut_out, with_round
from tests.support.findings import judge
from tests.support.fixes import in_full
from tests.support.rows import each_row

CHECK = MasterAddr()
NAMES = ("nd0", "nd1", "nd2")
ND0, ND1, ND2 = ADDRESSES = ("192.168.77.1", "192.168.77.2", "192.168.77.3")


def look(query: str, *answers: str, error: str = "", took: Sequence[float] = (0.001,)) -> Any:
    slow = len(took) > 1 and min(took[:2]) > 1.0
    if not answers:
        error = error or "Name or service not known"
    return LookUp(query, answers, error, tuple(took), slow=slow).to_json()


def facts(host: str, *answers: str, name: str = "nd0", **more: Any) -> Any:
    """What a host sees; healthy but for what is said."""
    mine = ADDRESSES[NAMES.index(host)]
    return {
        "master_addr": name,
        "master": look(name, *(answers or (ND0,))),
        "reverse": [look(address, "nd0") for address in answers or (ND0,)],
        "no_route": [],
        "interfaces": [["docker0", ["172.17.0.1"]], ["eth0", [mine, "fe80::1"]]],
        **more,
    }


def cluster_of(by_host: Mapping[str, Any], **fields: Any) -> Cluster:
    made = make_cluster(tuple(by_host), check="master_addr", by_host=by_host, **fields)
    return made


def view_of_nd1(seen: Any, **fields: Any) -> Cluster:
    """Host nd1 by itself, having not come in: node 1 of 2, ranks 2 and 3."""
    both = make_cluster(
        ("nd0", "nd1"),
        check="master_addr",
        by_host={"nd1": seen},
        absent_nodes=(0,),
        complete=False,
        **fields,
    )
    return replace(both, hosts=both.present_hosts, ranks=both.present)


def judged(cluster: Cluster) -> list[Finding]:
    return judge(CHECK, cluster)


def only(cluster: Cluster) -> Finding:
    (found,) = judged(cluster)
    assert not found.where.links
    assert "\n" not in found.message
    return found


def place(finding: Finding) -> tuple[str, tuple[str, ...]]:
    return finding.code, finding.where.hosts


# -- nothing to say ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_healthy_cluster_has_no_findings(backend: str, complete: bool):
    by_host = {name: facts(name) for name in NAMES}
    assert judged(cluster_of(by_host, backend=backend, complete=complete)) == []


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_one_host_may_meet_on_loopback(name: str):
    seen = facts("nd0", "127.0.0.1", name=name)
    for complete in (True, False):
        assert judged(cluster_of({"nd0": seen}, complete=complete)) == []


def test_two_node_ranks_on_one_machine_may_too():
    seen = facts("nd0", "127.0.0.1", name="127.0.0.1")
    made = cluster_of({"nd0": seen}, nnodes=2)
    assert judged(made) == []


def test_the_masters_own_name_may_be_loopback_to_the_master():
    seen = facts("nd0", "127.0.1.1")
    assert judged(cluster_of({"nd0": seen, "nd1": facts("nd1")})) == []


# -- no answer -----------------------------------------------------------------------------------


def test_unresolvable_on_one_host_blames_that_host_and_knows_the_line_to_add():
    seen = facts("nd1", master=look("nd0"), reverse=[])
    alone = only(view_of_nd1(seen))
    assert place(alone) == ("addr-unresolvable", ("nd1",))
    assert alone.level is Severity.FAIL
    assert "nd0" in alone.message
    assert "Name or service not known" in alone.message
    merged = only(cluster_of({"nd0": facts("nd0"), "nd1": seen}, complete=False))
    assert place(merged) == ("addr-unresolvable", ("nd1",))
    assert f"{ND0} nd0" in merged.fix
    (step,) = merged.fix.steps
    assert step.command == f'echo "{ND0} nd0" >> /etc/hosts'
    assert step.undo.startswith(f"LEFT=$(grep -vxF '{ND0} nd0' /etc/hosts); ")


def test_the_line_to_add_holds_no_stale_answer_of_another_host():
    stale = facts("nd2", "192.168.77.99")
    seen = {"nd0": facts("nd0"), "nd1": facts("nd1", master=look("nd0"), reverse=[]), "nd2": stale}
    findings = judged(cluster_of(seen, complete=False))
    (found,) = (each for each in findings if each.code == "addr-unresolvable")
    assert found.fix.steps[0].command == f'echo "{ND0} nd0" >> /etc/hosts'


def test_slurm_reaches_a_node_whose_name_does_not_resolve():
    seen = facts("nd1", master=look("nd0"), reverse=[])
    env = {rank: {"SLURM_JOB_NODELIST": "nd[0-1]"} for rank in (2, 3)}
    alone = only(view_of_nd1(seen, env=env))
    assert place(alone) == ("addr-unresolvable", ("nd1",))
    assert "# --master-addr $(scontrol show node nd0 | grep " in alone.fix
    merged = cluster_of({"nd0": facts("nd0"), "nd1": seen}, complete=False, env=env)
    assert f"{ND0} nd0" in only(merged).fix  # an address that another host knows is better
    others = {rank: {"SLURM_JOB_NODELIST": "nd[1-3]"} for rank in (2, 3)}
    assert "scontrol" not in only(view_of_nd1(seen, env=others)).fix


def test_a_name_that_came_late_only_warns():
    seen = facts("nd1", master=look("nd0"), reverse=[])
    found = only(cluster_of({"nd0": facts("nd0"), "nd1": seen}))
    assert place(found) == ("addr-unresolvable", ("nd1",))
    assert found.level is Severity.WARN


def test_a_port_in_master_addr_is_told():
    seen = facts("nd1", name="nd0:29500", master=look("nd0:29500"), reverse=[])
    assert "MASTER_PORT" in only(view_of_nd1(seen)).fix


def test_digits_are_no_name():
    found = only(view_of_nd1(facts("nd1", "0.104.99.143", name="6841231")))
    assert place(found) == ("addr-digits-only", ("nd1",))
    assert "0.104.99.143" in found.message


def test_an_address_with_zeros_in_front_is_octal():
    found = only(view_of_nd1(facts("nd1", "8.0.0.1", name="010.0.0.1")))
    assert place(found) == ("addr-digits-only", ("nd1",))
    assert found.message.endswith("a part that begins with 0 is octal")
    assert "--master-addr 10.0.0.1 " in in_full(found.fix)
    assert judged(view_of_nd1(facts("nd1", "10.0.0.1", name="10.0.0.01"))) == []
    seen = facts("nd1", name="10.0.0.08", master=look("10.0.0.08"), reverse=[])
    none = only(view_of_nd1(seen))
    assert place(none) == ("addr-unresolvable", ("nd1",))
    assert "--master-addr 10.0.0.8 " in in_full(none.fix)


@pytest.mark.parametrize("name", ["[::1]", "[fd00::7]"])
def test_env_takes_no_brackets(name: str):
    """torch 2.13.0: --master-addr and tcp:// take them, env:// does not; nor does /etc/hosts."""
    seen = facts("nd1", name=name, master=look(name), reverse=[])
    found = only(view_of_nd1(seen))
    assert place(found) == ("addr-unresolvable", ("nd1",))
    assert f"--master-addr {name[1:-1]} " in in_full(found.fix)
    assert "/etc/hosts" not in in_full(found.fix)


def test_an_address_with_a_zone_is_never_proposed():
    name = "[fe80::1%eth0]"
    found = only(view_of_nd1(facts("nd1", name=name, master=look(name), reverse=[])))
    assert place(found) == ("addr-unresolvable", ("nd1",))
    assert "%" not in in_full(found.fix)


# -- loopback ------------------------------------------------------------------------------------


def test_the_hosts_file_of_one_host_calls_the_master_loopback():
    seen = facts("nd1", "127.0.1.1")
    alone = only(view_of_nd1(seen))
    assert place(alone) == ("addr-loopback", ("nd1",))
    assert alone.level is Severity.FAIL
    assert "127.0.1.1" in alone.message
    merged = only(cluster_of({"nd0": facts("nd0"), "nd1": seen}, complete=False))
    assert place(merged) == ("addr-loopback", ("nd1",))
    assert ND0 in merged.fix


def test_a_host_with_the_name_of_the_master_is_told_to_change_its_name():
    """It is a clone: its own line in the hosts file is right, and to edit it breaks more."""
    made = cluster_of({"nd0": facts("nd0", "127.0.1.1")}, complete=False, nnodes=2)
    made = change_rank(made, 0, rank=1, launch={"rank": 1, "node_rank": 1, "master_addr": "nd0"})
    found = only(made)
    assert place(found) == ("addr-loopback", ("nd0",))
    assert found.message.endswith("; this host, node 1, has that name itself")
    (step,) = found.fix.steps
    assert step.command == "# hostnamectl set-hostname NAME"
    assert found.explained_by == "hostname-duplicate"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_localhost_for_several_hosts_is_said_by_rank_0_too(name: str):
    here = facts("nd0", "127.0.0.1", name=name)
    found = only(cluster_of({"nd0": here, "nd1": None}, absent_nodes=(1,)))
    assert place(found) == ("addr-loopback", ("nd0",))
    assert "2 hosts" in found.message
    assert ND0 in found.fix
    there = facts("nd1", "127.0.0.1", name=name)
    both = judged(cluster_of({"nd0": here, "nd1": there}, complete=False))
    assert {place(f) for f in both} == {("addr-loopback", ("nd0",)), ("addr-loopback", ("nd1",))}


def test_loopback_through_which_everybody_came_in_is_a_tunnel():
    by_host = {name: facts(name, "127.0.0.1", name="localhost") for name in NAMES}
    assert judged(cluster_of(by_host)) == []


# -- another machine -----------------------------------------------------------------------------


def test_a_stale_address_on_one_host():
    by_host = {"nd0": facts("nd0"), "nd1": facts("nd1", "192.168.77.99"), "nd2": facts("nd2")}
    found = only(cluster_of(by_host, complete=False))
    assert place(found) == ("addr-differs", ("nd1",))
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
    assert "192.168.77.99" in found.message
    assert ND0 in found.fix


def test_rank_0_knows_even_against_one():
    by_host = {"nd0": facts("nd0"), "nd1": facts("nd1", "192.168.77.99")}
    assert place(only(cluster_of(by_host, complete=False))) == ("addr-differs", ("nd1",))


def test_without_rank_0_the_majority_is_believed_and_a_tie_is_a_tie():
    def view(*answers: str) -> Cluster:
        by_host = {name: facts(name, answer) for name, answer in zip(NAMES, answers, strict=False)}
        made = cluster_of(by_host, complete=False)
        for rank in made.ranks:
            number = (rank.rank or 0) + 2
            made = change_rank(made, rank.seat, rank=number, launch={"rank": number})
        return made

    odd = only(view("10.0.0.1", "10.0.0.1", "10.0.0.9"))
    assert place(odd) == ("addr-differs", ("nd2",))
    tie = judged(view("10.0.0.1", "10.0.0.9"))
    assert [place(f) for f in tie] == [("addr-differs", ("nd0",)), ("addr-differs", ("nd1",))]
    assert all(f.confidence is Confidence.POSSIBLE for f in tie)
    assert all("no majority" in f.message for f in tie)
    assert {f.fix for f in tie} == {"on every host: # --master-addr ADDRESS (of rank 0's host)"}
    by_endpoint = view("10.0.0.1", "10.0.0.9")
    sources = dict.fromkeys(("master_addr", "master_port"), "--rdzv-endpoint")
    for rank in by_endpoint.ranks:
        by_endpoint = change_rank(by_endpoint, rank.seat, launch={"sources": sources})
    for f in judged(by_endpoint):
        assert "# --rdzv-endpoint ADDRESS:29500" in f.fix
        assert "MASTER_ADDR" not in f.fix


def test_several_addresses_of_the_master_are_all_the_master():
    made = cluster_of({"nd0": facts("nd0", ND0, "10.1.0.1"), "nd1": facts("nd1", "10.1.0.1")})
    master = replace(made.hosts[0], addresses=(ND0, "10.1.0.1"))
    made = replace(made, hosts=(master, made.hosts[1]))
    for seat in (0, 1):
        made = change_rank(made, seat, host=master)
    assert judged(made) == []


def test_a_translated_address_by_which_a_host_did_come_in_is_only_mentioned():
    by_host = {"nd0": facts("nd0"), "nd1": facts("nd1", "203.0.113.7")}
    found = only(cluster_of(by_host))
    assert (place(found), found.level) == (("addr-differs", ("nd1",)), Severity.INFO)


GONE = "192.168.77.99"
"""An address that no host of the job has."""
SILENT = {"passed": [[GONE, "dropped"]]}
PASSED = {"answer": "store", "outcome": "connected", "address": ND0}


def knocked(cluster: Cluster, host: str, **last: Any) -> Cluster:
    """The same hosts, and how the last attempt of check port ended on one of them."""
    name = {"answers": [], "error": "", "came_s": None}
    passed, limit_s = last.pop("passed", []), last.pop("limit_s", None)
    road = {"knock": {"name": name, "last": last, "passed": passed}, "store_timeout_s": limit_s}
    return with_round(cluster, "port", ALONE, {host: road})


@each_row(
    "answers, last, level",
    [
        # torch tries one after the other, and the first one is right
        ((ND0, GONE), PASSED, Severity.INFO),
        ((ND0, GONE), {**PASSED, "answer": "", "outcome": "refused"}, Severity.INFO),
        ((GONE, ND0), PASSED, Severity.WARN),
        ((GONE, ND0), {**PASSED, "answer": "", "outcome": "refused"}, Severity.WARN),
        ((GONE, ND0), {**PASSED, "answer": "", "outcome": "dropped"}, Severity.WARN),
        ((GONE, ND0), {"answer": "", "outcome": "no-neighbour", "address": GONE}, Severity.WARN),
        # a store, or another program, has the calls there
        ((GONE, ND0), {**PASSED, "address": GONE}, Severity.FAIL),
        ((GONE, ND0), {"answer": "other", "outcome": "connected", "address": GONE}, Severity.FAIL),
        # or nobody says no, and the job waits for longer, or not
        ((GONE, ND0), {**PASSED, **SILENT}, Severity.WARN),
        ((GONE, ND0), {**PASSED, **SILENT, "limit_s": 600.0}, Severity.WARN),
        ((GONE, ND0), {**PASSED, **SILENT, "limit_s": 60.0}, Severity.FAIL),
        ((GONE, ND0), {**PASSED, "passed": [[GONE, "refused"]], "limit_s": 60.0}, Severity.WARN),
        ((GONE,), {"answer": "", "outcome": "no-neighbour", "address": GONE}, Severity.FAIL),
    ],
)
def test_a_name_with_several_addresses_of_which_one_is_no_host_of_the_job(
    answers: tuple[str, ...], last: dict[str, Any], level: Severity
) -> None:
    for host in ("nd0", "nd1") if len(answers) > 1 else ("nd1",):
        seen = {"nd0": facts("nd0"), "nd1": facts("nd1"), host: facts(host, *answers)}
        made = knocked(cluster_of(seen), host, **last)
        found = only(shut_out(made, "nd1") if level is Severity.FAIL else made)
        assert (place(found), found.level) == (("addr-differs", (host,)), level)
        assert f"rank 0 is at {ND0}" in found.message
        assert ("torch tries 192.168.77.99 first" in found.message) is (answers == (GONE, ND0))
        assert f"--master-addr {ND0}" in found.fix


def test_on_every_host_in_its_own_order() -> None:
    made = cluster_of({"nd0": facts("nd0", ND0, GONE), "nd1": facts("nd1", GONE, ND0)})
    levels = {found.where.hosts: found.level for found in judged(made)}
    assert levels == {("nd0",): Severity.INFO, ("nd1",): Severity.WARN}


def test_the_master_address_belongs_to_another_host_of_the_job():
    by_host = {name: facts(name, ND2, name="nd2") for name in NAMES}
    found = only(cluster_of(by_host, complete=False))
    assert place(found) == ("addr-not-on-master", ("nd0",))
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.CERTAIN)
    assert "nd2" in found.message
    assert f"--master-addr {ND0}" in found.fix


def test_rank_0_sees_by_itself_that_the_address_is_not_its_own():
    made = cluster_of({"nd0": facts("nd0", ND1, name="nd1"), "nd1": None}, absent_nodes=(1,))
    found = only(made)
    assert place(found) == ("addr-not-on-master", ("nd0",))
    assert (found.level, found.confidence) == (Severity.FAIL, Confidence.LIKELY)


def test_the_host_that_has_the_address_sees_it_too():
    found = only(view_of_nd1(facts("nd1", ND1, name="nd1")))
    assert place(found) == ("addr-not-on-master", ("nd1",))
    assert found.level is Severity.FAIL


OTHERWISE = "on every host: # --master-addr ADDRESS (of the host that runs rank 0)"


@pytest.mark.parametrize(
    ("likely", "runtime", "fix"),
    [
        ("172.17.0.2", "docker", "on every host: # docker run --network=host"),
        ("172.17.0.2", "kubernetes", "hostNetwork: true in the spec of every pod"),
        ("172.17.0.2", "", OTHERWISE),  # such an address by another way
        ("10.0.0.2", "docker", OTHERWISE),  # another network of that container
    ],
)
def test_each_container_behind_a_bridge_takes_the_address_for_its_own(
    likely: str, runtime: str, fix: str
):
    """Docker gives 172.17.0.2 to the first container of every machine: nobody meets anybody."""
    made = view_of_nd1(facts("nd1", "172.17.0.2", name="172.17.0.2"))
    (host,) = made.hosts
    bridge = {"likely": ["eth0", likely], "others": [], "container": runtime}
    seen = {**host.facts, "duplicate_address": {ALONE: outcome(bridge)}}
    host = replace(host, addresses=("172.17.0.2", "10.0.0.2"), facts=seen)
    ranks = tuple(replace(rank, host=host) for rank in made.ranks)
    found = only(replace(made, hosts=(host,), ranks=ranks))
    assert (place(found), found.level) == (("addr-not-on-master", ("nd1",)), Severity.FAIL)
    assert (found.fix or found.kind.fix).startswith(fix)
    behind = fix != OTHERWISE
    assert found.message.endswith("containers behind bridges have the same addresses") is behind


def test_a_host_that_may_be_rank_0s_does_not_accuse_itself():
    made = view_of_nd1(facts("nd1", ND1, name="nd1"))
    for seat in (2, 3):
        made = change_rank(made, seat, local_rank=None, launch={"node_rank": None})
    assert judged(made) == []


def test_a_service_name_through_which_all_came_in_is_only_mentioned():
    by_host = {name: facts(name, "10.96.0.7", name="job-master") for name in NAMES}
    found = only(cluster_of(by_host))
    assert (place(found), found.level) == (("addr-not-on-master", ("nd0",)), Severity.INFO)
    some = only(cluster_of(by_host, absent_nodes=(2,)))
    assert (some.level, some.confidence) == (Severity.WARN, Confidence.LIKELY)


# -- families ------------------------------------------------------------------------------------


def test_an_ipv6_answer_without_a_route():
    both = facts("nd1", "2001:db8::1", ND0, no_route=["2001:db8::1"])
    found = only(view_of_nd1(both))
    assert (place(found), found.level) == (("addr-family-mixed", ("nd1",)), Severity.WARN)
    six = facts("nd1", "2001:db8::1", no_route=["2001:db8::1"])
    assert "AAAA" in (found.fix or found.kind.fix)
    typed = facts("nd1", "2001:db8::1", name="2001:db8::1", no_route=["2001:db8::1"])
    assert "AAAA" not in only(view_of_nd1(typed)).fix  # no name server gave it
    assert "IPv6 route" in only(view_of_nd1(typed)).fix
    assert only(view_of_nd1(six)).level is Severity.FAIL
    levels = {f.level for f in judged(cluster_of({"nd0": facts("nd0"), "nd1": both}))}
    assert Severity.FAIL not in levels


# -- slow ----------------------------------------------------------------------------------------


def test_an_address_without_a_name_is_well_if_that_is_soon_known():
    """torch then says "The hostname of the client socket cannot be retrieved", for its log."""
    reverse = [look(ND0)]
    assert judged(cluster_of({"nd0": facts("nd0"), "nd1": facts("nd1", reverse=reverse)})) == []


def test_a_loopback_interface_that_is_down_explains_a_resolver_that_is_slow():
    slow = facts("nd1", reverse=[look(ND0, took=(4.0, 3.0))])
    cluster = cluster_of({"nd0": facts("nd0"), "nd1": slow})
    for loops, cause in ((False, "own-address-blocked"), (True, None), (None, None)):
        found = only(with_round(cluster, "own_address", "alone", {"nd1": {"loops": loops}}))
        assert (found.code, found.explained_by) == ("dns-slow", cause)


def test_look_ups_that_are_slow_twice():
    reverse = [look(ND0, took=(4.0, 3.0))]
    found = only(cluster_of({"nd0": facts("nd0"), "nd1": facts("nd1", reverse=reverse)}))
    assert (place(found), found.level) == (("dns-slow", ("nd1",)), Severity.WARN)
    assert ND0 in found.message


def test_slow_look_ups_explain_that_a_host_signed_in_too_late():
    reverse = [look(ND0, took=(4.0, 3.0))]
    cluster = cluster_of({"nd0": facts("nd0"), "nd1": facts("nd1", reverse=reverse)})
    late = Finding(COORDINATOR_LOST, "signed in too late", Where(links=(("nd1", "nd0"),)))
    found = explain([only(cluster), late], cluster)
    causes = {each.code: each.explained_by for each in found}
    assert causes == {"dns-slow": None, "coordinator-lost": "dns-slow"}


def test_torch_asks_for_ipv6_first_which_etc_hosts_does_not_have():
    """With the IPv4 address in /etc/hosts, any other look-up of the name is fast."""
    silent = look("nd0", error="no answer from the resolver", took=(4.0, 3.0))
    seen = facts("nd1", ipv6={**silent, "timed_out": True})
    found = only(cluster_of({"nd0": facts("nd0"), "nd1": seen}))
    assert (place(found), found.level) == (("dns-slow", ("nd1",)), Severity.WARN)
    assert found.message == (
        "slow twice in a row: nd0 for IPv6 alone gave no answer in 4 s; torch's store asks for it "
        "first, at each connection"
    )
    assert found.fix.steps[0].command == f"# --master-addr {ND0}"
    fast = look("nd0", error="Name or service not known", took=(0.01,))
    assert judged(cluster_of({"nd0": facts("nd0"), "nd1": facts("nd1", ipv6=fast)})) == []


def test_a_slow_look_up_of_the_own_name_counts_too():
    made = cluster_of({"nd0": facts("nd0"), "nd1": facts("nd1")})
    slow = {"own_name": {"alone": outcome({"own": look("nd1", ND1, took=(4.0, 3.0))})}}
    nd1 = replace(made.hosts[1], facts={**made.hosts[1].facts, **slow})
    ranks = [replace(rank, host=nd1) if rank.host.id == 1 else rank for rank in made.ranks]
    found = only(replace(made, hosts=(made.hosts[0], nd1), ranks=tuple(ranks)))
    assert (place(found), found.level) == (("dns-slow", ("nd1",)), Severity.WARN)
    assert "nd1 4 s" in found.message


def test_clients_whose_names_are_slow_on_the_host_that_serves_the_store():
    """/etc/hosts has rank 0's name, and the name server has none of the others."""
    made = cluster_of({name: facts(name) for name in NAMES})
    clients = [look(ND1, took=(4.0, 3.0)), look(ND2, "nd2", took=(0.1,))]
    slow = {"firewall": {"matrix": outcome({"clients": clients, "peers": {}})}}
    nd0 = replace(made.hosts[0], facts={**made.hosts[0].facts, **slow})
    ranks = [replace(rank, host=nd0) if rank.host.id == 0 else rank for rank in made.ranks]
    found = only(replace(made, hosts=(nd0, *made.hosts[1:]), ranks=tuple(ranks)))
    assert (place(found), found.level) == (("dns-slow", ("nd0",)), Severity.WARN)
    assert found.message == (
        f"slow twice in a row: {ND1} 4 s; torch's store looks up each client, one after the other "
        "(since 2.9 until one is not found)"
    )
    assert found.has(Effect.DELAYS)


def test_a_look_up_that_was_slow_once_is_no_finding():
    reverse = [look(ND0, "nd0", took=(5.0, 0.01))]
    assert judged(cluster_of({"nd0": facts("nd0"), "nd1": facts("nd1", reverse=reverse)})) == []


def test_a_name_that_never_came_is_not_slow_as_well():
    seen = facts("nd1", master=look("nd0", took=(4.0, 3.0)), reverse=[])
    assert place(only(view_of_nd1(seen))) == ("addr-unresolvable", ("nd1",))


def test_under_torchrun_the_agent_can_be_told_its_address():
    """With c10d, MASTER_ADDR is what rank 0's agent takes for its own name."""
    seen = facts("nd1", master=look("nd0"), reverse=[])
    made = view_of_nd1(seen)
    assert "--local-addr" not in only(made).fix
    for seat in (2, 3):
        made = change_rank(made, seat, launch={"agent_store": True})
    assert "# --local-addr ADDRESS" in in_full(only(made).fix)
    for seat in (2, 3):
        made = change_rank(made, seat, launch={"launcher": "ray", "agent_store": True})
    assert "--local-addr" not in only(made).fix


# -- a name that came late: check port went on asking ----------------------------------------------


def with_port(cluster: Cluster, host: str, *answers: str, came_s: float | None) -> Cluster:
    """The same hosts, and what check port says of the name on one of them."""
    name = {"answers": list(answers), "error": "" if answers else "no", "came_s": came_s}
    port = {"port": {"alone": outcome({"knock": {"name": name}})}}
    hosts = {
        h.id: replace(h, facts={**h.facts, **port}) if h.name == host else h for h in cluster.hosts
    }
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in cluster.ranks)
    return replace(cluster, hosts=tuple(hosts.values()), ranks=ranks)


def test_a_name_that_came_late_is_worth_knowing_and_no_more():
    seen = facts("nd1", master=look("nd0"), reverse=[])
    made = with_port(cluster_of({"nd0": facts("nd0"), "nd1": seen}), "nd1", ND0, came_s=7.6)
    found = only(made)
    assert place(found) == ("addr-unresolvable", ("nd1",))
    assert found.level is Severity.INFO
    assert "after 8 s" in found.message
    assert found.kind.title == "MASTER_ADDR did not resolve at first"
    assert "until getent hosts nd0" in found.fix


def test_a_name_that_came_late_and_leads_elsewhere_is_judged_as_any_other():
    seen = facts("nd1", master=look("nd0"), reverse=[])
    made = shut_out(cluster_of({"nd0": facts("nd0"), "nd1": seen}), "nd1")
    found = judged(with_port(made, "nd1", "10.9.9.9", came_s=4.0))
    assert {place(each) for each in found if each.level is Severity.FAIL} == {
        ("addr-differs", ("nd1",))
    }


def test_a_name_that_never_came_is_missing():
    seen = facts("nd1", master=look("nd0"), reverse=[])
    found = only(with_port(view_of_nd1(seen), "nd1", came_s=None))
    assert (place(found), found.level) == (("addr-unresolvable", ("nd1",)), Severity.FAIL)


# -- reports that were merged: a host that never got in beside one that did ------------------------


def test_localhost_in_a_merged_report_blames_every_host_as_if_they_had_met():
    by_host = {n: facts(n, "127.0.0.1", name="localhost") for n in ("nd0", "nd1")}
    found = judged(shut_out(cluster_of(by_host), "nd1"))
    assert {place(each) for each in found} == {
        ("addr-loopback", ("nd0",)),
        ("addr-loopback", ("nd1",)),
    }
    assert all(each.level is Severity.FAIL for each in found)


def test_a_merged_report_of_a_master_at_the_wrong_address_fails():
    by_host = {n: facts(n, "10.9.9.9") for n in ("nd0", "nd1")}
    (found,) = judged(shut_out(cluster_of(by_host), "nd1"))
    assert (place(found), found.level) == (("addr-not-on-master", ("nd0",)), Severity.FAIL)
    one_came = {n: facts(n, "10.9.9.9") for n in NAMES}
    (found,) = judged(shut_out(cluster_of(one_came), "nd2"))
    assert found.level is Severity.WARN
