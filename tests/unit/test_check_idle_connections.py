"""Connections that a firewall forgets, and whether anything drops them then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nccl_doctor.api import Confidence, Context, Launch, Severity, Skip
from nccl_doctor.checks.idle_connections import IdleConnections, drops_forgotten
from nccl_doctor.toolkit.firewall.netfilter import Packet, Rules
from nccl_doctor.toolkit.firewall.rulesets import parse_iptables, parse_nft
from tests.support.clusters import make_cluster
from tests.support.findings import judge
from tests.support.rows import each_row

FOLDER = "proc/sys/net/netfilter"
HIT = {
    "tool": "nft",
    "table": "inet fw",
    "chain": "input",
    "rule": "ct state invalid drop",
    "handle": "3",
    "verdict": "drop",
    "sure": True,
}
HARMLESS = {"readable": True, "reason": "", "hits": []}
DROPS = {**HARMLESS, "hits": [{**HIT, "sure": False, "rule": "ct mark 1 drop"}, HIT]}
MAY_DROP = {**HARMLESS, "hits": [{**HIT, "sure": False}]}
UNREAD = {"readable": False, "reason": "nft: Operation not permitted", "hits": []}


def cluster_of(*seconds: int, **more: Any):
    names = [f"nd{i}" for i in range(len(seconds))]
    usual = {"loose": 1, "rules": DROPS, "table": {}, **more}
    by_host = {
        name: {"established_s": each, **usual} for name, each in zip(names, seconds, strict=True)
    }
    return make_cluster(names, 1, check="idle_connections", by_host=by_host)


def test_a_short_memory_and_a_rule_that_drops_by_state_are_a_risk_on_that_host() -> None:
    (found,) = judge(IdleConnections(), cluster_of(432_000, 300, 7200))
    assert (found.code, found.level) == ("idle-connections-forgotten", Severity.WARN)
    assert (found.where.hosts, found.confidence) == (("nd1",), Confidence.LIKELY)
    assert "forgotten after 5 min" in found.message
    assert "nft inet fw input: ct state invalid drop" in found.message


def test_a_forgotten_packet_that_is_invalid_is_a_risk_by_itself() -> None:
    (found,) = judge(IdleConnections(), cluster_of(432_000, 300, loose=0, rules=HARMLESS))
    assert (found.level, found.where.hosts) == (Severity.WARN, ("nd1",))
    assert "tcp_loose=0" in found.message


@pytest.mark.parametrize("rules", [UNREAD, MAY_DROP, None])
def test_rules_that_nobody_knows_are_a_note(rules: Any) -> None:
    (found,) = judge(IdleConnections(), cluster_of(432_000, 300, rules=rules))
    assert (found.level, found.where.hosts) == (Severity.INFO, ("nd1",))


def test_a_short_memory_that_no_rule_uses_the_kernels_default_and_one_host_alone_are_fine() -> None:
    assert judge(IdleConnections(), cluster_of(300, 300, rules=HARMLESS)) == []
    assert judge(IdleConnections(), cluster_of(432_000, 3600)) == []
    assert judge(IdleConnections(), cluster_of(60)) == []


EPHEMERAL = (32768, 60999)
DATA = Packet(True, "eth0", "10.0.0.0/24", "10.0.0.2", EPHEMERAL, EPHEMERAL, "established")


def nft(*rules: str, policy: str = "accept") -> Rules:
    body = "\n".join(rules)
    text = f"table inet fw {{\nchain input {{\ntype filter hook input priority 0; policy {policy};"
    return Rules(True, chains=parse_nft(f"{text}\n{body}\n}}\n}}\n"))


@each_row(
    ("rules", "loose", "strict"),
    [
        (nft(), False, False),
        (nft("ct state established accept", policy="drop"), True, True),
        # Whoever comes in by this port comes in without a memory, too.
        (nft("ct state established accept", "tcp dport 1024-65535 accept", policy="drop"), 0, 0),
        (nft("ct state established accept", "ip saddr 10.0.0.0/24 accept", "drop"), 0, 0),
        (nft("ct state invalid drop"), False, True),
        (nft("ct state vmap { established : accept, invalid : drop }"), False, True),
        # A rule on the first packet alone does not see one from the middle.
        (nft("tcp flags syn / fin,syn,rst,ack drop"), False, False),
        (nft("tcp dport 5000 drop"), False, False),
    ],
)
def test_what_drops_the_next_packet_of_a_forgotten_connection(
    rules: Rules, loose: bool, strict: bool
) -> None:
    assert bool(drops_forgotten(rules, DATA, 1)) == loose
    assert bool(drops_forgotten(rules, DATA, 0)) == strict


def test_the_classic_rule_against_new_connections_without_syn() -> None:
    text = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p tcp ! --syn -m state --state NEW -j DROP\n"
    (hit,) = drops_forgotten(Rules(True, chains=parse_iptables(text)), DATA, 1)
    assert hit["sure"]


def write(root: Path, **settings: str) -> None:
    folder = root / FOLDER
    folder.mkdir(parents=True)
    for name, text in settings.items():
        (folder / name).write_text(text)


def test_what_the_kernel_says(tmp_path: Path) -> None:
    write(
        tmp_path,
        nf_conntrack_tcp_timeout_established="7200\n",
        nf_conntrack_tcp_loose="1\n",
        nf_conntrack_count="65500\n",
        nf_conntrack_max="65536\n",
    )
    stat = tmp_path / "proc/net/stat"
    stat.mkdir(parents=True)
    rows = "0000ffdc 00000001 0000000a 00000002\n0000ffdc 00000000 00000001 00000003\n"
    (stat / "nf_conntrack").write_text(f"entries found drop early_drop\n{rows}")
    facts = IdleConnections().observe(Context(Launch(), {}, root=tmp_path))
    assert facts == {
        "established_s": 7200,
        "loose": 1,
        "table": {"entries": 65500, "most": 65536, "drop": 11, "early_drop": 5},
    }


def test_rules_are_read_only_where_the_memory_is_short(tmp_path: Path) -> None:
    write(tmp_path, nf_conntrack_tcp_timeout_established="600\n")
    facts = IdleConnections().observe(Context(Launch(), {}, root=tmp_path))
    assert facts["rules"].keys() == {"readable", "reason", "hits"}
    assert facts["loose"] is None


@pytest.mark.parametrize("text", [None, "", "soon\n"])
def test_without_connection_tracking_it_does_not_apply(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        write(tmp_path, nf_conntrack_tcp_timeout_established=text)
    with pytest.raises(Skip):
        IdleConnections().observe(Context(Launch(), {}, root=tmp_path))
