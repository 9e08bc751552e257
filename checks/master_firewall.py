"""Does the firewall of rank 0's own host let the other hosts in at MASTER_PORT?

What it checks
--------------
On the host that serves the store, the packet filter rules are read (nft, iptables; needs root), and
a new connection to MASTER_PORT is followed through them, first from any address, then from the
network of the interface that MASTER_ADDR leads to; so is the answer to it. If a host is missing or
could not get in, the rules are read again, as somebody may have started the firewall since, and a
rule that certainly drops or rejects one of the two is reported.

Why it matters
--------------
Rank 0 reaches its own port through the loopback interface and sees nothing wrong. The other hosts
get no answer, wait for their time-outs, and seem to have a network problem.

How to fix
----------
Let the hosts of the job in: all TCP ports from their network, as NCCL and gloo then use random
ports.

When it is wrong
----------------
A rule with a condition that this check does not understand (a named set, a rate, one address out of
many) is never blamed. A host may be missing for another reason, and the rule be the second fault:
it would block the host later.

References
----------
nft(8), iptables-save(8), firewall-cmd(1); PyTorch: torch.distributed.TCPStore.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Layer,
    Rank,
    Skip,
    Where,
    likely_address,
)
from nccl_doctor.toolkit.firewall.netfilter import who_stops
from nccl_doctor.toolkit.firewall.portrules import (
    ShutDoor,
    explains_knock,
    how_to_let_pass,
    rules_for_calls_in,
    shut_doors,
    stopped_by,
    was_let_in,
)
from nccl_doctor.toolkit.net.interfaces import interfaces
from nccl_doctor.toolkit.net.names import look_up
from nccl_doctor.toolkit.shared_kinds import PORT_BLOCKED

LOOK_UP_S = 2.0
RULES_S = 1.5


class MasterFirewallFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    address: str
    port: int
    rules: dict[str, Any]


class MasterFirewall(Check):
    """Follows a connection to MASTER_PORT through the rules of the host that serves it."""

    name = "master_firewall"
    layer = Layer.PORT
    cost = "seconds"
    instant_when_answered = True
    kinds = (PORT_BLOCKED,)
    reads = ("port",)
    looks_again = True

    def observe(self, ctx: Context) -> MasterFirewallFacts:
        """The firewall rules for MASTER_PORT, if this host serves the store to others."""
        server, port = ctx.door.get("server"), ctx.launch.master_port
        serves = server == "self" or (server == "agent" and ctx.launch.rank == 0)
        if not serves or port is None or ctx.door.get("bind_errno") is not None:
            raise Skip("only the host that serves the store is examined")
        if ctx.launch.nnodes == 1:
            raise Skip("one host: no other host has to connect")
        nics = [(n.name, n.addresses) for n in interfaces() if n.up and not n.loopback]
        found = look_up(ctx.launch.master_addr or "", LOOK_UP_S)
        likely = likely_address([(nic, list(addresses)) for nic, addresses in nics])
        own = [a for a in found.answers for _, addresses in nics if a in addresses]
        own += [likely[1]] if likely else []
        if not own:
            raise Skip("this host has no address but loopback")
        ctx.breadcrumb("read the firewall rules of this host")
        rules = rules_for_calls_in(own[0], port, RULES_S, ctx.root)
        if not rules["readable"]:
            raise Skip(f"the rules cannot be read: {rules['reason']}")
        return {"address": own[0], "port": port, "rules": rules}

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings only if a host is missing, or reports that this port gave no answer."""
        for door in shut_doors(cluster):
            host, facts, hit = door.rank.host.label, door.facts, door.hit
            victims = _kept_out(cluster, door)
            if not (victims or _somebody_did_not_knock(cluster, facts)):
                continue
            words = f"connections to {facts['address']}:{facts['port']} are blocked by "
            words += stopped_by(hit) + ("; the rule came during the run" * door.came_later)
            yield Finding(
                PORT_BLOCKED,
                words,
                Where(hosts=(host,)),
                {"rule": hit, "could not get in": sorted(v.host.label for v in victims)},
                fix=how_to_let_pass(facts["rules"], hit, host),
                confidence=Confidence.CERTAIN if hit["anyone"] or victims else Confidence.LIKELY,
                effects=(Effect.SHUTS_OUT,),
                cause=who_stops([host], hit, at=f"port {facts['port']}"),
            )


def _kept_out(cluster: Cluster, door: ShutDoor) -> tuple[Rank, ...]:
    """Ranks (check `port`) that MASTER_PORT answered as the rules of its host explain.

    These are ranks that never signed in, and the host that serves, which its own rule may drop. A
    rule that came during the run explains also who got an answer before it came.
    """
    return tuple(
        rank
        for rank, facts in cluster.facts("port")
        if (facts["server"] == "self" or not rank.host.joined)
        and (
            explains_knock(door.facts, facts)
            or (door.came_later and not rank.host.joined and was_let_in(door.facts, facts))
        )
    )


def _somebody_did_not_knock(cluster: Cluster, theirs: Mapping[str, Any]) -> bool:
    """True if a rank is missing without a report of how MASTER_PORT answered it."""
    out = {host.id for host in cluster.present_hosts if not host.joined}
    knocked = {
        rank.host.id
        for rank, facts in cluster.facts("port")
        if facts.get("knock") and facts["port"] == theirs["port"]
    }
    return bool(out - knocked) or any(rank.host.id not in out for rank in cluster.absent)
