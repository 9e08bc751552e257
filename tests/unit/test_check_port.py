"""What check `port` says of made-up roads to MASTER_PORT: code, place, and nobody else."""

from __future__ import annotations

import errno
from dataclasses import asdict, replace
from typing import Any

import pytest

from nccl_doctor.api import ALONE, Cluster, Confidence, Finding, Severity, Where
from nccl_doctor.checks.port import Port
from nccl_doctor.toolkit.net.icmp import Icmp
from tests.support.clusters import change_rank, make_cluster, shut_out, with_round
from tests.support.findings import judge
from tests.support.knocks import facts, tried
from tests.support.rows import each_row

CHECK = Port()
AGENT = {"server": "agent", "bind_errno": None, "bind_error": ""}
SELF = {**AGENT, "server": "self"}
OTHER = {**AGENT, "server": "other"}


def judged(cluster: Cluster) -> list[Finding]:
    return judge(CHECK, cluster)


def view_of_nd1(last: dict[str, Any], **more: Any) -> list[Finding]:
    """What host nd1 says by itself, having not come in."""
    return judge(
        CHECK,
        make_cluster(("nd1",), check="port", by_host={"nd1": facts(last, **more)}, complete=False),
    )


def merged_of(last: dict[str, Any], networks: dict[str, list[list[str]]]) -> Finding:
    """The finding on nd1, which never came in, beside the report of nd0; `networks` of both."""
    hosts = {"nd0": facts(server="self"), "nd1": facts(last)}
    made = make_cluster(tuple(hosts), check="port", by_host=hosts)
    seen = {name: {"networks": each} for name, each in networks.items()}
    (found,) = judged(shut_out(with_round(made, "master_network", ALONE, seen), "nd1"))
    return found


BOTH = {
    "nd0": [
        ["docker0", "172.17.0.1", "172.17.0.0/16"],
        ["eth0", "192.168.77.1", "192.168.77.0/24"],
        ["eth1", "10.0.0.1", "10.0.0.0/24"],
    ],
    "nd1": [["docker0", "172.17.0.1", "172.17.0.0/16"], ["eth1", "10.0.0.2", "10.0.0.0/24"]],
}


@each_row("outcome", ["unreachable", "no-neighbour", "turned-back"])
def test_no_route_names_the_network_that_both_have(outcome: str) -> None:
    last = tried(outcome, errno=errno.ENETUNREACH)
    found = merged_of(last, BOTH)
    assert found.code == "no-route"
    assert found.fix.startswith("on every host: # --master-addr 10.0.0.1 (rank 0's address in 10.")
    others = {**BOTH, "nd1": BOTH["nd1"][:1]}
    for networks in (others, {"nd0": BOTH["nd0"]}, {"nd0": BOTH["nd0"][:2], "nd1": BOTH["nd0"]}):
        assert "--master-addr" not in merged_of(last, networks).fix


def test_a_healthy_cluster_has_no_findings():
    hosts = {"nd0": facts(server="self"), "nd1": facts(), "nd2": facts()}
    assert judged(make_cluster(tuple(hosts), check="port", by_host=hosts)) == []
    assert judged(make_cluster(tuple(hosts), check="port", by_host=hosts, complete=False)) == []


@pytest.mark.parametrize("outcome", ["refused", "dropped", "rejected", "no-neighbour"])
def test_a_host_that_came_in_later_is_no_finding(outcome: str):
    hosts = {"nd0": facts(server="self"), "nd1": facts(tried(outcome))}
    assert judged(make_cluster(tuple(hosts), check="port", by_host=hosts)) == []


def test_a_route_that_leads_nowhere_is_the_fault_of_the_host_that_has_it() -> None:
    last = {**tried("rejected", errno=errno.EACCES), "route": "prohibit 192.168.77.1"}
    (found,) = view_of_nd1(last)
    assert (found.code, found.where, found.confidence.value) == ("no-route", HERE, "certain")
    (step,) = found.fix.steps
    assert step.command == "ip route del prohibit 192.168.77.1"
    assert step.undo == "ip route add prohibit 192.168.77.1"


def test_an_entry_by_hand_for_a_master_that_gives_no_answer_is_named() -> None:
    last = {**tried("dropped"), "fixed": ["02:00:00:00:99:99", "eth0"]}
    (found,) = view_of_nd1(last)
    assert (found.code, found.where.links) == ("port-blocked", (("nd1", "nd0"),))
    assert "says that it is at 02:00:00:00:99:99" in found.message
    (step,) = found.fix.steps
    assert step.command == "ip neigh del 192.168.77.1 dev eth0"
    assert found.fix.alternatives == ("open tcp port 29500 on nd0 for this host",)


def test_an_entry_by_hand_is_the_fault_where_the_masters_own_hardware_is_known() -> None:
    last = {**tried("dropped"), "fixed": ["02:00:00:00:99:99", "eth0"]}

    def judged_with(mac: str, address: str) -> Finding:
        hosts = {"nd0": facts(server="self"), "nd1": facts(last)}
        made = make_cluster(tuple(hosts), check="port", by_host=hosts)
        made = with_round(
            made, "neighbours", ALONE, {"nd0": {"nics": {"eth0": {"mac": mac, "above": []}}}}
        )
        here = [
            replace(host, addresses=(address,)) if host.name == "nd0" else host
            for host in made.hosts
        ]
        ranks = [replace(rank, host=here[rank.host.id]) for rank in made.ranks]
        made = replace(made, hosts=tuple(here), ranks=tuple(ranks))
        (found,) = judged(shut_out(made, "nd1"))
        return found

    found = judged_with("02:00:00:00:00:01", "192.168.77.1")
    assert (found.code, found.where) == ("no-route", HERE)
    assert found.fix == "on nd1: ip neigh del 192.168.77.1 dev eth0"
    assert judged_with("02:00:00:00:99:99", "192.168.77.1").code == "port-blocked", "it is right"
    assert judged_with("02:00:00:00:00:01", "192.168.77.9").code == "port-blocked", "not known"


LINK = Where(links=(("nd1", "nd0"),))
HERE = Where(hosts=("nd1",))


@each_row(
    ("last", "code", "where", "words"),
    [
        (tried("refused", errno=errno.ECONNREFUSED), "port-refused", LINK, "refuses"),
        (tried("dropped", errno=errno.ETIMEDOUT), "port-blocked", LINK, "no answer"),
        (
            tried("rejected", errno=errno.EHOSTUNREACH, detail="No route to host"),
            "port-blocked",
            LINK,
            "No route to host",
        ),
        (
            tried("turned-back", errno=errno.ENETUNREACH, detail="Network is unreachable"),
            "no-route",
            LINK,
            "a router on the way answers that it cannot deliver",
        ),
        (
            tried("rejected", errno=errno.EPERM, detail="Operation not permitted"),
            "port-blocked",
            HERE,
            "a rule of this host",
        ),
        (
            tried("unreachable", errno=errno.ENETUNREACH, detail="Network is unreachable"),
            "no-route",
            HERE,
            "Network is unreachable",
        ),
        (tried("no-neighbour"), "no-route", LINK, "192.168.77.1"),
        (tried("error", detail="odd"), "port-blocked", LINK, "odd"),
        (
            tried("connected", "other", reply="HTTP/1.1 400 Bad Request"),
            "port-not-the-store",
            Where(hosts=("nd0",)),
            "HTTP/1.1 400",
        ),
        (
            tried("connected", "silent"),
            "port-not-the-store",
            Where(hosts=("nd0",)),
            "sends nothing",
        ),
        (
            tried("connected", "closed"),
            "port-not-the-store",
            Where(hosts=("nd0",)),
            "closes them",
        ),
    ],
)
def test_the_last_knock_of_a_host_that_never_came_in(
    last: dict[str, Any], code: str, where: Where, words: str
):
    (found,) = view_of_nd1(last)
    assert (found.code, found.where, found.level) == (code, where, Severity.FAIL)
    assert words in found.message
    assert "29500" in found.message
    assert "PORT}" not in found.fix
    assert found.evidence["knocks"] == 3


@each_row(
    "last, words",
    [
        (tried("refused"), "start the job there: its endpoint is nd0:29500"),
        (
            tried("connected", "closed"),
            "choose another port of the rendezvous endpoint on every host",
        ),
    ],
)
def test_the_fix_names_the_endpoint_where_that_was_given(last: dict[str, Any], words: str) -> None:
    made = make_cluster(("nd1",), check="port", by_host={"nd1": facts(last)}, complete=False)
    sources = dict.fromkeys(("master_addr", "master_port"), "--rdzv-endpoint")
    for seat in range(2):
        launch = {"master_addr": "nd0", "master_port": 29500, "sources": sources}
        made = change_rank(made, seat, launch=launch)
    (found,) = judged(made)
    assert words in found.fix
    assert "MASTER_PORT" not in found.fix


def test_a_host_that_says_something_else_is_certain_and_one_that_says_nothing_is_not():
    (spoke,) = view_of_nd1(tried("connected", "other", reply="SSH-2.0"))
    (mute,) = view_of_nd1(tried("connected", "silent"))
    assert (spoke.confidence, mute.confidence) == (Confidence.CERTAIN, Confidence.LIKELY)


def told(sender: str, *, lost: bool, address: str = "192.168.77.1", **more: Any) -> dict[str, Any]:
    """A call that ended with a message of ICMP, as Linux 5.9 and newer tell."""
    said = {"sender": sender, "type": 3, "code": 1, "cannot_deliver": lost, "no_host": lost}
    outcome = "turned-back" if lost and sender != address else "rejected"
    number = errno.EHOSTUNREACH
    return tried(outcome, **{"address": address, "errno": number, "icmp": said, **more})


@pytest.mark.parametrize(
    ("last", "beside", "code", "confidence", "words"),
    [
        # Nobody knows who said it: a firewall, or a router because the host is off.
        (tried("rejected", errno=113), "rejected", "port-blocked", "likely", "the host is off"),
        # The host is up, as another port of it shows.
        (tried("rejected", errno=113), "refused", "port-blocked", "certain", "29501 answers"),
        (told("10.0.0.9", lost=True), "refused", "port-blocked", "certain", "29501 answers"),
        # The host itself said it: its kernel is up.
        (told("192.168.77.1", lost=True), "rejected", "port-blocked", "certain", "from 192.168."),
        # A firewall on the way says that it is one.
        (told("10.0.0.9", lost=False), "rejected", "port-blocked", "certain", "from 10.0.0.9"),
        # A router says that nobody answers it: the host is off.
        (told("10.0.0.9", lost=True), "turned-back", "no-route", "likely", "router 10.0.0.9"),
    ],
)
def test_a_rejection_is_certain_only_where_a_host_or_a_firewall_is_known(
    last: dict[str, Any], beside: str, code: str, confidence: str, words: str
):
    seen = facts(last)
    seen["knock"]["neighbour"] = {"port": 29501, "outcome": beside}
    cluster = make_cluster(("nd1",), check="port", by_host={"nd1": seen}, complete=False)
    (found,) = judge(CHECK, cluster)
    assert (found.code, found.where, found.confidence.value) == (code, LINK, confidence)
    assert words in found.message


def test_a_firewall_that_prohibits_over_ipv6_is_no_rule_of_the_caller():
    """The kernel reports EACCES for ICMPv6 "administratively prohibited", firewalld's answer."""
    far = {"address": "fd00::1", "errno": errno.EACCES, "detail": "Permission denied"}
    (found,) = view_of_nd1(told("fd00::1", lost=False, **far))
    assert (found.code, found.confidence) == ("port-blocked", Confidence.CERTAIN)
    assert found.where.hosts == ()
    assert found.where.links[0][0] == "nd1"
    assert "rejected by a firewall" in found.message


def behind_a_silent_address(**more: Any) -> dict[str, Any]:
    """A store that answers at the second address of its name; the first one drops calls."""
    store = tried("connected", "store")
    road = {"first": store, "last": store, "passed": [["192.168.77.3", "dropped"]]}
    return facts(knock={**road, "knocks": 1, "seconds": 3.6}, **more)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    ("limit_s", "level", "words"),
    [
        (None, Severity.WARN, "waits about 130 s there"),  # the kernel gives up, torch goes on
        (600.0, Severity.WARN, "waits about 130 s there"),
        (60.0, Severity.FAIL, "gives up there after 60 s"),  # c10d's own limit comes first
    ],
)
def test_a_silent_address_before_one_that_answers_is_a_late_start(
    joined: bool, limit_s: float | None, level: Severity, words: str
):
    hosts = {"nd0": facts(server="self"), "nd1": behind_a_silent_address(store_timeout_s=limit_s)}
    cluster = make_cluster(tuple(hosts), check="port", by_host=hosts)
    (found,) = judge(CHECK, cluster if joined else shut_out(cluster, "nd1"))
    assert (found.code, found.where, found.level) == ("port-blocked", LINK, level)
    assert "192.168.77.3" in found.message
    assert words in found.message


@pytest.mark.parametrize("owned", [True, False])
def test_a_silent_address_that_is_none_of_rank_0s_is_the_names_fault(owned: bool):
    hosts = {"nd0": facts(server="self"), "nd1": behind_a_silent_address()}
    cluster = make_cluster(tuple(hosts), check="port", by_host=hosts)
    for seat in (0, 1) if owned else ():
        host = cluster.hosts[0]
        host = replace(host, addresses=(*host.addresses, "192.168.77.3"))
        cluster = change_rank(cluster, seat, host=host)
    (found,) = judge(CHECK, cluster)
    assert found.explained_by == (None if owned else "addr-differs")


@pytest.mark.parametrize("became", ["refused", "unreachable", "no-neighbour", "rejected"])
def test_an_address_that_answers_no_at_once_delays_nothing(became: str):
    seen = behind_a_silent_address()
    seen["knock"]["passed"] = [["fd00::1", became]]
    hosts = {"nd0": facts(server="self"), "nd1": seen}
    assert judged(make_cluster(tuple(hosts), check="port", by_host=hosts)) == []


RULE = {
    "tool": "nft",
    "table": "inet fw",
    "chain": "output",
    "rule": "tcp dport 29500 drop",
    "handle": "3",
    "verdict": "drop",
    "sure": True,
    "packet": "first",
    "incoming": False,
}


@pytest.mark.parametrize(
    ("outcome", "sure", "where"),
    [("dropped", True, HERE), ("dropped", False, LINK), ("refused", True, LINK)],
)
def test_a_rule_of_the_caller_is_the_callers_where_it_surely_fits(
    outcome: str, sure: bool, where: Where
):
    """On the host that calls, and nobody else is blamed for what it does not let out."""
    rules = {"hits": [{**RULE, "sure": sure}], "managers": ["ufw"], "peers": ["192.168.77.1"]}
    seen = facts(tried(outcome))
    seen["knock"]["rules"] = {"readable": True, "reason": "", **rules}
    (found,) = judge(
        CHECK, make_cluster(("nd1",), check="port", by_host={"nd1": seen}, complete=False)
    )
    assert found.where == where
    if where is HERE:
        assert (found.code, found.confidence) == ("port-blocked", Confidence.CERTAIN)
        assert "nft inet fw output: tcp dport 29500 drop" in found.message
        assert found.fix == "on nd1: nft insert rule inet fw output ip daddr 192.168.77.1 accept"


ANSWER_REJECTED = {
    **RULE,
    "chain": "input",
    "rule": "tcp dport 1024-65535 reject",
    "verdict": "reject",
    "packet": "reply",
    "incoming": True,
}


def test_a_rule_of_the_caller_that_rejects_the_answer_is_the_callers() -> None:
    """The other host hears of the rejection; the caller only waits."""
    seen = facts(tried("dropped"))
    hits = {"hits": [ANSWER_REJECTED], "managers": [], "peers": ["192.168.77.1"]}
    seen["knock"]["rules"] = {"readable": True, "reason": "", **hits}
    (found,) = judge(
        CHECK, make_cluster(("nd1",), check="port", by_host={"nd1": seen}, complete=False)
    )
    assert (found.code, found.where, found.confidence) == ("port-blocked", HERE, Confidence.CERTAIN)
    assert "tcp dport 1024-65535 reject (incoming, reply packet)" in found.message
    assert found.fix == "on nd1: nft insert rule inet fw input ip saddr 192.168.77.1 accept"


READ = {"readable": True, "reason": "", "hits": [], "managers": [], "peers": []}


@each_row(
    ("rules", "beside", "sure", "why"),
    [
        (None, None, "possible", "not read (no time was left)"),
        ({**READ, "readable": False, "reason": "not root"}, None, "possible", "read (not root)"),
        (READ, None, "likely", ""),
        (None, {"port": 29501, "outcome": "refused"}, "likely", ""),  # its answer came in
    ],
)
def test_who_has_not_read_its_own_rules_does_not_blame_the_other_host(
    rules: Any, beside: Any, sure: str, why: str
) -> None:
    seen = facts(tried("dropped"))
    seen["knock"] |= {"rules": rules, "neighbour": beside}
    (found,) = judge(
        CHECK, make_cluster(("nd1",), check="port", by_host={"nd1": seen}, complete=False)
    )
    assert (found.code, found.where, found.confidence.value) == ("port-blocked", LINK, sure)
    opens = "open tcp port 29500 on nd0 for this host"
    if why:
        assert why in found.message
        (own,) = found.fix.steps
        assert (own.command, own.on) == ("sudo nft list ruleset", ("nd1",))
        assert found.fix.alternatives == (opens,)
    else:
        assert "not read" not in found.message
        assert found.fix == opens


def test_who_rejects_its_own_call_is_the_host_itself() -> None:
    """`-j REJECT` in OUTPUT: refused, as by a closed port, but an own address says so."""
    said = {"type": 3, "code": 3, "cannot_deliver": False, "no_host": False}
    for sender, where in (("192.168.77.1", HERE), ("192.168.77.9", LINK)):
        last = tried("refused", errno=errno.ECONNREFUSED, icmp={"sender": sender, **said})
        last["address"] = "192.168.77.5"  # of nd0; the only host of this view has 192.168.77.1
        (found,) = view_of_nd1(last)
        assert found.where == where
        assert found.code == ("port-blocked" if where is HERE else "port-refused")
        assert ("says 192.168.77.9, not that host" in found.message) is (where is LINK)


def test_port_unreachable_from_the_host_itself_is_its_firewall() -> None:
    """`dial` calls it rejected: a port where nothing listens answers with a reset."""
    said = {"type": 3, "code": 3, "cannot_deliver": False, "no_host": False}
    last = tried("rejected", errno=errno.ECONNREFUSED, icmp={"sender": "192.168.77.5", **said}) | {
        "address": "192.168.77.5"
    }
    (found,) = view_of_nd1(last)
    assert (found.code, found.where, found.level) == ("port-blocked", LINK, Severity.FAIL)
    assert "a firewall: ICMP port unreachable (from 192.168.77.5)" in found.message
    assert found.fix == "open tcp port 29500 on nd0 for this host"


def test_a_link_local_address_is_compared_without_its_zone() -> None:
    said = Icmp("fe80::1", 1, 4, cannot_deliver=False, no_host=False)
    assert said.is_from("fe80::1%eth0")
    assert not said.is_from("fe80::2%eth0")
    last = tried("refused", errno=errno.ECONNREFUSED, icmp=asdict(said)) | {"address": "fe80::1%4"}
    (found,) = view_of_nd1(last)  # of a report from before
    assert "not that host" not in found.message


def test_an_address_that_no_host_has_is_no_rule_of_this_host() -> None:
    """The kernel sends "host unreachable" from an own address where nothing answers ARP."""
    said = {"type": 3, "code": 1, "cannot_deliver": True, "no_host": True}
    icmp = {"sender": "192.168.77.1", **said}
    last = tried("no-neighbour", errno=errno.EHOSTUNREACH, icmp=icmp) | {"address": "192.168.77.5"}
    (found,) = view_of_nd1(last)
    assert found.code == "no-route"


@pytest.mark.parametrize(
    ("beside", "words"),
    [("refused", "but port 29501 of that host does"), ("dropped", "gives no answer")],
)
def test_a_silent_port_beside_one_that_answers(beside: str, words: str):
    seen = facts(tried("dropped"))
    seen["knock"]["neighbour"] = {"port": 29501, "outcome": beside}
    (found,) = judge(
        CHECK, make_cluster(("nd1",), check="port", by_host={"nd1": seen}, complete=False)
    )
    assert (found.code, found.where) == ("port-blocked", LINK)
    assert words in found.message


def test_a_service_mesh_on_the_callers_side_may_be_who_answered():
    (found,) = view_of_nd1(tried("connected", "silent"), mesh="a listener on port 15001")
    assert (found.code, found.where) == ("port-not-the-store", LINK)
    assert "sidecar.istio.io/inject" in found.fix
    assert "15001" in found.fix


def test_in_a_merged_report_only_who_never_came_in_tells_of_the_road():
    hosts = {"nd0": facts(server="self"), "nd1": facts(tried("refused")), "nd2": facts()}
    made = make_cluster(tuple(hosts), check="port", by_host=hosts)
    assert judged(made) == []
    (found,) = judged(shut_out(made, "nd1", "nd2"))
    assert (found.code, found.where) == ("port-refused", LINK)


def test_the_port_in_use_is_rank_0s_alone_and_names_who_holds_it():
    holder = {"state": "listening", "uid": 0, "pid": 4711, "command": "python -m http.server"}
    taken = facts(
        server="self", bind_errno=errno.EADDRINUSE, bind_error="Address in use", holder=holder
    )
    del taken["knock"]
    (found,) = judge(
        CHECK, make_cluster(("nd0",), check="port", by_host={"nd0": taken}, complete=False)
    )
    assert (found.code, found.where) == ("port-in-use", Where(hosts=("nd0",)))
    assert "4711" in found.message
    assert "python -m http.server, user id 0" in found.message
    assert [step.command for step in found.fix.steps] == ["# --master-port 29501"]
    assert [step.command for step in found.fix.alternatives[0].steps] == [
        "ps -o user,pid,lstart,args -p 4711",
        "kill 4711",
    ]
    for unseen in ({**holder, "pid": None, "uid": 1001}, None):
        (found,) = judge(
            CHECK,
            make_cluster(
                ("nd0",), check="port", by_host={"nd0": {**taken, "holder": unseen}}, complete=False
            ),
        )
        assert "may not see" in found.message
        assert [step.command for step in found.fix.steps] == ["# --master-port 29501"]
        assert "sport = :29500" in found.fix.alternatives[0]


@each_row(
    ("launcher", "env", "fix"),
    [
        (
            "nccl-doctor",
            {"SLURM_LOCALID": "1"},
            ["# srun --ntasks-per-node=1", "# --node-rank $SLURM_NODEID"],
        ),
        ("srun", {"SLURM_LOCALID": "1"}, ["export RANK=$SLURM_PROCID"]),
        ("env", {}, []),
    ],
)
def test_another_rank_0_of_this_host_is_no_stranger_to_be_killed(launcher, env, fix):
    """A launcher for each task, or the same RANK in all of them (NVIDIA/Megatron-LM#1371)."""
    holder = {"state": "listening", "uid": 0, "pid": 29, "command": "python /opt/bin/nccl-doctor"}
    taken = facts(
        server="self", bind_errno=errno.EADDRINUSE, bind_error="Address in use", holder=holder
    )
    del taken["knock"]
    made = make_cluster(("nd0",), check="port", by_host={"nd0": taken}, complete=False)
    (found,) = judge(CHECK, change_rank(made, 0, env=env, launch={"launcher": launcher}))
    assert (found.code, found.kind.title) == (
        "port-in-use",
        "Another nccl-doctor on this host serves MASTER_PORT",
    )
    assert [step.command for step in found.fix.steps] == fix
    assert not any("kill" in step.command for each in found.fix.alternatives for step in each.steps)


def test_a_port_under_the_agent_is_never_in_use_privileged_or_at_risk():
    held = facts(server="agent", ephemeral=[32768, 60999], port=40000, may_bind=False)
    hosts = {"nd0": held, "nd1": held}
    assert judged(make_cluster(tuple(hosts), check="port", by_host=hosts)) == []


def test_a_privileged_port():
    low = facts(
        server="self", port=80, bind_errno=errno.EACCES, bind_error="Denied", may_bind=False
    )
    del low["knock"]
    hosts = {"nd0": low, "nd1": facts(port=80, may_bind=False)}
    (found,) = judged(make_cluster(tuple(hosts), check="port", by_host=hosts))
    assert (found.code, found.where) == ("port-privileged", Where(hosts=("nd0",)))
    assert found.level is Severity.FAIL
    assert "80" in found.message
    hosts["nd0"] = {**low, "port": 29500, "may_bind": True}
    (found,) = judged(make_cluster(tuple(hosts), check="port", by_host=hosts))
    assert (found.code, found.where) == ("port-privileged", Where(hosts=("nd0",)))
    assert "security rule" in found.kind.title
    assert "29500" not in found.kind.fix


def judged_at_an_ephemeral_port(launcher: str) -> list[Finding]:
    risky = {"port": 40000, "ephemeral": [32768, 60999], "reserved": "8080"}
    hosts = {"nd0": facts(server="self", **risky), "nd1": facts(**risky)}
    made = make_cluster(tuple(hosts), check="port", by_host=hosts)
    for seat in range(len(made.ranks)):
        made = change_rank(made, seat, launch={"launcher": launcher})
    return judged(made)


@each_row("launcher", ["env", "nccl-doctor", "deepspeed", "srun"])
def test_an_ephemeral_port_is_a_risk_where_it_is_served(launcher: str):
    (found,) = judged_at_an_ephemeral_port(launcher)
    assert (found.code, found.where) == ("port-ephemeral", Where(hosts=("nd0",)))
    assert found.fix.startswith("sysctl -w net.ipv4.ip_local_reserved_ports=8080,40000")
    assert found.level is Severity.WARN


@each_row("launcher", ["torchrun", "accelerate", "ray"])
def test_an_ephemeral_port_that_the_launcher_chose_is_none(launcher: str):
    """Under torchrun, for example, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 or etcd."""
    assert judged_at_an_ephemeral_port(launcher) == []


def test_rank_0_that_does_not_find_itself_at_master_addr_says_so():
    """The coordinator reaches the store that it serves on loopback; nobody else came."""
    hosts = {"nd0": facts(tried("refused"), server="self"), "nd1": facts()}
    cluster = make_cluster(tuple(hosts), check="port", by_host=hosts, absent_nodes=(1,))
    (found,) = judged(cluster)
    assert (found.code, found.where) == ("port-refused", Where(hosts=("nd0",)))
    assert "this host serves the store" in found.message
    assert "192.168.77.1" in found.fix
