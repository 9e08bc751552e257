"""Is MASTER_ADDR in a network that the hosts have in common?

What it checks
--------------
On rank 0's host: to which interface MASTER_ADDR belongs. If that interface exists on this machine
only (the bridge of docker, libvirt or a container network), no other host can connect; nor can it
to the address of a container that is behind such a bridge, and in no other network. And if there
are reports of other hosts: whether none of them has a route to MASTER_ADDR, although all share
another network with rank 0's host. Both only if no other host came in.

Why it matters
--------------
`hostname -I | cut -d' ' -f1`, which DeepSpeed's launcher and many scripts use, gives the address of
the first interface, whatever it is: docker0, or a management network. Every machine with docker has
the same 172.17.0.1, so the other hosts connect to themselves, and wait for their time-outs. With a
c10d rendezvous at the address of a container behind docker's bridge, 172.17.0.2 on every machine,
each host takes itself for the one that serves, and waits for the others.

How to fix
----------
Use the address of the interface that the hosts share: export MASTER_ADDR=ADDRESS, or deepspeed
--master_addr=ADDRESS. Start containers with --network=host, or on a network that spans the
machines.

When it is wrong
----------------
Interfaces are recognised by name: a bridge with the name of a docker bridge that does reach other
machines is blamed only if no host came in through it. Hosts in different networks with routers
between them are fine as long as there is a route. Pods of Kubernetes, containers with a second
network, and those in a network that docker or podman does not choose by itself (172.17.0.0/16,
10.88.0.0/16, …) are not taken for containers behind a bridge. Of virtual machines behind NAT only
those of QEMU and VirtualBox are known by their own address (10.0.2.0/24, gateway 10.0.2.2): each is
alone in its network. For an elastic job that one host is enough for, it is a warning.

References
----------
DeepSpeed source: deepspeed/launcher/runner.py (master_addr); hostname(1); docker documentation,
bridge network driver.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from typing import TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    On,
    Severity,
    Skip,
    Step,
    Where,
    master_host,
    shell,
    spans_machines,
)
from nccl_doctor.toolkit.c10d import port_of
from nccl_doctor.toolkit.containers import given_by, is_bridged, network_for
from nccl_doctor.toolkit.hosts import excuse_of, shared_network
from nccl_doctor.toolkit.nccl.interface_choice import subnet_prefixes
from nccl_doctor.toolkit.net.interfaces import (
    interfaces,
    is_link_local,
    is_loopback,
    leads_inside,
)
from nccl_doctor.toolkit.net.names import look_up
from nccl_doctor.toolkit.relaunch import start_with

LOOK_UP_S = 2.0
NOT_SHARED = Kind(
    "addr-not-shared",
    Layer.NAME,
    "MASTER_ADDR is in a network that the other hosts do not share",
    "The other hosts connect to themselves or get no answer; rank 0 waits until its time-out.",
    Fix(
        Step(
            shell("# export MASTER_ADDR=ADDRESS"),
            On.EVERY,
            note="of rank 0's host, on the network that the hosts share",
        )
    ),
)


class MasterNetworkFacts(TypedDict):
    """Facts that `observe` returns; other checks read them. `networks`: (interface, address,
    network).
    """

    master_addr: str
    answers: list[str]
    networks: list[list[str]]


class MasterNetwork(Check):
    """Finds the interface of MASTER_ADDR, and compares the networks of the hosts."""

    name = "master_network"
    layer = Layer.NAME
    kinds = (NOT_SHARED,)
    reads = ("duplicate_address", "port")

    def observe(self, ctx: Context) -> MasterNetworkFacts:
        """`answers` of MASTER_ADDR, and `networks`: (interface, address, network) of this host."""
        master = ctx.launch.master_addr
        if not master:
            raise Skip("there is no MASTER_ADDR")
        if ctx.launch.nnodes == 1:
            raise Skip("one host: no other host has to connect")
        ctx.breadcrumb(f"look up {master}")
        prefixes = subnet_prefixes()
        return {
            "master_addr": master,
            "answers": list(look_up(master, LOOK_UP_S).answers),
            "networks": [
                [nic.name, own, str(ipaddress.ip_network(f"{own}/{prefixes[own]}", strict=False))]
                for nic in interfaces()
                for own in nic.addresses
                if nic.up and own in prefixes and not (is_loopback(own) or is_link_local(own))
            ],
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings only if no other host came in: one that did proves that there is a route."""
        master = master_host(cluster)
        came = [host for host in cluster.present_hosts if host.joined]
        # An elastic job goes on with one host, where no other one can join it.
        goes_on = cluster.job.elastic is not None and not spans_machines(cluster)
        if (
            master is None
            or not (spans_machines(cluster) or goes_on)
            or any(host.id != master.id for host in came)
        ):
            return
        seen = {rank.host.id: facts for rank, facts in cluster.facts(self.name)}
        if master.id not in seen:
            return
        facts = seen.pop(master.id)
        mine = [(nic, own, net) for nic, own, net in facts["networks"] if own in facts["answers"]]
        if not mine:
            return  # it is no address of this host, or a loopback one: check master_addr
        nic, own, net = mine[0]
        others = [view["networks"] for view in seen.values()]
        better = shared_network([entry for entry in facts["networks"] if entry[0] != nic], others)
        runtime = _runtime(cluster, master, own, net)
        if runtime:
            said = f"{own} on {nic} is the address of {given_by(runtime)}, "
            said += "which leads to no other machine"
        elif leads_inside(nic):
            said = f"{own} is the address of {nic}, which leads to no other machine"
        elif others and better and not _can_be_reached(cluster, master, own, others):
            said = (
                f"{own} on {nic} is in {net}; no other host is in that network or has a route to it"
            )
        else:
            return
        address = better[1] if better else "ADDRESS"
        named = "" if facts["master_addr"] == own else f"{facts['master_addr']}: "
        place = f"MASTER_ADDR={named}"
        first = [rank for rank in [cluster.first_on(master)] if rank is not None]
        fix = Fix(*start_with(first, "master_addr", address, On.EVERY))
        if cluster.job.rendezvous.backend.lower() == "c10d":
            endpoint = cluster.job.rendezvous.endpoint
            place = f"--rdzv-endpoint={endpoint}: "
            said += "; each host where it is an address of its own takes itself for the endpoint"
            line = shell("# --rdzv-endpoint {}:{}", address, port_of(endpoint))
            fix = Fix(Step(line, On.EVERY, note="in the line of torchrun"))
        yield Finding(
            NOT_SHARED,
            f"{place}{said}",
            Where(hosts=(master.label,), interfaces=(nic,)),
            {"networks of rank 0's host": facts["networks"]},
            network_for(runtime) if runtime else fix,
            severity=Severity.WARN if goes_on else None,
            confidence=Confidence.LIKELY,
            effects=(Effect.SHUTS_OUT,),
            excused_by=excuse_of(cluster),
        )


def _runtime(cluster: Cluster, host: Host, own: str, net: str) -> str:
    """Runtime of a container behind a bridge of its machine, else empty.

    `own` is its only address, in a network that the runtime gives to such bridges. One that spans
    machines comes with a second address (docker_gwbridge), or was chosen by somebody (MACVLAN).
    """
    for _, facts in cluster.facts_on("duplicate_address", host):
        alone = facts["likely"] and facts["likely"][1] == own and not facts.get("others")
        runtime = str(facts.get("container"))
        if alone and is_bridged(runtime, net):
            return runtime
    return ""


def _can_be_reached(
    cluster: Cluster, master: Host, own: str, others: Sequence[Sequence[Sequence[str]]]
) -> bool:
    """True if any other host is in the network of the address, or found a route to it."""
    address = ipaddress.ip_address(own)
    beside = any(
        address in ipaddress.ip_network(net) for networks in others for _, _, net in networks
    )
    ways = [
        facts["knock"]["last"]["outcome"]
        for rank, facts in cluster.facts("port")
        if rank.host.id != master.id and (facts.get("knock") or {}).get("last")
    ]
    lost = ("unreachable", "no-neighbour", "turned-back")
    return beside or not ways or any(way not in lost for way in ways)
