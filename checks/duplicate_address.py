"""Does any other host of the job have the same address?

What it checks
--------------
The address of each host that its peers most likely use (the one on the way to MASTER_ADDR, else
that of a real interface, not of a bridge or a container) is compared with all those of the other
hosts: one may have it beside its own.

Why it matters
--------------
Two machines with one address take each other's packets: a host that calls the other reaches itself,
and connections from other hosts break at random, because the network sends each packet to the
machine that spoke last.

How to fix
----------
Give one of the two another address; take it from the host that has it beside its own. Containers
behind a bridge of their own machine (Docker's 172.17.0.2, Podman's 10.88.0.2, slirp4netns'
10.0.2.100) all have the same addresses, which no other machine reaches, whatever ports are
published, and so has a virtual machine behind the NAT of QEMU or VirtualBox (10.0.2.15): give that
one a bridged interface. Start containers with --network=host, or on a network that spans the
machines (docker network create -d overlay, in a swarm; a CNI in Kubernetes). Where every host has
this address by design (a private network behind address translation inside each virtual machine),
keep the job off it: NCCL_SOCKET_IFNAME==eth1 and GLOO_SOCKET_IFNAME=eth1.

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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypedDict

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
    Severity,
    Step,
    Where,
    likely_address,
    look,
    shell,
)
from nccl_doctor.toolkit.containers import (
    USER_NAT,
    container_of,
    given_by,
    has_user_nat,
    is_handed_in,
    network_for,
)
from nccl_doctor.toolkit.host import addresses
from nccl_doctor.toolkit.hosts import network_of
from nccl_doctor.toolkit.nccl.use_interface import use_interface
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
    title="Several hosts have the same address",
    why="Each of them reaches itself when it calls the other, and other hosts reach the one "
    "that spoke last.",
    fix="give one of the hosts another address",
)

LOOK_UP_S = 2.0


class DuplicateAddressFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    likely: list[str] | None
    others: list[str]
    places: dict[str, list[Any]]
    container: str


class DuplicateAddress(Check):
    """The addresses that peers would use, compared."""

    name = "duplicate_address"
    layer = Layer.ROUTE
    kinds = (ADDRESS_DUPLICATE,)

    def observe(self, ctx: Context) -> DuplicateAddressFacts:
        """The address that peers most likely use, and the `others` of this host: `places` has their
        interface and prefix length. `container`: the runtime of this host's container, if the
        interface of that address is one that it made, or of the virtual machine, if it is
        `USER_NAT`.
        """
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
        made = likely is not None and is_handed_in(likely[0], ctx.root)
        runtime = container_of(ctx.root, ctx.env) if made else ""
        if not runtime and likely is not None and has_user_nat(likely[1], ctx.root):
            runtime = USER_NAT
        return {
            "likely": list(likely) if likely else None,
            "others": others,
            "places": {
                each.address: [each.interface, each.prefix]
                for each in addresses()
                if each.address in others
            },
            "container": runtime,
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on hosts with the same likely address, and on those that have one of another
        host beside their own; node ranks of one machine share all.
        """
        owners: dict[str, list[tuple[Host, Mapping[str, Any]]]] = {}
        for rank, facts in cluster.facts(self.name):
            if facts["likely"]:
                owners.setdefault(facts["likely"][1], []).append((rank.host, facts))
        for address, hosts in owners.items():
            if len({network_of(host) for host, _ in hosts}) < 2:
                continue
            # Hosts that signed in and each have another address used that one: no conflict.
            apart = all(host.joined and facts["others"] for host, facts in hosts)
            runtimes = {facts.get("container", "") for _, facts in hosts}
            bridged = "" if apart or "" in runtimes else min(runtimes)
            where = f", each {given_by(bridged)}" if bridged else ""
            interfaces = {host.label: facts["likely"][0] for host, facts in hosts}
            yield Finding(
                ADDRESS_DUPLICATE,
                f"{address} is the address of {len(hosts)} hosts{where}",
                Where(
                    hosts=tuple(sorted(host.label for host, _ in hosts)),
                    interfaces=tuple(sorted({facts["likely"][0] for _, facts in hosts})),
                ),
                {"interfaces": interfaces},
                fix=_fix(address, bridged, apart=apart),
                severity=Severity.INFO if apart else None,
                confidence=Confidence.LIKELY,
            )
        for rank, facts in cluster.facts(self.name):
            for address in sorted({*facts["others"]} & owners.keys()):
                yield from _beside(rank.host, facts, address, owners[address])


def _beside(
    here: Host,
    facts: Mapping[str, Any],
    address: str,
    owners: Iterable[tuple[Host, Mapping[str, Any]]],
) -> Iterator[Finding]:
    """Findings on a host that has the address of another one beside its own."""
    nic, prefix = facts.get("places", {}).get(address, ("", None))
    for owner, theirs in owners:
        if network_of(owner) == network_of(here):
            continue
        place = shell("{} dev {}", f"{address}/{prefix}" if prefix else address, nic)
        take = Step(
            shell("ip addr del {}", place), on=(here.label,), undo=shell("ip addr add {}", place)
        )
        forget = Step(shell("ip neigh flush to {}", address), On.OTHERS, persists=True)
        look_first = look(shell("ip addr show to {}", address), "where it is", on=(here.label,))
        yield Finding(
            ADDRESS_DUPLICATE,
            f"{address} is the address of {owner.label}, and {here.label} has it too, beside "
            f"{facts['likely'][1]}",
            Where(
                hosts=tuple(sorted((here.label, owner.label))),
                interfaces=tuple(sorted({theirs["likely"][0], *([nic] if nic else [])})),
            ),
            {"interfaces": {owner.label: theirs["likely"][0], here.label: nic}},
            fix=Fix(
                *((take, forget) if nic else (look_first,)),
                alternatives=[f"give {owner.label} another address"],
            ),
            confidence=Confidence.LIKELY,
        )


def _fix(address: str, bridged: str, *, apart: bool) -> str:
    """The command; `bridged` is the runtime of containers behind bridges, else empty."""
    if apart:
        return Fix(replace(use_interface(), note="keep the job off it"))
    if bridged:
        return network_for(bridged)
    return Fix(
        look(shell("arping -D -c 3 {}", address), "who answers"),
        alternatives=["give all but one of them another address"],
    )


def _loops(addresses: list[str]) -> bool:
    return any(is_loopback(address) for address in addresses)
