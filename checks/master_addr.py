"""Where does MASTER_ADDR lead, on every host?

What it checks
--------------
Every host resolves MASTER_ADDR and its own host name, as torch and gloo will, and names the
addresses of its interfaces. The answers are compared: whether there is one at all, whether it is
loopback although the job spans hosts, whether all hosts get the same, whether rank 0's host owns
it (and if not, who does), whether IPv6 answers can be used, and whether look-ups in both directions
are quick. Look-ups go to the resolver of the host; no packet goes to the master.

Why it matters
--------------
Every rank meets the others at MASTER_ADDR. Where it does not resolve, or leads to the wrong machine
or back to the host itself, that rank waits for its whole time-out and the others wait for it.
gloo publishes the address that a host's *own* name resolves to: with the line "127.0.1.1 myhost" of
many distributions its peers are told to connect to themselves. torch looks up the name of every
peer for its log, so a name server that does not answer costs seconds for each connection.

How to fix
----------
Set MASTER_ADDR to the address of rank 0's host on the network that the hosts share, or give its
name the same address on every host. Let a host's own name resolve to that network too, or set
GLOO_SOCKET_IFNAME to the exact interface.

When it is wrong
----------------
Behind address translation, a floating address or a service name no host owns the address; where
everybody signed in through it this is only mentioned. A name that appears later than the few
seconds for which this check asks is reported as missing. One slow look-up is not reported: only one
that is slow again when it is repeated.

References
----------
PyTorch: torch.distributed.TCPStore, environment variable initialization, GLOO_SOCKET_IFNAME;
getaddrinfo(3), hosts(5), resolv.conf(5); RFC 6724 (order of addresses).
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nccl_doctor.api import (
    SLOW_S,
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Kind,
    Layer,
    LookUp,
    Rank,
    Severity,
    Untested,
    Where,
    has_route,
    interfaces,
    is_link_local,
    is_loopback,
    look_up,
    odd_ones_out,
)

ADDR_UNRESOLVABLE = Kind(
    code="addr-unresolvable",
    layer=Layer.NAME,
    title="A host name that the job needs does not resolve",
    why="Ranks meet at MASTER_ADDR, and gloo publishes the address of a host's own name; without "
    "an answer a rank retries in silence until its time-out.",
    fix='add "ADDRESS NAME" to /etc/hosts or the name server, or use the address itself',
)
ADDR_LOOPBACK = Kind(
    code="addr-loopback",
    layer=Layer.NAME,
    title="A host name leads back to the host itself",
    why="A loopback address means another machine on every host: peers that are given it connect "
    "to themselves.",
    fix="export MASTER_ADDR=ADDRESS of rank 0's host on the network that the hosts share",
)
ADDR_DIFFERS = Kind(
    code="addr-differs",
    layer=Layer.NAME,
    title="MASTER_ADDR leads to different machines on different hosts",
    why="Hosts that look for rank 0 at another address never meet it.",
    fix="use the address itself: export MASTER_ADDR=ADDRESS on every host",
)
ADDR_NOT_ON_MASTER = Kind(
    code="addr-not-on-master",
    layer=Layer.NAME,
    title="MASTER_ADDR is not an address of rank 0's host",
    why="Rank 0 serves the store on its own host; everybody else looks for it elsewhere.",
    fix="export MASTER_ADDR=ADDRESS of the host that runs rank 0, or start rank 0 there",
)
ADDR_FAMILY_MIXED = Kind(
    code="addr-family-mixed",
    layer=Layer.NAME,
    title="MASTER_ADDR has addresses of a family that this host cannot use",
    why="torch tries IPv6 answers before IPv4 ones; without a route each costs an attempt, and "
    "with no other answer the master is out of reach.",
    fix="remove the AAAA record of the master, or give this host an IPv6 route",
    severity=Severity.WARN,
)
ADDR_DIGITS_ONLY = Kind(
    code="addr-digits-only",
    layer=Layer.NAME,
    title="A host name of digits only is taken for an IPv4 address",
    why="The resolver reads a plain number as a 32-bit address and never asks for the name.",
    fix="use the fully qualified name or the address",
)
DNS_SLOW = Kind(
    code="dns-slow",
    layer=Layer.NAME,
    title="Name look-ups are slow",
    why="torch looks up the name of every peer when it connects, if only for its log: each "
    "connection of the store waits for it.",
    fix="repair the name server in /etc/resolv.conf, or list the hosts of the job in /etc/hosts",
    severity=Severity.WARN,
)

LOOK_UP_S = 4.0  # just under the resolver's own first time-out of 5 s: the answer would be late
PATIENCE_S = 2.5  # the name of a pod that starts with the job comes seconds after it
ALL_S = 4.7
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")
_VIRTUAL = re.compile(r"docker|veth|br-|virbr|cni|flannel|cali|tun|tap")


class MasterAddr(Check):
    """Resolve MASTER_ADDR and the own host name; compare over hosts."""

    name = "master_addr"
    layer = Layer.NAME
    cost = "seconds"
    kinds = (
        ADDR_UNRESOLVABLE,
        ADDR_LOOPBACK,
        ADDR_DIFFERS,
        ADDR_NOT_ON_MASTER,
        ADDR_FAMILY_MIXED,
        ADDR_DIGITS_ONLY,
        DNS_SLOW,
    )

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """All look-ups at once; back within 5 s whatever the resolver does."""
        master, own = ctx.launch.master_addr, socket.gethostname()
        if not master:
            raise Untested("MASTER_ADDR is not set")
        until = time.monotonic() + ALL_S
        ctx.breadcrumb(f"look up {master} and {own}")
        with ThreadPoolExecutor(4) as pool:
            mine = pool.submit(look_up, own, LOOK_UP_S)
            found = look_up(master, LOOK_UP_S, patience_s=PATIENCE_S)
            left = min(LOOK_UP_S, until - time.monotonic())
            names = [
                pool.submit(look_up, address, left, reverse=True)
                for address in found.answers[:2]
                if left > 2 * SLOW_S  # less cannot tell a slow look-up from a stalled one
            ]
            return {
                "master_addr": master,
                "master": found.to_json(),
                "own": mine.result().to_json(),
                "reverse": [name.result().to_json() for name in names],
                "no_route": [answer for answer in found.answers if not has_route(answer)],
                "interfaces": [
                    [nic.name, list(nic.addresses)]
                    for nic in interfaces()
                    if nic.up and not nic.loopback
                ],
            }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Every host by itself, then what MASTER_ADDR leads to."""
        views = [_View(cluster, rank, facts) for rank, facts in cluster.facts(self.name)]
        machines = {(view.host.name, view.host.addresses) for view in views}
        everybody_is_in = cluster.complete and not cluster.absent
        # Two node ranks on one machine need no network; while somebody is missing, trust nnodes.
        spans = cluster.is_multi_host() and (len(machines) > 1 or not everybody_is_in)
        for view in views:
            yield from _unusable(view, views)
            yield from _slow(view)
            if spans:
                yield from _own_name(cluster, view)
        if spans:
            yield from _loopback(cluster, views)
            yield from _not_on_master(cluster, views)
            yield from _differing(views)


class _View:
    """What one host saw, with what the rules ask of it."""

    def __init__(self, cluster: Cluster, rank: Rank, facts: Mapping[str, Any]) -> None:
        self.rank, self.host, self.facts = rank, rank.host, facts
        self.name = str(facts["master_addr"])
        self.found = LookUp.from_json(facts["master"])
        self.own = LookUp.from_json(facts["own"])
        self.where = Where(hosts=(rank.host.name,) if rank.host.name else ())
        self.answers = self.found.answers
        self.shown = f"MASTER_ADDR={self.name} resolves to {', '.join(self.answers)}"
        self.is_digits = self.name.isdecimal()
        self.is_loopback = bool(self.answers) and all(is_loopback(a) for a in self.answers)
        self.leads_somewhere = bool(self.answers) and not (self.is_digits or self.is_loopback)
        self.is_master = any(other.rank == 0 for other in cluster.ranks_on(rank.host))
        self.got_in = cluster.complete and not self.is_master
        """It met the coordinator through MASTER_ADDR; rank 0 need not have."""

    def owns(self, address: str) -> bool:
        return address in self.host.addresses or is_loopback(address)

    def is_elsewhere(self) -> bool:
        """Whether this host certainly is not rank 0's, by its own word."""
        node = self.rank.launch.node_rank if self.rank.launch else None
        first_of_host = self.rank.local_rank == 0 and self.rank.rank
        return not self.is_master and bool(node if node is not None else first_of_host)

    def nic(self) -> tuple[str, str] | None:
        """(interface, address) that peers are most likely to reach."""
        usable = [
            (bool(_VIRTUAL.match(nic)), ":" in address, nic, address)
            for nic, addresses in self.facts["interfaces"]
            for address in addresses
            if not is_link_local(address)
        ]
        return min(usable, key=lambda u: u[:2])[2:] if usable else None


def _unusable(view: _View, views: Sequence[_View]) -> Iterator[Finding]:
    """MASTER_ADDR is no name at all, has no address here, or one that cannot be used."""
    name, found = view.name, view.found
    if view.is_digits and not view.got_in and not view.is_loopback:
        yield Finding(ADDR_DIGITS_ONLY, f"{view.shown}: it is read as a number", view.where)
    elif not found.answers:
        fix = f"add rank 0's host to /etc/hosts here: ADDRESS {name}"
        if "/" in name or name.count(":") == 1:
            fix = "MASTER_ADDR takes a name or an address alone: the port goes into MASTER_PORT"
        for address in (a for other in views for a in other.answers if not is_loopback(a)):
            fix = f'echo "{address} {name}" >> /etc/hosts'
        late = "; it came later, as this host did sign in" if view.got_in else ""
        yield Finding(
            ADDR_UNRESOLVABLE,
            f"MASTER_ADDR={name} does not resolve: {found.error}{late}",
            view.where,
            {"took_s": list(found.took_s)},
            fix=fix,
            severity=Severity.WARN if view.got_in else None,
            confidence=Confidence.LIKELY if found.timed_out else Confidence.CERTAIN,
        )
    useless = [a for a in view.facts["no_route"] if ":" in a]
    if useless and view.leads_somewhere:
        works = view.got_in or view.is_master
        stuck = set(view.answers) <= set(view.facts["no_route"])
        yield Finding(
            ADDR_FAMILY_MIXED,
            f"{view.shown}, but there is no route to {', '.join(useless)}",
            view.where,
            severity=Severity.INFO if works else Severity.FAIL if stuck else None,
        )


def _loopback(cluster: Cluster, views: Sequence[_View]) -> Iterator[Finding]:
    """MASTER_ADDR leads back to a host that the others, or that itself, will not find there."""
    target = next((v.nic() for v in views if v.is_master), None)
    address = target[1] if target else "ADDRESS of rank 0's host"
    for view in views:
        # Whether it is loopback wherever it is asked, and not by a line in this host's hosts file.
        anywhere = view.name in (*_LOOPBACK_NAMES, *view.answers)
        # Rank 0's host may call itself 127.0.1.1: it does reach its own store there.
        theirs = anywhere and not (cluster.complete and not cluster.absent)
        if view.is_loopback and (theirs if view.is_master else not view.got_in):
            entry = "" if anywhere else f", or take {view.name} off the loopback line of /etc/hosts"
            yield Finding(
                ADDR_LOOPBACK,
                f"{view.shown}, in a job of {max(cluster.nnodes, len(cluster.hosts))} hosts",
                view.where,
                fix=f"export MASTER_ADDR={address} on every host{entry}",
                # Seen from one machine, two node ranks that share it look the same.
                confidence=Confidence.CERTAIN if len(views) > 1 else Confidence.LIKELY,
            )


def _not_on_master(cluster: Cluster, views: Sequence[_View]) -> Iterator[Finding]:
    """MASTER_ADDR leads to a host that is not rank 0's."""
    master = next((view for view in views if view.is_master), None)
    if master is None and len(views) == 1:
        view = views[0]
        if view.leads_somewhere and view.is_elsewhere() and all(map(view.owns, view.answers)):
            yield Finding(
                ADDR_NOT_ON_MASTER,
                f"{view.shown}, which is this very host, but rank 0 is on another",
                view.where,
                confidence=Confidence.LIKELY,  # unless both are on this machine
            )
    if master and master.leads_somewhere and not any(map(master.owns, master.answers)):
        owners = [v.host.label for v in views if any(map(v.owns, master.answers))]
        severity = Severity.FAIL
        if cluster.complete:  # address translation, or a service name, where others did come in
            came = any(view.got_in for view in views)
            severity = (Severity.WARN if cluster.absent else Severity.INFO) if came else severity
        nic = master.nic()
        yield Finding(
            ADDR_NOT_ON_MASTER,
            f"{master.shown}, which "
            + (
                f"belongs to {', '.join(owners)}" if owners else "no interface of rank 0's host has"
            ),
            master.where,
            {"owners": owners, "rank_0_host": list(master.host.addresses)},
            fix=f"export MASTER_ADDR={nic[1]} on every host, or start rank 0 on {master.name}"
            if nic
            else "",
            severity=severity,
            confidence=Confidence.CERTAIN
            if owners and severity is Severity.FAIL
            else Confidence.LIKELY,
        )


def _differing(views: Sequence[_View]) -> Iterator[Finding]:
    """Blame the hosts whose answers are not rank 0's addresses, else those that stand alone."""
    asked = {view: tuple(sorted(view.answers)) for view in views if view.leads_somewhere}
    master = next((view for view in views if view.is_master), None)
    usual: tuple[str, ...] | None
    if master and any(map(master.owns, master.answers)):
        usual = tuple(a for a in (*master.answers, *master.host.addresses) if not is_loopback(a))
        odd = tuple(view for view in asked if not all(map(master.owns, view.answers)))
    else:
        result = odd_ones_out(asked)
        usual, odd = (result.usual, result.places) if result else (None, ())
    for view in odd:
        partly = bool(set(view.answers) & set(usual or ()))
        yield Finding(
            ADDR_DIFFERS,
            f"{view.shown}; " + (f"rank 0 is at {usual[0]}" if usual else "no majority agrees"),
            view.where,
            fix=f"export MASTER_ADDR={usual[0]}, or correct {view.name} in /etc/hosts or the name "
            "server"
            if usual
            else "",
            severity=(Severity.WARN if partly else Severity.INFO) if view.got_in else None,
            confidence=Confidence.CERTAIN
            if master
            else Confidence.LIKELY
            if usual
            else Confidence.POSSIBLE,
        )


def _own_name(cluster: Cluster, view: _View) -> Iterator[Finding]:
    """The rule of gloo: publish the first address of the own host name that can be bound here."""
    name, answers, nic = view.own.query, view.own.answers, view.nic()
    published = next(filter(view.owns, answers), "")
    if view.rank.env.get("GLOO_SOCKET_IFNAME") or (published and not is_loopback(published)):
        return
    if not answers:
        kind, message = ADDR_UNRESOLVABLE, f"does not resolve: {view.own.error}"
    elif name.isdecimal():
        kind, message = ADDR_DIGITS_ONLY, f"is read as the IPv4 address {answers[0]}"
    elif published:
        kind, message = ADDR_LOOPBACK, f"resolves to {published}: gloo gives that to its peers"
    else:
        kind = ADDR_LOOPBACK
        message = f"resolves to {', '.join(answers)}, not an address of it: gloo takes 127.0.0.1"
    # A host that never got in did not fail for its own name: that would bite later.
    fails = cluster.backend == "gloo" and cluster.complete
    yield Finding(
        kind,
        f"own host name {name} {message}",
        view.where,
        fix=f'export GLOO_SOCKET_IFNAME={nic[0]} on this host, or put "{nic[1]} {name}" into '
        "/etc/hosts in place of its line"
        if nic
        else "set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts",
        severity=Severity.FAIL if fails else Severity.WARN,
    )


def _slow(view: _View) -> Iterator[Finding]:
    """A name that never came is no slow name: it has its own finding."""
    reverse = [LookUp.from_json(data) for data in view.facts["reverse"]]
    forward = [found for found in (view.found, view.own) if found.answers or found is view.own]
    slow = [found for found in (*forward, *reverse) if found.slow]
    if slow:
        spent = {found: f"{max(found.took_s[:2]):.0f} s" for found in slow}
        shown = ", ".join(
            f"{found.query} {'gave no answer in ' if found.timed_out else ''}{spent[found]}"
            for found in slow
        )
        yield Finding(
            DNS_SLOW,
            f"slow twice in a row: {shown}",
            view.where,
            {"took_s": {found.query: list(found.took_s) for found in slow}},
        )
