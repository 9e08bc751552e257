"""Does a host send many more TCP segments again than the other hosts?

What it checks
--------------
The kernel's counters of TCP on every host (RetransSegs, OutSegs, TCPTimeouts, TCPLostRetransmit,
TCPSynRetrans), from the start of its examination to the end: how many segments it sent, and how
many of them once more. A host with at least 50 of them, 1 % of all and ten times as many as usual
is told, unless check `loss` names it already; the evidence of that check shows the same counters.

Why it matters
--------------
What is sent again was lost on the way, or its answer was, or it came too late: the receiver waits
0.2 s and more for it. The counters see all connections of the examination, those of the store and
of process groups too, and so what short tests may miss.

How to fix
----------
`nstat -az TcpRetransSegs TcpExtTCPTimeouts TcpExtTCPLostRetransmit`, twice, while nothing else runs
on the host. If they still grow: cable, transceiver and switch port (`ethtool -S <nic>`), a full
conntrack table, a rate limit.

When it is wrong
----------------
The counters are those of the whole network namespace: other programs' connections, over other
networks, count as well, and the speed tests of the examination itself may fill a queue. So this is
information, and never a cause. Segments that were sent again for nothing (reordering) are counted.

References
----------
Kernel documentation, networking/snmp_counter; nstat(8); RFC 6298 and RFC 8985.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Level,
    Round,
    Severity,
    Skip,
    Turn,
    Untested,
    Where,
    look,
    shell,
)
from nccl_doctor.toolkit.net.tcp_counters import AGAIN, LAST, SENT, read_tcp_counters, tcp_rises
from nccl_doctor.toolkit.peers.loss import read_losses

HIGH = Kind(
    "retransmissions-high",
    Layer.SPEED,
    "A host sends many more TCP segments again than the other hosts",
    "Each of them was lost, or not acknowledged in time. It may be other traffic of the host: the "
    "counters are those of all its programs.",
    Fix(
        look(
            shell("nstat -az TcpRetransSegs TcpExtTCPTimeouts"),
            "type it twice, while nothing else runs on the host",
        ),
        look(
            shell("ethtool -S NIC | grep -i err"),
            "if they still grow; then its cable and switch port",
        ),
    ),
    Severity.INFO,
)
_LEAST, _SHARE, _TIMES = 50, 0.01, 10


class RetransmissionsFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    tcp: dict[str, int]


class Retransmissions(Check):
    """Reads the counters after all other checks, and compares them with those of the start."""

    name = "retransmissions"
    layer = Layer.SPEED
    kinds = (HIGH,)
    reads = ("clock", "firewall", "kernel_limits", "loss", "uplink")
    level = Level.STANDARD
    together = True
    turn = Turn.LAST

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round, each host alone."""
        if max(cluster.nnodes, len(cluster.hosts)) < 2:
            raise Skip("one host: there is no other one to compare it with")
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        groups = tuple((rank.seat,) for rank in first if rank is not None)
        return (Round(LAST[1], groups, 10.0),) if groups else ()

    def observe(self, ctx: Context) -> RetransmissionsFacts:
        """`tcp`: counter → value."""
        counters = read_tcp_counters(ctx.root)
        if not counters:
            raise Untested("/proc/net/snmp cannot be read")
        return {"tcp": counters}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """A note on each host that stands out, and that check `loss` does not name."""
        rises = tcp_rises(cluster)
        labels = {host.id: host.label for host in cluster.present_hosts}
        hosts = {rank.seat: rank.host.id for rank in cluster.present}
        named = {hosts[end] for cause in read_losses(cluster).causes for end in cause.ends}
        counts = {host: rise.get(AGAIN, 0) for host, rise in rises.items()}
        usual = statistics.median_low(counts.values()) if len(counts) > 1 else 0
        for host, again in counts.items():
            sent = rises[host].get(SENT, 0)
            many = again >= max(_LEAST, _SHARE * sent, _TIMES * usual)
            if len(counts) < 2 or host in named or not many:
                continue
            yield Finding(
                HIGH,
                f"{again} of {sent} TCP segments sent again while the hosts were examined "
                f"({100 * again / max(1, sent):.1f} %); usual on the other hosts: {usual}",
                Where(hosts=(labels[host],)),
                {"risen": dict(rises[host])},
                confidence=Confidence.POSSIBLE,
            )
