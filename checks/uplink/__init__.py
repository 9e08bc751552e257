"""Is every host connected to the network, and did it stay connected?

What it checks
--------------
The interfaces of each host that have an address: whether they are up and have a carrier, how often
the carrier has changed, and which of them leads to MASTER_ADDR. If a host was lost during the run,
the hosts that are left look again, and so does the lost one: at their interfaces, and whether the
gateway and the other hosts answer at all (a TCP connection to MASTER_PORT and to a random port,
which a host that is up accepts or refuses).

Why it matters
--------------
A cable that is pulled, a transceiver that fails or a switch port that is shut makes every *other*
host say that somebody is missing. Each of them sees only that there is no answer, so reports name
healthy hosts.

How to fix
----------
On the host that is named: `ip -br link`, `ethtool <nic>` (Link detected), the cable, the
transceiver and the switch port. If a link is named and not a host, look at both of its ends.

When it is wrong
----------------
A host without a carrier on the interface to MASTER_ADDR is blamed only if it could not sign in,
was lost, or is rank 0's and nobody came. Without such a fact, hosts are told apart by who still
answers: a host that sees nobody, while there are at least two others to see, is the suspect; so is
a host that no other one sees, while they see each other. Where two hosts are alone, without a third
one and without a gateway that answers, it cannot be told which end is cut off: the link is named.
A host that is switched off looks as if it were cut off. In a container, the carrier of the
machine's own card cannot be seen. A firewall that comes up during the run and drops every call
without an answer looks like a cut cable.

References
----------
Linux Documentation/ABI/testing/sysfs-class-net: carrier, carrier_changes; netdevice(7):
IFF_RUNNING; Linux Documentation/networking/operstates.rst; arp(7).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict

from nccl_doctor.api import (
    AFTER_LOSS,
    Check,
    Cluster,
    Context,
    Effect,
    Finding,
    Kind,
    Layer,
    Skip,
    spans_machines,
)
from nccl_doctor.toolkit.peers.standing import Roads, roads_of_store

from .culprits import CABLE, find_culprits
from .look import LOOK_UP_S, call_all, call_gateway, gateway, nic_towards, nics_here

HOST_CUT_OFF = Kind(
    "host-cut-off",
    Layer.HOST,
    "A host is cut off from the network, or off",
    "No other host can reach it: the others wait for its ranks, and it waits for theirs, until a "
    "time-out.",
    CABLE,
    effects=(Effect.CUTS_OFF,),
)


class UplinkFacts(TypedDict):
    """Facts that `observe` returns, alone and after a loss."""

    interfaces: list[dict[str, Any]]
    towards_master: str
    gateway: dict[str, Any] | None
    calls: list[dict[str, Any]]
    roads: Roads


class Uplink(Check):
    """The carriers of the interfaces, and after a loss who still answers."""

    name = "uplink"
    layer = Layer.HOST
    kinds = (HOST_CUT_OFF,)
    reads = ("firewall",)
    looks_again = True

    def observe(self, ctx: Context) -> UplinkFacts:
        """The interfaces and the gateway; after a loss, calls to the hosts in `params` as well.

        Returns: `interfaces`: each `{"name", "addresses", "up", "running", "changes"}`;
        `towards_master`: the name of the one to MASTER_ADDR, or empty; `gateway`: None or
        `{"address", "interface", "outcome"}`; `calls`: each `{"host", "addresses", "outcome"}`;
        `roads`: after a loss, from `roads_of_store`, which check `loss` reads.
        An outcome is `answers`, `silent`, `no-neighbour`, `unreachable` or `untested`.
        """
        if ctx.launch.nnodes == 1:
            raise Skip("one host: no other host has to be reached")
        ctx.breadcrumb("looking at the interfaces")
        nics = nics_here(ctx.root)
        facts: UplinkFacts = {
            "interfaces": nics,
            "towards_master": nic_towards(
                ctx.launch.master_addr or "", nics, min(LOOK_UP_S, ctx.left() / 4)
            ),
            "gateway": gateway(ctx.root),
            "calls": [],
            "roads": {},
        }
        port = ctx.launch.master_port or 0
        if facts["gateway"]:
            ctx.breadcrumb("calling the gateway")
            facts["gateway"]["outcome"] = call_gateway(facts["gateway"], port, ctx.root)
        if ctx.round == AFTER_LOSS:
            ctx.breadcrumb("calling the hosts of the job")
            facts["roads"] = roads_of_store(port)
            facts["calls"] = call_all(ctx.params.get("hosts", {}), port, ctx.root)
        return facts

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on hosts that have lost their network, and on links whose ends were lost."""
        if spans_machines(cluster):
            yield from find_culprits(cluster, self.name, HOST_CUT_OFF)
