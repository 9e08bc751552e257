"""Where does MASTER_ADDR lead, on every host?

What it checks
--------------
Every host resolves MASTER_ADDR, as torch will, and lists the addresses of its interfaces. The
answers are compared: whether there is one at all, whether it is loopback although the job spans
hosts, whether all hosts get the same, whether rank 0's host has the address (and if not, which host
has it), whether IPv6 answers can be used, and whether look-ups are fast: forward, backward, and for
IPv6 alone, with which torch's store begins, and for which /etc/hosts often has no answer.
Look-ups go to the resolver of the host; no packet goes to the master. With several hosts, rank 0's
host also looks up the names of the addresses that call its store (up to 16, in check `firewall`).

Why it matters
--------------
Every rank meets the others at MASTER_ADDR. If it does not resolve, or leads to the wrong machine or
back to the host itself, that rank waits for its whole time-out and the others wait for it. torch
looks up the name of every peer for its log, so a name server that does not answer costs seconds for
each connection; the store does so for one rank after the other, and serves nobody meanwhile.

How to fix
----------
Set MASTER_ADDR to the address of rank 0's host on the network that the hosts share, or give its
name the same address on every host.

When it is wrong
----------------
Behind address translation, a floating address or a service name, no host has the address; if all
hosts signed in through it this is only a note. Of several addresses of a name torch tries one after
the other: one that is no host of the job is a note, a warning where it comes first, and a failure
where another program answers there, or nobody says no for longer than the job waits. A name that
appears later is reported as missing only if check `port`, which retries until `--join-timeout`, was
deselected. One slow look-up is not reported: only one that is slow again when repeated. Where
nobody sets MASTER_ADDR, nccl-doctor derives one from the variables of srun or mpirun: what is wrong
with that is a warning, and a run whose ranks did not meet there is unknown, not failed
(`master-not-set`).

References
----------
PyTorch: torch.distributed.TCPStore, environment variable initialization; getaddrinfo(3), hosts(5),
resolv.conf(5); RFC 6724 (order of addresses); pytorch/pytorch issue 159007.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Layer,
    Skip,
    Untested,
    spans_machines,
)
from nccl_doctor.toolkit.hosts import excuse_of
from nccl_doctor.toolkit.net.dial import has_route
from nccl_doctor.toolkit.net.interfaces import interfaces, is_loopback
from nccl_doctor.toolkit.net.names import SLOW_S, look_up
from nccl_doctor.toolkit.net.routes import source_of
from nccl_doctor.toolkit.shared_kinds import ADDR_DIGITS_ONLY, ADDR_LOOPBACK, ADDR_UNRESOLVABLE

from .answers import (
    ADDR_DIFFERS,
    ADDR_FAMILY_MIXED,
    ADDR_NOT_ON_MASTER,
    DNS_SLOW,
    View,
    differing,
    host_of_rank_0,
    loopback,
    slow,
    unusable,
)
from .whose import not_on_master

LOOK_UP_S = 4.0  # just under the resolver's own first time-out of 5 s: the answer would be late
PATIENCE_S = 2.5  # the name of a pod that starts with the job comes seconds after it
ALL_S = 4.7


class MasterAddrFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    master_addr: str
    master: dict[str, Any]
    ipv6: dict[str, Any]
    reverse: list[dict[str, Any]]
    source: str
    no_route: list[str]
    interfaces: list[list[Any]]


class MasterAddr(Check):
    """Resolves MASTER_ADDR on every host and compares the answers."""

    name = "master_addr"
    layer = Layer.NAME
    cost = "seconds"
    instant_when_answered = True
    kinds = (
        ADDR_UNRESOLVABLE,
        ADDR_LOOPBACK,
        ADDR_DIFFERS,
        ADDR_NOT_ON_MASTER,
        ADDR_FAMILY_MIXED,
        ADDR_DIGITS_ONLY,
        DNS_SLOW,
    )
    at_once = (ADDR_UNRESOLVABLE,)
    reads = ("duplicate_address", "firewall", "own_address", "own_name", "port")

    def observe(self, ctx: Context) -> MasterAddrFacts:
        """Answers of the look-ups in both directions, within 5 s whatever the resolver does, and
        before its deadline.
        """
        master = ctx.launch.master_addr
        if not master:
            if ctx.launch.launcher == "none":
                raise Skip("no launcher started this process: there is no MASTER_ADDR")
            raise Untested("MASTER_ADDR is not set")
        until = min(time.monotonic() + ALL_S, ctx.deadline)
        ctx.breadcrumb(f"look up {master}")
        with ThreadPoolExecutor(3) as pool:
            limit, patience = (
                min(most, until - time.monotonic()) for most in (LOOK_UP_S, PATIENCE_S)
            )
            ipv6 = pool.submit(look_up, master, limit, family=socket.AF_INET6)
            found = look_up(master, limit, patience_s=patience)
            left = min(LOOK_UP_S, until - time.monotonic())
            names = [
                pool.submit(look_up, address, left, reverse=True)
                for address in found.answers[:2]
                if left > 2 * SLOW_S  # less cannot tell a slow look-up from a stalled one
            ]
            return {
                "master_addr": master,
                "master": found.to_json(),
                "ipv6": ipv6.result().to_json(),
                "reverse": [name.result().to_json() for name in names],
                "source": next(filter(None, map(_source, found.answers)), ""),
                "no_route": [answer for answer in found.answers if not has_route(answer)],
                "interfaces": [
                    [nic.name, list(nic.addresses)]
                    for nic in interfaces()
                    if nic.up and not nic.loopback
                ],
            }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on each host's look-ups, then on where MASTER_ADDR leads; those on an address
        that nobody gave are excused.
        """
        excuse = excuse_of(cluster)
        for finding in self._found(cluster):
            yield finding if finding.code == DNS_SLOW.code else finding.replaced(excused_by=excuse)

    def _found(self, cluster: Cluster) -> Iterator[Finding]:
        ports = {rank.seat: facts for rank, facts in cluster.facts("port")}
        views = [
            View(cluster, rank, facts, ports.get(rank.seat))
            for rank, facts in cluster.facts(self.name)
        ]
        own = {rank.seat: facts["own"] for rank, facts in cluster.facts("own_name")}
        mute = {r.seat for r, f in cluster.facts("own_address") if f.get("loops") is False}
        bridged = {r.seat: f for r, f in cluster.facts("duplicate_address") if _is_bridged(f)}
        called = {r.seat: f.get("clients", ()) for r, f in cluster.facts("firewall", "matrix")}
        master = host_of_rank_0(views)
        for view in views:
            yield from unusable(view, views, master)
            seat = view.rank.seat
            for found in slow(view, own.get(seat), called.get(seat, ())):
                # A resolver on this host is asked through the loopback interface.
                because = "own-address-blocked" if seat in mute else None
                yield found.replaced(explained_by=because)
        if spans_machines(cluster):
            yield from loopback(cluster, views)
            yield from not_on_master(cluster, views, bridged)
            yield from differing(views)


def _source(answer: str) -> str:
    """Own address on the way to an answer, if there is a way that leaves this host."""
    source = source_of(answer)[0] or ""
    return "" if not source or is_loopback(source) else source


def _is_bridged(facts: Mapping[str, Any]) -> bool:
    """True if the runtime of a container chose the address that others would use for it."""
    return bool(facts.get("container") and facts["likely"])
