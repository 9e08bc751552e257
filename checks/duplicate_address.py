"""Does any other host of the job have the same address?

What it checks
--------------
The address of each host that its peers most likely use (the one on the way to MASTER_ADDR, else
that of a real interface, not of a bridge or a container) is compared with those of the other hosts.

Why it matters
--------------
Two machines with one address take each other's packets: a host that calls the other reaches itself,
and connections from other hosts break at random, because the network sends each packet to the
machine that spoke last.

How to fix
----------
Give one of the two another address. Where every host has this address by design (a private network
behind address translation inside each virtual machine), keep the job off it:
NCCL_SOCKET_IFNAME==eth1 and GLOO_SOCKET_IFNAME=eth1.

When it is wrong
----------------
A floating address is on only one host at a time, but two reports may both show it. Which of the two
hosts is wrong is unknown: both are named. Interfaces that lead into the host, such as docker0 or
the tmfifo_net0 of a BlueField card, have the same address on every host and are left out by their
names.

References
----------
RFC 5227 (IPv4 address conflict detection); arping(8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    Severity,
    Where,
    likely_address,
)
from nccl_doctor.toolkit.net.interfaces import (
    interfaces,
    is_link_local,
    is_loopback,
    leads_inside,
)
from nccl_doctor.toolkit.net.routes import source_towards

ADDRESS_DUPLICATE = Kind(
    code="address-duplicate",
    layer=Layer.ROUTE,
    title="Two hosts have the same address",
    why="Each of them reaches itself when it calls the other, and other hosts reach the one "
    "that spoke last.",
    fix="give one of the hosts another address",
)

LOOK_UP_S = 2.0


class DuplicateAddress(Check):
    """The addresses that peers would use, compared."""

    name = "duplicate_address"
    layer = Layer.ROUTE
    kinds = (ADDRESS_DUPLICATE,)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """The address that peers most likely use, and the others of this host."""
        nics = [(nic.name, list(nic.addresses)) for nic in interfaces() if nic.running]
        usable = [
            (nic, addresses)
            for nic, addresses in nics
            if not (_loops(addresses) or leads_inside(nic))
        ]
        likely = likely_address(usable, source_towards(ctx.launch.master_addr, LOOK_UP_S))
        others = [
            address
            for _, addresses in usable
            for address in addresses
            if likely and address != likely[1] and not is_link_local(address)
        ]
        return {"likely": list(likely) if likely else None, "others": others}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on hosts with the same likely address; node ranks of one machine share all."""
        owners: dict[str, list[tuple[Host, str, tuple[str, ...]]]] = {}
        for rank, facts in cluster.facts(self.name):
            if facts["likely"]:
                nic, address = facts["likely"]
                owners.setdefault(address, []).append((rank.host, nic, tuple(facts["others"])))
        for address, hosts in owners.items():
            machines = {(host.name, host.addresses) for host, _, _ in hosts}
            if len(hosts) < 2 or len(machines) < 2:
                continue
            # Hosts that signed in and each have another address used that one: no conflict.
            apart = all(host.joined and others for host, _, others in hosts)
            yield Finding(
                ADDRESS_DUPLICATE,
                f"{address} is the address of {len(hosts)} hosts",
                Where(
                    hosts=tuple(sorted(host.label for host, _, _ in hosts)),
                    interfaces=tuple(sorted({nic for _, nic, _ in hosts})),
                ),
                {"interfaces": {host.label: nic for host, nic, _ in hosts}},
                fix="keep the job off it: export NCCL_SOCKET_IFNAME==<nic> GLOO_SOCKET_IFNAME=<nic>"
                if apart
                else f"give all but one of them another address (arping -D {address} shows who "
                "answers)",
                severity=Severity.INFO if apart else None,
                confidence=Confidence.LIKELY,
            )


def _loops(addresses: list[str]) -> bool:
    return any(is_loopback(address) for address in addresses)
