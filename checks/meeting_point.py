"""Do all hosts look for rank 0 at the same port?

What it checks
--------------
MASTER_PORT, as the launcher gave it to every host. Rank 0 serves, so its port is the right one,
unless it stands alone against several hosts that agree on another. Hosts that signed in are left
alone: address translation may give them another port.

Why it matters
--------------
A script that picks a free port on each host, or a default that differs, sends some hosts to a port
where nothing listens. Refused connections and time-outs look like a firewall. As these hosts never
meet, only their reports together can show it: `nccl-doctor report merge`.

How to fix
----------
Choose the port once, and give every host the same: export MASTER_PORT=29500.

When it is wrong
----------------
Where rank 0 sent no report and as many hosts say the one as the other, all of them are named.

References
----------
PyTorch documentation of torchrun (--master-port) and of torch.distributed (environment variable
initialization).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Host,
    Kind,
    Layer,
    Where,
    master_host,
)

MASTER_PORT = Kind(
    "master-port-differs",
    Layer.LAUNCH,
    "Hosts look for rank 0 at different ports",
    "Where nobody listens, connections are refused or time out, and the host never meets the rest.",
    "Choose one port, and give it to every host: export MASTER_PORT=29500",
)


class MeetingPoint(Check):
    """Compares MASTER_PORT over hosts that did not meet."""

    name = "meeting_point"
    layer = Layer.LAUNCH
    kinds = (MASTER_PORT,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`master_addr` and `master_port`, as this host was told them; None where it was not."""
        return {name: ctx.launch.told(name) for name in ("master_addr", "master_port")}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Blame whoever differs from rank 0; rank 0, if it stands alone against several."""
        hosts = {host.id: host for host in cluster.present_hosts}
        ports = dict(_ports(cluster))
        master = master_host(cluster)
        right = _right(hosts, ports, master)
        wrong = [
            hosts[i]
            for i, port in ports.items()
            # Whoever came in came in, by whatever port.
            if port != right and (not hosts[i].joined or hosts[i] == master)
        ]
        if len(set(ports.values())) < 2 or not wrong:
            return
        said = ", ".join(f"MASTER_PORT={p}" for p in sorted({ports[host.id] for host in wrong}))
        if right is None:
            known = "as many say the one as the other, so nobody knows who is right"
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
            fix=f"export MASTER_PORT={right} there (torchrun: --master-port={right})"
            if right
            else "",
            confidence=Confidence.POSSIBLE if right is None else Confidence.CERTAIN,
        )


def _ports(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(host id, MASTER_PORT) of every host that was told one."""
    for host in cluster.present_hosts:
        first = cluster.first_on(host)
        port = first.launch.told("master_port") if first and first.launch else None
        if port is not None:
            yield host.id, port


def _right(hosts: Mapping[int, Host], ports: Mapping[int, int], master: Host | None) -> int | None:
    """The port that the others should have; None where nobody can tell."""
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
