"""Can processes of one host reach each other at the host's own address?

What it checks
--------------
On each host a free port is opened on the address that peers are most likely to use, and connected
to from the same host, twice if the first call fails. No packet leaves the host. Where both calls
fail, the loopback interface and the packet filter rules of the host are read.

Why it matters
--------------
Ranks on one host do not use 127.0.0.1: gloo and NCCL's bootstrap connect them at the host's network
address, through the loopback interface. A firewall whose rules name networks and ports but not `lo`
drops these packets, and ranks of one host wait for each other while all other hosts look fine.

How to fix
----------
If the loopback interface is down: `ip link set lo up`. Else let it through the firewall: `nft
insert rule inet filter input iif lo accept` (`nft list ruleset` shows the real names of table and
chain), or `iptables -I INPUT -i lo -j ACCEPT` and the same for OUTPUT with -o.

When it is wrong
----------------
Only one address is tried. With one rank on each host the job may never need it, except for rank 0
itself: a failure where torchrun's agent of that host is to serve the store of the ranks (c10d).

References
----------
nft(8), iptables(8); PyTorch: ProcessGroupGloo, createDefaultDevice; RendezvousStoreInfo in
torch/distributed/elastic/rendezvous/api.py.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Skip,
    Step,
    Untested,
    Where,
    likely_address,
    look,
    shell,
)
from nccl_doctor.toolkit.c10d import AGENT_NAMES, first_agent
from nccl_doctor.toolkit.firewall.netfilter import by_rule
from nccl_doctor.toolkit.firewall.opening import let_loop_back
from nccl_doctor.toolkit.firewall.portrules import rules_for_own_calls, sure_hit
from nccl_doctor.toolkit.net.dial import dial_twice
from nccl_doctor.toolkit.net.interfaces import interfaces
from nccl_doctor.toolkit.net.routes import source_towards

OWN_ADDRESS_BLOCKED = Kind(
    code="own-address-blocked",
    layer=Layer.PORT,
    title="A host cannot reach itself at its own address",
    why="Ranks on one host connect to each other at that address, through the loopback interface.",
    fix=Fix(
        Step(shell("nft insert rule inet filter input iif lo accept")),
        alternatives=[
            Fix(
                Step(
                    shell("iptables -I INPUT -i lo -j ACCEPT"),
                    undo=shell("iptables -D INPUT -i lo -j ACCEPT"),
                )
            )
        ],
    ),
)
NO_WAY = OWN_ADDRESS_BLOCKED.variant(
    title="A host has no way to its own address",
    why="Ranks on one host connect to each other at that address, through the loopback interface: "
    "where it is down, they are lost, or the kernel answers Network is unreachable.",
    fix=Fix(
        Step(shell("ip link set lo up"), undo=shell("ip link set lo down")),
        alternatives=[
            Fix(
                look(
                    shell("ip route show table local"), "if it is up: this has to list the address"
                )
            )
        ],
    ),
)
AGENT = OWN_ADDRESS_BLOCKED.variant(
    why="With torchrun's c10d rendezvous, the agent of the first host serves the store of the "
    "ranks at that address, on any free port, and is its first client: torchrun would hang."
)
DIAL_S, PAUSE_S = 1.1, 0.3
"""Time limit of each of two calls, and between their begins: four packets, as between hosts."""
LOOK_UP_S = 2.0
RULES_S = 0.5
"""Seconds for each of four commands."""


class _Called(TypedDict):
    interface: str
    address: str
    calls: list[dict[str, Any]]


class OwnAddressFacts(_Called, total=False):
    """Facts that `observe` returns; other checks read them."""

    loops: bool | None
    rules: dict[str, Any]


class OwnAddress(Check):
    """Connects to the host's own address."""

    name = "own_address"
    layer = Layer.PORT
    cost = "instant"
    kinds = (OWN_ADDRESS_BLOCKED,)
    reads = (AGENT_NAMES,)

    def observe(self, ctx: Context) -> OwnAddressFacts:
        """The address, and the result of each call; where none came through, `loops`: whether the
        loopback interface is up (None: not known), and the `rules` of this host for such calls.
        """
        nics = [(n.name, list(n.addresses)) for n in interfaces() if n.running and not n.loopback]
        likely = likely_address(nics, source_towards(ctx.launch.master_addr, LOOK_UP_S))
        if likely is None:
            raise Skip("this host has no address but loopback")
        nic, address = likely
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            try:
                listener.bind((address, 0))
            except OSError as error:
                raise Untested(f"{address} cannot be bound: {error}") from error
            listener.listen(4)
            port = listener.getsockname()[1]
            ctx.breadcrumb(f"call {address} port {port} on this host")
            dials, sock = dial_twice(address, port, DIAL_S, PAUSE_S)
            if sock is not None:
                sock.close()
        calls = [each.to_json() for each in dials]
        facts: OwnAddressFacts = {"interface": nic, "address": address, "calls": calls}
        if calls[-1]["outcome"] == "connected":
            return facts
        ctx.breadcrumb("read the loopback interface and the firewall rules of this host")
        loops = [n.up for n in interfaces() if n.name == "lo"]
        rules = rules_for_own_calls(address, port, RULES_S, ctx.root)
        return {**facts, "loops": any(loops) if loops else None, "rules": rules}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """One finding for each host that could not connect to itself."""
        serves = first_agent(cluster)
        for rank, facts in cluster.facts(self.name):
            last = facts["calls"][-1]
            if last["outcome"] == "connected":
                continue
            # This did not keep the host out: it would matter only later.
            needed = len(cluster.ranks_on(rank.host)) > 1 and rank.host.joined
            is_agent = serves is not None and serves.id == rank.host.id
            is_down = facts.get("loops") is False
            no_way = is_down or last["outcome"] == "unreachable"
            hit = None if no_way or "rules" not in facts else sure_hit(facts["rules"])
            reason = "; the loopback interface lo is down" if is_down else ""
            reason = f"; {by_rule(hit)}" if hit else reason
            yield Finding(
                NO_WAY if no_way else AGENT if is_agent else OWN_ADDRESS_BLOCKED,
                f"{facts['address']} on {facts['interface']}: {last['outcome']}, twice "
                f"({last['detail']}){reason}",
                Where(hosts=(rank.host.label,)),
                {"calls": facts["calls"]},
                fix=Fix(let_loop_back(hit)) if hit and not no_way else "",
                severity=None if needed or is_agent else Severity.WARN,
            )
