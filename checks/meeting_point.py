"""Do all hosts look for rank 0 at the same port?

What it checks
--------------
MASTER_PORT, as the launcher set it on every host. Rank 0 serves the store, so its port is the right
one, unless several hosts agree on another one. Hosts that signed in are not judged: address
translation may give them another port.

Why it matters
--------------
A script that picks a free port on each host, or a default that differs, sends some hosts to a port
where nothing listens. Refused connections and time-outs look like a firewall. As these hosts never
meet, only their merged reports can show it: `nccl-doctor report merge`.

How to fix
----------
Choose the port once, and set it on every host: export MASTER_PORT=29500.

When it is wrong
----------------
If rank 0 sent no report and two ports have equally many hosts, all of them are named.

References
----------
PyTorch documentation of torchrun (--master-port) and of torch.distributed (environment variable
initialization).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    On,
    Rank,
    Step,
    Where,
    master_host,
    shell,
)
from nccl_doctor.toolkit.relaunch import start_with

MASTER_PORT = Kind(
    "master-port-differs",
    Layer.LAUNCH,
    "Hosts look for rank 0 at different ports",
    "Where nothing listens, connections are refused or time out, and the host never joins the "
    "others.",
    Fix(Step(shell("export MASTER_PORT=29500"), On.EVERY, note="one port for all hosts")),
)


class MeetingPoint(Check):
    """Compares MASTER_PORT of the hosts that did not sign in."""

    name = "meeting_point"
    layer = Layer.LAUNCH
    kinds = (MASTER_PORT,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`master_addr` and `master_port` as set on this host, None if not set."""
        return {name: ctx.launch.given(name) for name in ("master_addr", "master_port")}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """One finding on the hosts that differ from rank 0; on rank 0 if several others agree."""
        hosts = {host.id: host for host in cluster.present_hosts}
        ports = dict(_ports(cluster))
        master = master_host(cluster)
        right = _right(hosts, ports, master)
        wrong = [
            hosts[i]
            for i, port in ports.items()
            # A host that signed in has reached the store, through whatever port.
            if port != right and (not hosts[i].joined or hosts[i] == master)
        ]
        if len(set(ports.values())) < 2 or not wrong:
            return
        said = ", ".join(f"MASTER_PORT={p}" for p in sorted({ports[host.id] for host in wrong}))
        if right is None:
            known = "and the hosts are equally divided, so it is not known which is right"
        elif master in wrong:
            known = (
                f"but {list(ports.values()).count(right)} other hosts look for rank 0 at {right}"
            )
        else:
            known = f"elsewhere {right}" if master is None else f"but rank 0 serves {right}"
        yield Finding(
            MASTER_PORT,
            f"{said}, {known}",
            Where(hosts=tuple(sorted(host.label for host in wrong))),
            {"values": {hosts[i].label: port for i, port in ports.items()}},
            fix=Fix(*start_with(_firsts(cluster, wrong), "master_port", right)) if right else "",
            confidence=Confidence.POSSIBLE if right is None else Confidence.CERTAIN,
        )


def _firsts(cluster: Cluster, hosts: Iterable[Host]) -> list[Rank]:
    """A rank of each host."""
    return [rank for host in hosts if (rank := cluster.first_on(host)) is not None]


def _ports(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(host id, MASTER_PORT) of every host on which it is set."""
    for host in cluster.present_hosts:
        first = cluster.first_on(host)
        port = first.launch.given("master_port") if first and first.launch else None
        if port is not None:
            yield host.id, port


def _right(hosts: Mapping[int, Host], ports: Mapping[int, int], master: Host | None) -> int | None:
    """The right port, None if it is not known."""
    ranking = Counter(ports.values()).most_common(2)
    usual = (
        ranking[0][0] if ranking and (len(ranking) == 1 or ranking[0][1] > ranking[1][1]) else None
    )
    own = ports.get(master.id) if master else None
    if master is None or own is None:
        return usual
    others = [i for i in ports if i != master.id]
    found = any(hosts[i].joined for i in others)
    stands_alone = all(ports[i] != own for i in others) and ranking[0][1] > len(ports) / 2
    return usual if stands_alone and not found else own
