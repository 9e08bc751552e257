"""Does a host forget connections that are idle for a while?

What it checks
--------------
How long the kernel's connection tracking remembers an idle TCP connection
(net.netfilter.nf_conntrack_tcp_timeout_established), if connection tracking is in use.

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
It matters only where a rule drops untracked packets, and only for jobs that pause that long.
Firewalls and load balancers between the hosts have their own time-outs, which cannot be read from
here.

References
----------
Kernel documentation, networking/nf_conntrack-sysctl; NVIDIA/nccl issue 1619.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Kind,
    Layer,
    Severity,
    Skip,
    Where,
)

IDLE_FORGOTTEN = Kind(
    code="idle-connections-forgotten",
    layer=Layer.PORT,
    title="A firewall forgets idle connections",
    why="A job that pauses longer than that loses its connections and hangs in the next "
    "collective until a time-out.",
    fix="sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=432000",
    severity=Severity.WARN,
)

SHORT_S = 3600
"""A pause that loading a large checkpoint, or an evaluation, makes between two collectives."""


class IdleConnections(Check):
    """Reads one setting of the kernel."""

    name = "idle_connections"
    layer = Layer.PORT
    kinds = (IDLE_FORGOTTEN,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`established_s`: seconds after which an idle connection is forgotten."""
        file = ctx.root / "proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established"
        try:
            return {"established_s": int(file.read_text(encoding="ascii"))}
        except (OSError, ValueError) as error:
            raise Skip("no connection tracking here") from error

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding for each host, if the job has several hosts: one host needs no firewall."""
        for rank, facts in cluster.facts(self.name):
            seconds = facts["established_s"]
            if seconds < SHORT_S and cluster.is_multi_host():
                yield Finding(
                    IDLE_FORGOTTEN,
                    f"nf_conntrack_tcp_timeout_established={seconds}: an idle connection is "
                    f"forgotten after {seconds / 60:.0f} min",
                    Where(hosts=(rank.host.label,)),
                    confidence=Confidence.POSSIBLE,
                )
