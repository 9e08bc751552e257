"""Does a host forget connections that are idle for a while, and drop them then?

What it checks
--------------
How long the kernel's connection tracking remembers an idle TCP connection
(net.netfilter.nf_conntrack_tcp_timeout_established), if connection tracking is in use, and, if that
is less than an hour, whether a rule of the host drops what comes after: a packet of a connection
that is not known any more is followed through the rules, and so is one of a known connection. The
facts also hold how full the table is, and how many packets were dropped because it was full.

Why it matters
--------------
A stateful firewall lets only packets of known connections pass. Once it has forgotten a connection,
it drops the next packet: a job that pauses longer than that (a checkpoint, an evaluation, a slow
loader) hangs in its next collective, hours after a healthy start, until `Connection timed out`.
Neither NCCL nor gloo sends keep-alive packets.

How to fix
----------
sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=432000 on the host (the kernel's
default, five days), or exclude the job's network from connection tracking.

When it is wrong
----------------
It matters only for jobs that pause that long. By default the kernel takes such a packet for a new
connection (net.netfilter.nf_conntrack_tcp_loose=1), so that nothing is lost unless a rule drops new
connections to that port; with 0, every such packet is invalid, which firewalld and many others
drop. Rules that this user cannot read are unknown: the finding is a note then. Firewalls and load
balancers between the hosts have their own time-outs, which cannot be read from here.

References
----------
Kernel documentation, networking/nf_conntrack-sysctl; net/netfilter/nf_conntrack_proto_tcp.c
(tcp_new); NVIDIA/nccl issue 1619.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Skip,
    Step,
    Where,
    likely_address,
    shell,
)
from nccl_doctor.toolkit.firewall.netfilter import Packet, Rules, quote_hit
from nccl_doctor.toolkit.firewall.rulesets import read_rules
from nccl_doctor.toolkit.nccl.interface_choice import neighbourhood
from nccl_doctor.toolkit.net.interfaces import interfaces
from nccl_doctor.toolkit.net.ports import port_range
from nccl_doctor.toolkit.net.routes import source_towards

IDLE_FORGOTTEN = Kind(
    code="idle-connections-forgotten",
    layer=Layer.PORT,
    title="A firewall forgets idle connections",
    why="A job that pauses longer than that loses its connections and hangs in the next "
    "collective until a time-out.",
    fix=Fix(Step(shell("sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=432000"))),
    severity=Severity.WARN,
)

SHORT_S = 3600
"""A pause that loading a large checkpoint, or an evaluation, makes between two collectives."""
RULES_S = 1.5
LOOK_UP_S = 2.0
_MOST_HITS = 5
_DROPS = ("drop", "early_drop", "insert_failed")
"""Columns of /proc/net/stat/nf_conntrack: the table was full, or was made room in by force."""


class _Needed(TypedDict):
    established_s: int
    loose: int | None
    table: dict[str, Any]


class IdleFacts(_Needed, total=False):
    """Facts that `observe` returns; `rules` only if the time is short."""

    rules: dict[str, Any]


class IdleConnections(Check):
    """Reads the settings of connection tracking, and follows a forgotten packet."""

    name = "idle_connections"
    layer = Layer.PORT
    cost = "seconds"
    instant_when_answered = True
    kinds = (IDLE_FORGOTTEN,)

    def observe(self, ctx: Context) -> IdleFacts:
        """`established_s`: seconds after which an idle connection is forgotten.

        `loose`: nf_conntrack_tcp_loose. `table`: its entries, its maximum, and packets dropped for
        it. `rules`, if the time is short: `readable`, `reason`, and `hits` on forgotten packets.
        """
        seconds = _number(ctx.root, "nf_conntrack_tcp_timeout_established")
        if seconds is None:
            raise Skip("no connection tracking here")
        loose = _number(ctx.root, "nf_conntrack_tcp_loose")
        facts: IdleFacts = {
            "established_s": seconds,
            "loose": loose,
            "table": {
                "entries": _number(ctx.root, "nf_conntrack_count"),
                "most": _number(ctx.root, "nf_conntrack_max"),
                **_dropped(ctx.root),
            },
        }
        if seconds < SHORT_S:
            ctx.breadcrumb("reading the rules of this host")
            rules = read_rules(RULES_S, ctx.root)
            hits = [
                hit
                for packet in _packets(ctx.launch.master_addr)
                for hit in drops_forgotten(rules, packet, loose)
            ]
            told = {"readable": rules.readable, "reason": rules.reason}
            facts["rules"] = {**told, "hits": hits[:_MOST_HITS]}
        return facts

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each host, if the job has several hosts: one host needs no firewall."""
        for rank, facts in cluster.facts(self.name):
            if facts["established_s"] < SHORT_S and cluster.is_multi_host():
                yield from _forgets(rank.host.label, facts)


def _forgets(host: str, facts: Mapping[str, Any]) -> Iterator[Finding]:
    seconds = facts["established_s"]
    rules = facts.get("rules") or {"readable": False, "reason": "", "hits": []}
    hit = next(iter(sorted(rules["hits"], key=lambda each: not each["sure"])), None)
    strict = facts.get("loose") == 0
    if rules["readable"] and hit is None and not strict:
        return  # the kernel takes the next packet for a new connection, and no rule minds
    if hit is not None:
        then = f"and then stopped by {quote_hit(hit)}"
    elif strict:
        then = "and its next packet is invalid (nf_conntrack_tcp_loose=0)"
    else:
        why = f" ({rules['reason']})" if rules["reason"] else ""
        then = f"and it is not known whether a rule then drops it{why}"
    warns = strict or (hit is not None and hit["sure"])
    yield Finding(
        IDLE_FORGOTTEN,
        f"nf_conntrack_tcp_timeout_established={seconds}: an idle connection is forgotten after "
        f"{seconds / 60:.0f} min, {then}",
        Where(hosts=(host,)),
        {"table": facts.get("table"), "rules": rules},
        severity=Severity.WARN if warns else Severity.INFO,
        confidence=Confidence.LIKELY if hit and hit["sure"] else Confidence.POSSIBLE,
    )


def drops_forgotten(rules: Rules, packet: Packet, loose: int | None) -> list[dict[str, Any]]:
    """Hits on a packet of a forgotten connection that spare it while the connection is known.

    Args:
        rules: of this host.
        packet: of an established connection.
        loose: nf_conntrack_tcp_loose.
    """
    state = "invalid" if loose == 0 else "new"
    forgotten = dataclasses.replace(packet, state=state, midway=True)
    usual = [(hit.chain, hit.rule) for hit in rules.hits(packet)]
    return [hit.to_json() for hit in rules.hits(forgotten) if (hit.chain, hit.rule) not in usual]


def _packets(master: str | None) -> list[Packet]:
    """A packet in each direction, between this host and another one in its network."""
    nics = [(n.name, list(n.addresses)) for n in interfaces() if n.running and not n.loopback]
    likely = likely_address(nics, source_towards(master, LOOK_UP_S))
    if likely is None:
        return []
    nic, own = likely
    others = neighbourhood(own) or ("::/0" if ":" in own else "0.0.0.0/0")
    ports = port_range()
    return [
        Packet(True, nic, others, own, ports, ports, "established"),
        Packet(False, nic, own, others, ports, ports, "established"),
    ]


def _number(root: Path, name: str) -> int | None:
    try:
        return int((root / "proc/sys/net/netfilter" / name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _dropped(root: Path) -> dict[str, int]:
    """Packets that were dropped for the table; the file is hexadecimal, a line for each CPU."""
    try:
        lines = (root / "proc/net/stat/nf_conntrack").read_text(encoding="ascii").splitlines()
        columns = lines[0].split()
        rows = [
            {name: int(text, 16) for name, text in zip(columns, line.split(), strict=False)}
            for line in lines[1:]
        ]
    except (OSError, ValueError, IndexError):
        return {}
    return {name: sum(row[name] for row in rows) for name in _DROPS if name in columns}
