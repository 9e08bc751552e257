"""Can the services of the job listen on their ports, and can the other hosts reach them?

What it checks
--------------
Only with `--endpoint HOST:PORT`, which may be given several times: ports of Ray, vLLM, metrics and
so on, besides MASTER_PORT. HOST is a host of the job, by its name, an address or its node rank
(localhost: every host). On that host: whether the port is free, who holds it, whether this user may
bind it, and whether the kernel may give it to a client (ip_local_port_range without
ip_local_reserved_ports). Then that host listens there itself, and every other host connects to the
address that HOST leads to there, twice if the first call fails; the answer must prove that it is
the right listener. Where a call fails, the firewall rules of both ends are read (needs root) and
the connection is followed through them. To a HOST that is none of the job, every host just tries to
connect.

Why it matters
--------------
A service that cannot have its port ends with EADDRINUSE after the models are loaded; one that the
others cannot reach makes them wait for minutes (`Waiting for … to be ready`). A fixed port inside
the ephemeral range is taken by some client now and then.

How to fix
----------
End the process that holds the port, or give the service another one, below the ephemeral range; or
reserve it: sysctl -w net.ipv4.ip_local_reserved_ports=8265. Open the port in the firewall of the
host that is named.

When it is wrong
----------------
A port that is in use may be in use by the service itself, if it is up already: that is a warning,
and only a note under Ray, or where a parent of this program holds it. A firewall that lets in only
a certain program or user is not seen. A HOST that is none of the job and refuses the connection is
only noted: its service may start with the job. A call that the host of the service had and read too
late, as its CPUs are busy, is not judged: that host is host-answers-late.

References
----------
ip(7) (ip_local_port_range, ip_local_reserved_ports); Ray documentation, configuring Ray (ports);
vLLM documentation, parallelism and scaling; NVIDIA-NeMo/RL pull requests 2380, 3103, 3391.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Host,
    Layer,
    Round,
    Skip,
    likely_address,
)
from nccl_doctor.toolkit.firewall.portrules import rules_for_calls_in, rules_for_calls_out
from nccl_doctor.toolkit.host import ancestors
from nccl_doctor.toolkit.net.dial import Origin, dial
from nccl_doctor.toolkit.net.endpoints import read_endpoint
from nccl_doctor.toolkit.net.interfaces import interfaces, is_link_local
from nccl_doctor.toolkit.net.names import look_up
from nccl_doctor.toolkit.net.ports import ephemeral_range, may_bind, port_holder, reserved_ports
from nccl_doctor.toolkit.net.routes import source_of
from nccl_doctor.toolkit.peers.calls import door_of
from nccl_doctor.toolkit.peers.calm import Calm
from nccl_doctor.toolkit.peers.echo import Talk, call
from nccl_doctor.toolkit.peers.listeners import Listeners
from nccl_doctor.toolkit.shared_kinds import HOST_ANSWERS_LATE

from .rules import BLOCKED, EPHEMERAL, IN_USE, PRIVILEGED, UNREACHABLE, Endpoints

CALLS, RULES = "calls", "rules"
_LISTEN_S, _CALLS_S, _DONE_S = 10.0, 8.0, 12.0
_LOOK_UP_S = 2.0
_DIAL_S = 3.0
_PAUSE_S = 0.3
_RULES_S = 20.0
_MOST_ADDRESSES = 8
_ITSELF = ("localhost", "127.0.0.1", "::1")
"""Every host; nobody else has to reach it there."""
_TALK = Talk(calm=Calm(groups=1, limit_s=0.1), large=False)


class EndpointsCheck(Check):
    """Listens on the ports of the job's services, and calls them from all other hosts."""

    name = "endpoints"
    layer = Layer.RANKS
    cost = "seconds"
    kinds = (IN_USE, PRIVILEGED, EPHEMERAL, BLOCKED, UNREACHABLE, HOST_ANSWERS_LATE)
    together = True
    needs = (Layer.NAME, Layer.ROUTE, Layer.PORT)

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round of all hosts; then the rules at both ends of calls that failed."""
        if not cluster.job.endpoints:
            raise Skip("--endpoint HOST:PORT was not given: give the service ports of the job")
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        seats = tuple(rank.seat for rank in first if rank is not None)
        if not seats:
            return ()
        given = [
            {"endpoint": text, "owner": _owner(cluster, read_endpoint(text)[0])}
            for text in cluster.job.endpoints
        ]
        deadline_s = _LISTEN_S + _CALLS_S + _DONE_S + 5
        rounds = [Round(CALLS, (seats,), deadline_s, {"endpoints": given}, may_shrink=True)]
        looks = Endpoints(cluster, self.name, CALLS).looks()
        if looks:
            ends = sorted({look["seat"] for look in looks})
            groups = tuple((seat,) for seat in ends)
            rounds.append(Round(RULES, groups, _RULES_S, {"looks": looks}))
        return rounds

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`endpoints`: for each what is known of its port where it is this host's, with `late` from
        `Visitors`, else how the call ended, and from which `source` if it failed; in round `rules`,
        `rules`: those for each call that failed.
        """
        return _observe_rules(ctx) if ctx.round == RULES else _observe_calls(ctx)

    def judge(self, cluster: Cluster) -> Iterator[Finding]:
        """Findings on the ports, then on the calls, and on those that say nothing."""
        found = Endpoints(cluster, self.name, CALLS, RULES)
        yield from found.ports()
        yield from found.calls()
        yield from found.read_late()


def _owner(cluster: Cluster, host: str) -> int | None:
    """Seat of the participant on the host that is meant; None if it is none of the job."""
    for each in cluster.present_hosts:
        if _is_meant(each, host):
            rank = cluster.first_on(each)
            return None if rank is None else rank.seat
    return None


def _is_meant(host: Host, text: str) -> bool:
    if text.isascii() and text.isdecimal():
        return host.node_rank == int(text)
    name, asked = (host.name or "").lower(), text.lower()
    short = name.partition(".")[0]
    alike = asked in (name, short) or (short == name and asked.partition(".")[0] == name)
    return bool(name and alike) or text in host.addresses


# Observing ----------------------------------------------------------------------------------------


def _observe_calls(ctx: Context) -> dict[str, Any]:
    ctx.breadcrumb("looking up the hosts of the endpoints")
    nics = {nic.name: nic.addresses for nic in interfaces() if nic.up and not nic.loopback}
    own = [each for addresses in nics.values() for each in addresses if not is_link_local(each)]
    likely = likely_address([(name, list(addresses)) for name, addresses in nics.items()])
    own.sort(key=lambda each: likely is None or each != likely[1])
    given = ctx.params["endpoints"]
    found = [_start(each["endpoint"], each["owner"], ctx.seat, own) for each in given]
    ports: dict[int, _OwnPort] = {}
    try:
        doors: dict[str, Any] = {}
        for number, facts in enumerate(found):
            if facts["mine"]:
                port = facts["port"]
                ports[port] = ports.get(port) or _OwnPort(ctx, port, own, facts["answers"])
                facts.update(ports[port].facts)
                doors[str(number)] = ports[port].doors
        if ctx.peers is not None and len(ctx.group) > 1:
            ctx.peers.post("doors", doors)
            ctx.breadcrumb("waiting for the listeners of the other hosts")
            theirs = ctx.peers.collect("doors", min(_LISTEN_S, ctx.left()))
            _call_all(ctx, found, theirs)
            ctx.peers.post("done", True)
            if doors:
                ctx.breadcrumb("listening until the other hosts have called")
                ctx.peers.collect("done", min(_DONE_S, max(0.0, ctx.left() - 1)))
                for facts in found:
                    if facts["mine"]:
                        facts["late"] = ports[facts["port"]].late()
        else:
            _call_all(ctx, found, {})
    finally:
        for each in ports.values():
            each.close()
    return {"endpoints": found}


class _OwnPort:
    """A port of this host: its facts, and doors that are open there if it is free."""

    def __init__(self, ctx: Context, port: int, own: Sequence[str], named: Sequence[str]) -> None:
        """Try to have the port; listen there on the own addresses, those that are named first."""
        self.facts = _own_port(ctx, port)
        at = [each for each in own if each in named]
        at = list(dict.fromkeys([*at, *own]))[:_MOST_ADDRESSES]
        self._listeners: Listeners | None = None
        self.doors: list[dict[str, Any]] = [{"address": each} for each in at]
        if self.facts["bind_errno"] is None:
            self._listeners = Listeners([Origin(each, port=port) for each in at])
            open_ = [door.to_json() for door in self._listeners.doors]
            self.doors = open_ + [{"address": each} for each in self._listeners.failed]

    def late(self) -> dict[str, float]:
        """Callers so far that this host has served late, from `Visitors.late`."""
        return self._listeners.late() if self._listeners is not None else {}

    def close(self) -> None:
        """Free the port."""
        if self._listeners is not None:
            self._listeners.close()


def _start(endpoint: str, owner: int | None, seat: int, own: Sequence[str]) -> dict[str, Any]:
    """Facts of an endpoint without a call: the addresses of its name, and whether it is here."""
    host, port = read_endpoint(endpoint)
    facts: dict[str, Any] = {"endpoint": endpoint, "host": host, "port": port}
    facts.update(answers=[], error="", planned=owner)
    if not host.isdecimal():
        found = look_up(host, _LOOK_UP_S)
        facts.update(answers=list(found.answers), error=found.error)
    mine = owner == seat if owner is not None else bool(set(facts["answers"]) & set(own))
    mine = mine or host in _ITSELF
    return {**facts, "mine": mine}


def _own_port(ctx: Context, port: int) -> dict[str, Any]:
    """True if a service could listen on a port of this host, as services do: on every address."""
    ctx.breadcrumb("binding the port of an endpoint", port=port)
    error = _bind_error(port)
    facts = {
        "bind_errno": None if error is None else error.errno,
        "bind_error": "" if error is None else error.strerror or str(error),
        "may_bind": may_bind(port, ctx.root),
        "ephemeral": ephemeral_range(port, ctx.root),
        "reserved": reserved_ports(ctx.root),
        "is_master": port == ctx.launch.master_port and ctx.launch.node_rank in (0, None),
    }
    if error is None:
        return facts
    holder = port_holder(port, ctx.root)
    known = bool(holder and holder["pid"] in ancestors(ctx.root)) or ctx.launch.launcher == "ray"
    return {**facts, "holder": holder, "known": known}


def _bind_error(port: int) -> OSError | None:
    for family in (socket.AF_INET6, socket.AF_INET):
        try:
            with socket.socket(family) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(("", port))
        except OSError as error:
            if family == socket.AF_INET:
                return error  # without IPv6, the other one says nothing
    return None


def _call_all(
    ctx: Context, found: Sequence[dict[str, Any]], theirs: Mapping[int, Mapping[str, Any]]
) -> None:
    """Add to each endpoint of others how a call to it ended: `address`, `outcome`, `detail`."""
    work: list[tuple[dict[str, Any], str, Mapping[str, Any] | None]] = []
    for number, facts in enumerate(found):
        if facts["mine"]:
            continue
        owners = [seat for seat, doors in theirs.items() if str(number) in doors]
        if facts["planned"] is not None and facts["planned"] not in owners:
            continue  # its host has not answered, so nobody knows what a call would meet
        facts["owner"] = min(owners, default=None)
        doors = theirs[facts["owner"]][str(number)] if owners else []
        address = next(iter(facts["answers"] or [door["address"] for door in doors]), "")
        if address:
            door = next((door for door in doors if door["address"] == address), None)
            facts["foreign"] = bool(doors) and door is None
            listens = any("token" in each for each in doors)
            if door is not None and "token" not in door and listens:
                continue  # of all its addresses, it could not listen on this one
            work.append((facts, address, door if listens else None))
    ctx.breadcrumb("calling the endpoints", count=len(work))
    if work:
        with ThreadPoolExecutor(len(work)) as pool:
            list(pool.map(lambda each: _call(*each), work))


def _call(facts: dict[str, Any], address: str, door: Mapping[str, Any] | None) -> None:
    """Call an endpoint, a second time if the first call fails; add the result to its facts."""
    made = _once(address, facts["port"], door)
    if made["outcome"] != "ok":
        time.sleep(_PAUSE_S)
        made = _once(address, facts["port"], door)
    if made["outcome"] != "ok":
        facts["source"] = source_of(address)[0]
    facts.update(address=address, **made)


def _once(address: str, port: int, door: Mapping[str, Any] | None) -> dict[str, Any]:
    if door is not None:
        result = call(door_of(door), talk=_TALK)
        return {"outcome": result.outcome, "detail": result.detail}
    try:
        dialled, sock = dial(address, port, _DIAL_S)
    except OSError as error:  # no socket of this family
        return {"outcome": "error", "detail": str(error)}
    if sock is None:
        return {"outcome": dialled.outcome, "detail": dialled.detail}
    sock.close()
    return {"outcome": "ok", "detail": ""}


def _observe_rules(ctx: Context) -> dict[str, Any]:
    ctx.breadcrumb("reading the firewall rules of this host")
    found = {}
    for look in ctx.params["looks"]:
        if look["seat"] == ctx.seat:
            read = rules_for_calls_in if look["in"] else rules_for_calls_out
            found[look["endpoint"]] = read(look["address"], look["port"], root=ctx.root)
    return {"rules": found}
