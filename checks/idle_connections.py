"""Does a host forget connections that are idle for a while?

What it checks
--------------
How long the kernel's connection tracking remembers an established TCP connection on which nothing
moves (net.netfilter.nf_conntrack_tcp_timeout_established), where connection tracking is in use.

Why it matters
--------------
A stateful firewall lets packets of known connections pass, and only those. When it has forgotten a
connection, the next packet is dropped: a job that paused longer than that (a checkpoint, an
evaluation, a slow loader) hangs in its next collective, hours after a healthy start, until
`Connection timed out`. Neither NCCL nor gloo keeps its sockets alive.

How to fix
----------
sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=432000 on the host (the kernel's own
default, five days), or let the job's network pass untracked.

When it is wrong
----------------
It hurts only where a rule drops what is not tracked, and only jobs that pause for so long.
Firewalls and load balancers between the hosts have memories of their own, which cannot be read from
here.

References
----------
Kernel documentation, networking/nf_conntrack-sysctl; NVIDIA/nccl issue 1619.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

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
    title="A firewall forgets connections that are idle",
    why="A job that pauses for longer than that loses its connections, and hangs in the next "
    "collective until a time-out.",
    fix="sysctl -w net.netfilter.nf_conntrack_tcp_timeout_established=432000",
    severity=Severity.WARN,
)

SHORT_S = 3600
"""Loading a large checkpoint or an evaluation between two collectives takes that long."""


class IdleConnections(Check):
    """One number of the kernel."""

    name = "idle_connections"
    layer = Layer.PORT
    kinds = (IDLE_FORGOTTEN,)
    proc: ClassVar[Path] = Path("/proc")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`established_s`: seconds after which an idle connection is forgotten."""
        file = self.proc / "sys/net/netfilter/nf_conntrack_tcp_timeout_established"
        try:
            return {"established_s": int(file.read_text(encoding="ascii"))}
        except (OSError, ValueError) as error:
            raise Skip("no connection tracking here") from error

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Every host by itself; one host alone has no connection that a firewall could forget."""
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
