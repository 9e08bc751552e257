"""Are the kernel's queue of new connections and its range of ports large enough for the job?

What it checks
--------------
On rank 0's host, the maximum length of the queue of connections that wait to be accepted
(net.core.somaxconn), and whether the kernel resets connections when it is full
(net.ipv4.tcp_abort_on_overflow), compared with the world size. On every host, how many ports the
kernel can still assign by itself (net.ipv4.ip_local_port_range), minus those that sockets hold now,
including TIME_WAIT.

Why it matters
--------------
All ranks connect to the store of rank 0, and to NCCL's bootstrap root, in the same second; those
that find the queue full get no answer (and try again after 1, 3, 7 s) or are reset. Every rank
listens on several ports of that range; when none is left: `Cannot assign requested address` or
`Address already in use`.

How to fix
----------
sysctl -w net.core.somaxconn=65535 on rank 0's host; sysctl -w net.ipv4.ip_local_port_range="1024
65535", with MASTER_PORT and the ports of other services in net.ipv4.ip_local_reserved_ports, as the
wider range has them too; net.ipv4.tcp_tw_reuse=1, or wait a minute after a job that left thousands
of sockets.

When it is wrong
----------------
Queues of other layers (SYN cookies, load balancers) are not seen. A queue empties fast: a few ranks
more than it holds may do no harm.

References
----------
Kernel documentation, networking/ip-sysctl (somaxconn, ip_local_port_range, tcp_abort_on_overflow);
listen(2); pytorch/pytorch issue 76913 and pull requests 109200 and 128739.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Severity,
    Step,
    Untested,
    Where,
    look,
    master_host,
    shell,
)
from nccl_doctor.toolkit.host import TIME_WAIT, tcp_sockets
from nccl_doctor.toolkit.net.ports import reserve_port, reserved_ports
from nccl_doctor.toolkit.net.tcp_counters import read_tcp_counters

_LONGEST = shell("sysctl -w net.core.somaxconn=65535")
_WIDEST = shell('sysctl -w net.ipv4.ip_local_port_range="1024 65535"')
LISTEN_BACKLOG_LOW = Kind(
    code="listen-backlog-low",
    layer=Layer.PORT,
    title="The queue of new connections is shorter than the number of ranks",
    why="All ranks connect to rank 0 at once; those that find the queue full wait for seconds or "
    "are reset.",
    fix=Fix(Step(_LONGEST)),
    severity=Severity.WARN,
)
PORTS_EXHAUSTED = Kind(
    code="ports-exhausted",
    layer=Layer.PORT,
    title="The kernel has almost no free port left",
    why="Every rank needs several ports, to listen and to connect; without one: `Cannot assign "
    "requested address`.",
    fix=Fix(Step(_WIDEST)),
    severity=Severity.WARN,
    effects=(Effect.DELAYS,),  # those in TIME_WAIT come free again, one after the other
)
_FREE_PORTS = Fix(
    look(
        shell("ss -Htan | awk '{{print $1}}' | sort | uniq -c"),
        "what takes them; TIME-WAIT ends in 60 s",
    ),
    look(shell("ss -tanp"), "which process"),
    alternatives=[
        Fix(
            Step(
                shell("sysctl -w net.ipv4.tcp_tw_reuse=1"),
                undo=shell("sysctl -w net.ipv4.tcp_tw_reuse=2"),
                note="if most are in TIME-WAIT",
            )
        )
    ],
)
_LOWEST, _HIGHEST = 1024, 65535

_LEAST = 10
"""Ports of a rank: a call to the store for torch; and a listener and some calls for each of the
default group and two others, which few jobs do without. gloo without a port tells the others
127.0.0.1: torch binds port 0 to find out whether the own address can be used
(`doesHostnameResolveToUsableAddress` in ProcessGroupGloo.cpp).
"""
_WANTED = 32
"""Ports of a rank: NCCL listens for its bootstrap, proxy and network channels; each group again."""


class KernelLimitsFacts(TypedDict, total=False):
    """Facts that `observe` returns; other checks read `tcp`."""

    somaxconn: int | None
    abort_on_overflow: bool
    range: list[int] | None
    local_ranks: int
    tcp: dict[str, int]
    taken: int
    time_wait: int
    reserved: int
    reserved_ports: str


class KernelLimits(Check):
    """Compares limits of the kernel with the size of the job."""

    name = "kernel_limits"
    layer = Layer.PORT
    kinds = (LISTEN_BACKLOG_LOW, PORTS_EXHAUSTED)

    def observe(self, ctx: Context) -> KernelLimitsFacts:
        """`range`: lowest and highest port; `taken`: how many of them sockets hold, `time_wait`:
        how many of these are only in TIME_WAIT; `reserved`: how many are reserved, and
        `reserved_ports`: the setting. None for what cannot be read. `tcp`: the kernel's counters of
        TCP, for check `retransmissions`.
        """
        ipv4 = ctx.root / "proc/sys/net/ipv4"
        ports = _words(ipv4 / "ip_local_port_range")
        backlog = _words(ctx.root / "proc/sys/net/core/somaxconn")
        if len(ports) != 2 and not backlog:
            raise Untested("the kernel's network settings cannot be read")
        facts: KernelLimitsFacts = {
            "somaxconn": int(backlog[0]) if backlog else None,
            "abort_on_overflow": _words(ipv4 / "tcp_abort_on_overflow") == ["1"],
            "range": [int(port) for port in ports] if len(ports) == 2 else None,
            "local_ranks": ctx.launch.local_world_size or 1,
            "tcp": read_tcp_counters(ctx.root),
        }
        if len(ports) == 2:
            low, high = (int(port) for port in ports)
            held, waiting = _sockets(ctx.root)
            inside = range(low, high + 1)
            facts["taken"] = sum(port in inside for port in held | waiting)
            facts["time_wait"] = sum(port in inside for port in waiting - held)
            facts["reserved_ports"] = reserved_ports(ctx.root)
            facts["reserved"] = _reserved(facts["reserved_ports"], inside)
        return facts

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on the queue of rank 0's host, and on the ports of all hosts."""
        master = master_host(cluster)
        for rank, facts in cluster.facts(self.name):
            if master is not None and rank.host.id == master.id:
                yield from _backlog(cluster, rank, facts)
            yield from _ports(rank, facts)


def _backlog(cluster: Cluster, rank: Rank, facts: Mapping[str, Any]) -> Iterator[Finding]:
    longest, world = facts["somaxconn"], cluster.world_size
    if longest is None or longest >= world:
        return
    resets = ", and a full queue resets connections" if facts["abort_on_overflow"] else ""
    yield Finding(
        LISTEN_BACKLOG_LOW,
        f"net.core.somaxconn={longest} for {world} ranks{resets}",
        Where(hosts=(rank.host.label,)),
        {"somaxconn": longest, "abort_on_overflow": facts["abort_on_overflow"]},
        fix=Fix(Step(_LONGEST, undo=shell("sysctl -w net.core.somaxconn={}", longest))),
        confidence=Confidence.LIKELY,
    )


def _ports(rank: Rank, facts: Mapping[str, Any]) -> Iterator[Finding]:
    if not facts["range"]:
        return
    low, high = facts["range"]
    ranks = facts["local_ranks"]
    size = high - low + 1 - facts["reserved"]
    left = max(0, size - facts["taken"])
    if left >= ranks * _WANTED:
        return
    waiting = facts["time_wait"]
    yield Finding(
        PORTS_EXHAUSTED,
        f"{left} of {size} ports ({low}–{high}) left for {ranks} ranks"
        + (f", {waiting} in TIME_WAIT" if waiting else ""),
        Where(hosts=(rank.host.label,)),
        {name: facts[name] for name in ("range", "reserved", "taken", "time_wait")},
        fix=_FREE_PORTS if low <= _LOWEST and high >= _HIGHEST else _more_ports(rank, facts),
        severity=Severity.FAIL if size - facts["taken"] + waiting < ranks * _LEAST else None,
        confidence=Confidence.LIKELY,
    )


def _more_ports(rank: Rank, facts: Mapping[str, Any]) -> Fix:
    """The range of ports as wide as it can be, without the port that the job itself needs.

    The kernel would give that port to a client, and rank 0 could not have it.
    """
    port = rank.launch.master_port if rank.launch is not None else None
    low, high = facts["range"]
    before = facts.get("reserved_ports", "")
    undo = shell('sysctl -w net.ipv4.ip_local_port_range="{:number} {:number}"', low, high)
    if port is None:
        return Fix(Step(_WIDEST, undo=undo))
    undo = shell('{} net.ipv4.ip_local_reserved_ports="{:number}"', undo, before)
    return Fix(Step(shell("{} {}", _WIDEST, reserve_port(port, before)), undo=undo))


def _reserved(setting: str, inside: range) -> int:
    """Number of ports of the range that are reserved (`8080,9000-9100`)."""
    count = 0
    for part in filter(None, setting.split(",")):
        first, _, last = part.partition("-")
        low, high = max(int(first), inside.start), min(int(last or first), inside.stop - 1)
        count += max(0, high - low + 1)
    return count


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return []


def _sockets(root: Path) -> tuple[set[int], set[int]]:
    """Local ports of live sockets, and of those in TIME_WAIT."""
    held: set[int] = set()
    waiting: set[int] = set()
    for one in tcp_sockets(root):
        (waiting if one.state == TIME_WAIT else held).add(one.port)
    return held, waiting
