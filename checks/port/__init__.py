"""Can every host connect to the store at MASTER_ADDR:MASTER_PORT?

What it checks
--------------
On rank 0's host: whether MASTER_PORT may be bound, whether another process holds it (and which
one), and whether it is in the range from which the kernel assigns random ports. On every host:
whether the addresses of MASTER_ADDR, tried in the order in which torch tries them (that of the
resolver, RFC 6724), accept connections, and whether a TCPStore answers. As hosts start at different
times, the name, the route and the port are tried again until a store answers, until shortly before
`--join-timeout`, or until waiting cannot help: what answers is no store, a rule of this host
forbids the call, there is no route, a firewall rejects it, or the host answers on other ports and
only this one is silent. Only the last result counts. With torchrun the agent rightly holds the
port, and has done so before any rank starts; with Ray Train, the worker of rank 0.

Why it matters
--------------
A rank that cannot connect retries silently until its time-out, ten minutes or more. Refused,
unanswered, rejected and answered by another service look the same to the job, and have four
different causes. Where a name has several addresses, torch waits about 130 s at one that gives no
answer before it tries the next: the job starts late, and torchrun's c10d rendezvous, which waits
60 s (`--rdzv-conf read_timeout`), not at all.

How to fix
----------
Nothing listens: start rank 0, or read its log. No answer, or a rejection: open the port in the
firewall of rank 0's host (or the security group, or the network policy). In use: end the process
that is named, or choose another MASTER_PORT below the ephemeral range, the same on every host.

When it is wrong
----------------
A firewall that answers with a reset looks like a port where nothing listens; so does, before Linux
5.9, one that answers "port unreachable". A host that is off looks like a firewall that drops. A
router on the way may also answer that it cannot deliver; who answered is known from Linux 5.9 on,
and before that such an answer looks like a firewall's. A frozen store looks like a proxy that
accepts connections and forwards nothing. Where no host on the local network has the address, rank
0's host may be off or cut off, or the address may be wrong: the link is named, not this host. The
process that holds a port cannot always be seen if it belongs to another user or container.

References
----------
PyTorch: torch.distributed.TCPStore; ip(7): ip_local_port_range, ip_unprivileged_port_start;
proc(5): /proc/net/tcp; connect(2): error numbers; ip(7): IP_RECVERR; Linux net/ipv4/icmp.c and
net/ipv6/icmp.c (error numbers of ICMP messages); RFC 1122, 3.2.2.1; RFC 4443, 3.1.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping, Sequence
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
    Rank,
    Severity,
    Skip,
    Step,
    Untested,
    Where,
    look,
    master_host,
    shell,
)
from nccl_doctor.toolkit.c10d import read_timeout, rendezvous_of
from nccl_doctor.toolkit.firewall.netfilter import who_stops
from nccl_doctor.toolkit.firewall.portrules import explains_knock, fits, how_to_let_pass, stopped_by
from nccl_doctor.toolkit.hosts import excuse_of
from nccl_doctor.toolkit.net.dial import SILENCE_S
from nccl_doctor.toolkit.net.ports import (
    PortHolder,
    ephemeral_range,
    may_bind,
    mesh_proxy,
    port_holder,
    reserved_ports,
)
from nccl_doctor.toolkit.relaunch import endpoint_of, start_with
from nccl_doctor.toolkit.shared_kinds import PORT_BLOCKED

from .kinds import (
    DEAD_ROUTE,
    NO_ROUTE,
    PORT_EPHEMERAL,
    PORT_FORBIDDEN,
    PORT_IN_USE,
    PORT_NOT_THE_STORE,
    PORT_PRIVILEGED,
    PORT_REFUSED,
    WRONG_ENTRY,
)
from .own_port import ANOTHER_PORT, own_port
from .reasons import excuse_for, in_common, reason_of
from .rejections import forbidden_here, refused_by, rejected_by, rejected_here, turned_back_by
from .road import Knocks, knock

SHORT_S = 7.0  # if the store is up before the first host connects
MARGIN_S = 1.0
_CHOOSERS = ("torchrun", "accelerate", "ray")
"""Launchers that look for a free port on rank 0's host themselves, where they serve none: nobody
could have chosen a better one."""


class _Always(TypedDict):
    """The part of `PortFacts` that is always there."""

    master_addr: str
    port: int
    server: str
    bind_errno: int | None
    bind_error: str
    may_bind: bool
    ephemeral: tuple[int, int] | None
    reserved: str


class PortFacts(_Always, total=False):
    """Facts that `observe` returns; other checks read them. No `knock` where the port is taken."""

    holder: PortHolder | None
    mesh: str
    store_timeout_s: float | None
    knock: Knocks


class Port(Check):
    """Connects to MASTER_ADDR:MASTER_PORT; on rank 0's host, examines the port itself."""

    name = "port"
    layer = Layer.PORT
    cost = "seconds"
    kinds = (
        PORT_IN_USE,
        PORT_PRIVILEGED,
        PORT_EPHEMERAL,
        PORT_REFUSED,
        PORT_BLOCKED,
        PORT_NOT_THE_STORE,
        NO_ROUTE,
    )
    seeks_master = True
    at_once = (PORT_IN_USE, PORT_PRIVILEGED, PORT_FORBIDDEN)
    reads = ("master_firewall", "master_network", "neighbours", "torch_import")

    def deadline(self, ctx: Context) -> float:
        """The time in which rank 0 may come; short if the store is up: torchrun's, or our own."""
        waits = not ctx.launch.agent_store and ctx.door.get("server") == "other"
        return max(2 * MARGIN_S, ctx.join_timeout_s if waits else SHORT_S)

    def observe(self, ctx: Context) -> PortFacts:
        """The port of this host, and the connection to the master's, before the deadline."""
        master, port = ctx.launch.master_addr, ctx.launch.master_port
        if not master or port is None:
            if ctx.launch.launcher == "none":
                raise Skip("no launcher started this process: there is no MASTER_ADDR")
            raise Untested("MASTER_ADDR or MASTER_PORT is not set, or MASTER_PORT is not a port")
        if ctx.door.get("server") == "none":
            raise Untested("this host cannot serve the store: torch cannot be imported")
        until = min(ctx.deadline, time.monotonic() + self.deadline(ctx)) - MARGIN_S
        bind_errno = ctx.door.get("bind_errno")
        facts: PortFacts = {
            "master_addr": master,
            "port": port,
            "server": ctx.door.get("server", "other"),
            "bind_errno": bind_errno,
            "bind_error": ctx.door.get("bind_error", ""),
            "may_bind": may_bind(port, ctx.root),
            "ephemeral": ephemeral_range(port, ctx.root),
            "reserved": reserved_ports(ctx.root),
        }
        if bind_errno is not None:
            return {
                **facts,
                "holder": port_holder(port, ctx.root) if bind_errno == errno.EADDRINUSE else None,
            }
        road = knock(
            master,
            port,
            until,
            serves=facts["server"] == "self",
            elsewhere=ctx.launch.node_rank not in (0, None),
            breadcrumb=ctx.breadcrumb,
            root=ctx.root,
        )
        if road["last"] is None:
            error, tried_s = road["name"]["error"], road["seconds"]
            raise Untested(f"MASTER_ADDR {master} does not resolve in {tried_s:.0f} s: {error}")
        answer = road["last"]["answer"]
        if facts["server"] == "self" and answer != "store" and not port_holder(port, ctx.root):
            raise Untested("the process that serves the store of this run has ended")
        limit_s = read_timeout(rendezvous_of(ctx.job, ctx.env))
        return {
            **facts,
            "mesh": mesh_proxy(ctx.env, ctx.root),
            # Under an agent this is past: its own store has the job's time-out.
            "store_timeout_s": None if ctx.launch.agent_store else limit_s,
            "knock": road,
        }

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on the port of the host that serves, and on hosts that could not connect."""
        theirs = [facts for _, facts in cluster.facts("master_firewall")]
        excuses = excuse_of(cluster), excuse_of(cluster, "master_port")
        master = master_host(cluster)
        unserved: dict[int, str] = {}
        for rank, facts in cluster.facts(self.name):
            for finding in own_port(rank, facts) if facts["server"] == "self" else ():
                if finding.level is Severity.FAIL:
                    unserved[facts["port"]] = finding.code
                if finding.kind is PORT_EPHEMERAL and _chosen_by_launcher(rank):
                    continue
                if excuses[1] and finding.kind is PORT_EPHEMERAL:  # the job has another port
                    finding = finding.replaced(severity=Severity.INFO)
                yield finding.replaced(excused_by=excuses[1])
        for rank, facts in cluster.facts(self.name):
            if "knock" in facts and (facts["knock"]["last"] or {}).get("answer") == "store":
                for finding in _hidden(_Seen(rank, facts, _far_end(cluster, rank, facts)), facts):
                    theirs_too = master and {*_silent(facts)} <= {*master.addresses}
                    yield finding.replaced(explained_by=None if theirs_too else "addr-differs")
                continue
            # Rank 0 reaches the store that it serves even where MASTER_ADDR is another machine.
            left_out = facts["server"] == "self" or not rank.host.joined
            # Check master_firewall reports the rule, on the host that has it.
            if left_out and "knock" in facts and not any(explains_knock(t, facts) for t in theirs):
                reason = reason_of(cluster, rank, facts, unserved)
                seen = _Seen(rank, facts, _far_end(cluster, rank, facts))
                seen.macs = _hardware_of(cluster, master, seen.last["address"])
                seen.common = in_common(cluster, rank, master)
                for finding in _road(seen, facts):
                    excuse = excuse_for(facts["knock"]["last"], master, *excuses)
                    yield finding.replaced(explained_by=reason, excused_by=excuse)


_IS_UP = "is rank 0's host up? If so:"


def _chosen_by_launcher(rank: Rank) -> bool:
    launch = rank.launch
    return launch is not None and launch.launcher in _CHOOSERS


class _Seen:
    """The last attempt of one host to connect, and what all its findings share."""

    def __init__(self, rank: Rank, facts: Mapping[str, Any], far_end: str) -> None:
        self.rank, self.tries = rank, facts["knock"]
        self.last: Mapping[str, Any] = self.tries["last"]
        self.master, self.port = facts["master_addr"], facts["port"]
        self.at = f"{self.master}:{self.port} ({self.last['address']})"
        self.endpoint = bool(endpoint_of(rank.launch))
        self.words = f": {self.last['detail']}" if self.last["detail"] else ""
        self.rules = self.tries.get("rules")
        self.rules_read = bool(self.rules and self.rules["readable"])
        self.why_unread = (self.rules or {}).get("reason") or "no time was left"
        self.mesh = facts.get("mesh", "")
        self.here = _host(rank)
        # Seen from one host only, either end of the link may be at fault.
        self.far_end = far_end
        self.macs: frozenset[str] = frozenset()
        """Hardware addresses of the host that has the address, where they are known."""
        self.common: Sequence[str] = ()
        """Interface, address and network of rank 0's host, of a network that this host has too."""
        self.link = Where(links=((rank.host.label, far_end),))
        beside = self.tries.get("neighbour") or {"outcome": ""}
        self.other_port_answers: int | None = (
            beside["port"] if beside["outcome"] in ("refused", "connected") else None
        )
        self.look = look(
            shell("sudo ss -ltnp 'sport = :{:number}'", self.port), "who has it", on=(far_end,)
        )

    def by_common(self, fix: Fix) -> Fix:
        """The fix of a road that leads nowhere, after another road to rank 0, if one is known."""
        if not self.common or self.common[1] == self.last["address"]:
            return fix
        _, address, network = self.common
        steps = start_with([self.rank], "master_addr", address, On.EVERY)
        note = f"rank 0's address in {network}, which both hosts have"
        return Fix(*(replace(step, note=note) for step in steps), alternatives=[fix])

    def finding(self, kind: Kind, message: str, where: Where, fix: str, **more: Any) -> Finding:
        more.setdefault("confidence", Confidence.LIKELY)
        return Finding(kind, message, where, self.tries, fix=fix, **more)


def _far_end(cluster: Cluster, rank: Rank, facts: Mapping[str, Any]) -> str:
    """Name of the host that was called: rank 0's, if it has that address."""
    master = master_host(cluster)
    address = facts["knock"]["last"]["address"]
    if master and master.id != rank.host.id and address in master.addresses:
        return master.label
    return str(facts["master_addr"])


def _hardware_of(cluster: Cluster, master: Host | None, address: str) -> frozenset[str]:
    """Hardware addresses of the host with rank 0, if it has this address and has reported."""
    return frozenset(
        nic["mac"]
        for rank, facts in cluster.facts("neighbours")
        if master is not None and rank.host.id == master.id and address in master.addresses
        for nic in facts["nics"].values()
    )


def _road(seen: _Seen, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings from the last attempt to connect."""
    own_rule = seen.rules and fits(seen.rules, seen.last)
    if seen.last["answer"]:
        finding = _stranger(seen)
    elif own_rule:
        finding = seen.finding(
            PORT_BLOCKED,
            f"connections to {seen.at} are blocked by a rule of this host: {stopped_by(own_rule)}",
            seen.here,
            how_to_let_pass(seen.rules or {}, own_rule, seen.rank.host.label),
            confidence=Confidence.CERTAIN,
            cause=who_stops([seen.rank.host.label], own_rule, at=seen.at),
        )
    else:
        finding = _unanswered(seen)
    if facts["server"] == "self":
        mine = next(iter(seen.rank.host.addresses), "ADDRESS")
        steps = start_with([seen.rank], "master_addr", mine, On.EVERY)
        finding = finding.replaced(
            where=seen.here,
            message=f"{finding.message}; but this host serves the store",
            fix=Fix(*steps, alternatives=["let this host connect to itself"]),
        )
    yield finding


def _silent(facts: Mapping[str, Any]) -> list[str]:
    return [address for address, became in facts["knock"]["passed"] if became == "dropped"]


def _hidden(seen: _Seen, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Finding on an address that drops calls, tried before one that answers."""
    stuck = _silent(facts)
    if not stuck:
        return
    limit_s = facts.get("store_timeout_s")
    fails = limit_s is not None and limit_s < SILENCE_S * len(stuck)
    then = f"waits about {SILENCE_S * len(stuck):.0f} s there"
    if fails:
        then = f"gives up there after {limit_s:.0f} s (read_timeout of its c10d rendezvous)"
    yield seen.finding(
        PORT_BLOCKED,
        f"{', '.join(stuck)} port {seen.port} gives no answer; torch tries it before "
        f"{seen.last['address']}, and {then}",
        seen.link,
        Fix(*start_with([seen.rank], "master_addr", seen.last["address"], On.EVERY)),
        severity=None if fails else Severity.WARN,
    )


def _stranger(seen: _Seen) -> Finding:
    """Finding on an answer that is not a store's."""
    answer, reply = seen.last["answer"], seen.last["reply"]
    said = {
        "silent": "accepts connections and sends nothing: a proxy, or a frozen process",
        "closed": f"accepts connections and closes them ({reply or 'without an answer'})",
        "other": f'answers "{reply}"',
    }[answer]
    where = Where(hosts=(seen.far_end,))
    another = (
        "choose another port of the rendezvous endpoint on every host"
        if seen.endpoint
        else ANOTHER_PORT
    )
    fix = Fix(seen.look, alternatives=["free the port", another])
    if seen.mesh:  # it may be the proxy of this host that took the call
        where = seen.link
        pods = (
            f"{seen.mesh} shows a service mesh on this host: exclude the pods of the job from it "
        )
        pods += '(annotation sidecar.istio.io/inject: "false")'
        fix = Fix(text=pods, alternatives=[Fix(seen.look), "free the port", another])
    confidence = Confidence.CERTAIN if answer == "other" else Confidence.LIKELY
    message = f"{seen.at} {said}"
    return seen.finding(PORT_NOT_THE_STORE, message, where, fix, confidence=confidence)


def _unanswered(seen: _Seen) -> Finding:
    """Finding on a failed connection."""
    outcome, at, words, port = seen.last["outcome"], seen.at, seen.words, seen.port
    fix: str = f"open tcp port {port} on {seen.master} for this host"
    route = seen.last.get("route")
    if route:
        step = Step(
            shell("ip route del {}", route.split()), undo=shell("ip route add {}", route.split())
        )
        message = f"{at}: a route of this host leads nowhere: {route}"
        sure = Confidence.CERTAIN
        return seen.finding(DEAD_ROUTE, message, seen.here, Fix(step), confidence=sure)
    if rejected_here(seen.last, seen.rank.host.addresses) or forbidden_here(seen.last):
        return seen.finding(  # no packet has left this host
            PORT_BLOCKED,
            f"a rule of this host forbids connections to {at}{words}",
            seen.here,
            Fix(look(shell("nft list ruleset"), f"let calls to tcp port {port} pass")),
            confidence=Confidence.CERTAIN,
        )
    if outcome == "refused":
        start = f"start rank 0 there with MASTER_PORT={port}, or open the port"
        if seen.endpoint:
            start = f"start the job there: its endpoint is {seen.master}:{port}, or open the port"
        fix = Fix(seen.look, alternatives=[start])
        message = f"{at} refuses connections{refused_by(seen.last)}"
        return seen.finding(PORT_REFUSED, message, seen.link, fix)
    if outcome == "rejected" or (outcome == "turned-back" and seen.other_port_answers):
        said, sure = rejected_by(seen.last, seen.other_port_answers)
        message = f"connections to {at} are rejected by {said}"
        fix = fix if sure is Confidence.CERTAIN else f"is rank 0's host up? If so, {fix}"
        return seen.finding(PORT_BLOCKED, message, seen.link, fix, confidence=sure)
    if outcome == "turned-back":
        way = look(shell("tracepath -n {}", seen.last["address"]), on=seen.here.hosts)
        fix = Fix(way, alternatives=[f"{_IS_UP} correct the routes on the way, or MASTER_ADDR"])
        message = f"{at}: {turned_back_by(seen.last)}"
        return seen.finding(NO_ROUTE, message, seen.link, seen.by_common(fix))
    if outcome == "unreachable":
        way = look(shell("ip route get {}", seen.last["address"]))
        fix = Fix(way, alternatives=["correct MASTER_ADDR, or the route"])
        return seen.finding(NO_ROUTE, f"{at}: no route{words}", seen.here, seen.by_common(fix))
    if outcome == "no-neighbour":  # rank 0's host may be off or cut off, or the address wrong
        way = look(shell("ip neigh show {}", seen.last["address"]), on=seen.here.hosts)
        fix = Fix(way, alternatives=[f"{_IS_UP} look at its cable, and correct MASTER_ADDR"])
        message = f"{at}: no host on the local network has that address"
        return seen.finding(NO_ROUTE, message, seen.link, seen.by_common(fix))
    if outcome == "dropped":
        said, sure = "gives no answer", Confidence.LIKELY
        if seen.other_port_answers:
            said = f"gives no answer, but port {seen.other_port_answers} of that host does"
        elif seen.last.get("fixed"):
            (mac, nic), address = seen.last["fixed"], seen.last["address"]
            said += f"; an entry made by hand in the neighbour table says that it is at {mac}"
            entry = shell("{} dev {}", address, nic)
            undo = shell("ip neigh replace {} lladdr {} nud permanent", entry, mac)
            note = "" if seen.macs else "if rank 0's host has another hardware address"
            step = Step(shell("ip neigh del {}", entry), seen.here.hosts, undo, note, persists=True)
            if seen.macs and mac not in seen.macs:
                message = f"{at} {said}, which is not that of {seen.far_end}"
                return seen.finding(WRONG_ENTRY, message, seen.here, Fix(step))
            fix = Fix(step, alternatives=[Fix(text=fix)])
        elif not seen.rules_read:  # one that drops or rejects the answer looks the same
            said += f"; the rules of this host were not read ({seen.why_unread})"
            drops = "whether a rule of this host stops the answer"
            own = look(shell("sudo nft list ruleset"), drops, on=seen.here.hosts)
            sure, fix = Confidence.POSSIBLE, Fix(own, alternatives=[fix])
        return seen.finding(PORT_BLOCKED, f"{at} {said}", seen.link, fix, confidence=sure)
    message = f"{at} cannot be connected to{words}"
    return seen.finding(PORT_BLOCKED, message, seen.link, fix, confidence=Confidence.POSSIBLE)


def _host(rank: Rank) -> Where:
    return Where(hosts=(rank.host.label,))
