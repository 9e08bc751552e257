"""Can every host reach every other one on the ports and addresses that the job will use?

What it checks
--------------
Which interfaces and addresses NCCL (bootstrap, and data over sockets) and gloo would choose on each
host, by their own rules, from the environment and NCCL's configuration files. On each of these
addresses every host listens on a fresh ephemeral port, and every other host calls it: the answer
must prove that it is the right listener, 64 bytes and then 1 MiB must come back unchanged. What
fails is tried twice. Where something failed, the firewall rules of both ends are read (nft,
iptables; needs root) and the packet is followed through them.

Why it matters
--------------
MASTER_PORT is only the meeting point. NCCL and gloo then connect every host to every other one, in
both directions, on ports that the kernel picks at random, on addresses that they pick themselves.
A firewall that lets MASTER_PORT through and drops the rest, an interface that the others cannot
route to, or a path that loses large packets lets the job start and then hang for minutes or hours.

How to fix
----------
Open all tcp between the hosts of the job, or at least net.ipv4.ip_local_port_range (in a cloud: a
security group that admits itself). Name the interface: NCCL_SOCKET_IFNAME==eth0 (the second = asks
for the exact name) and GLOO_SOCKET_IFNAME=eth0 (which knows exact names only). Give all hosts of
one network the same MTU.

When it is wrong
----------------
Only one participant per host calls, once, at the start: a firewall that drops idle connections, or
one that counts connections, is not seen. InfiniBand traffic is not tested. A rule with a condition
that is not understood (a named set, a rate) is never blamed. Where two hosts cannot talk and no
rule is found, the finding names the link and not a host. A path that delivers less than 16 KiB in
3 seconds is taken for one that loses large packets.

References
----------
NCCL user guide, environment variables and troubleshooting (networking); NCCL src/misc/socket.cc;
PyTorch documentation of torch.distributed (choosing the network interface); nft(8); RFC 2923 (TCP
problems with path MTU discovery).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Door,
    Finding,
    Kind,
    Layer,
    Level,
    Listeners,
    Packet,
    Pair,
    PeerCall,
    Rank,
    Round,
    Scope,
    Severity,
    Skip,
    Sorted,
    Untested,
    Where,
    call_all,
    interfaces,
    is_loopback,
    let_in,
    odd_ones_out,
    port_range,
    quote_hit,
    read_calls,
    read_rules,
    remove_rule,
    rule_culprits,
    sample_for_rules,
    scoped,
    sort_calls,
    source_of,
    survey,
    unroutable_hosts,
)

_BOTH_WAYS = (
    "NCCL and gloo need connections on ephemeral ports between all hosts, in both directions"
)
_EXACT = "export NCCL_SOCKET_IFNAME==<nic> GLOO_SOCKET_IFNAME=<nic>"
_OPEN = "open all tcp between the job's hosts, at least the range net.ipv4.ip_local_port_range"

INTERFACE_MISSING = Kind(
    code="interface-missing",
    layer=Layer.ROUTE,
    title="The variable names an interface that the host does not have",
    why="The library finds no address to listen on and ends at once on this host; the ranks on the "
    "other hosts wait for it until their time-out.",
    fix=_EXACT,
)
INTERFACE_DOWN = Kind(
    code="interface-down",
    layer=Layer.ROUTE,
    title="The chosen interface is not running or has no address",
    why="NCCL skips an interface without carrier, and what gloo binds there cannot be reached.",
    fix="ip link set <nic> up, check the cable, or choose another interface: " + _EXACT,
)
INTERFACE_LOOPBACK = Kind(
    code="interface-loopback",
    layer=Layer.ROUTE,
    title="The library would give the other hosts a loopback address",
    why="A host that is told 127.0.0.1 calls itself: refused at once, or silence for long.",
    fix=_EXACT,
)
INTERFACE_DIFFERS = Kind(
    code="interface-differs",
    layer=Layer.ROUTE,
    title="Hosts chose interfaces in networks that do not reach each other",
    why="The library picks the first interface that fits, not the same network everywhere.",
    fix=_EXACT,
    severity=Severity.WARN,
)
INTERFACE_UNROUTABLE = Kind(
    code="interface-unroutable",
    layer=Layer.ROUTE,
    title="A chosen address cannot be reached by the other hosts, while another one can",
    why="NCCL opens data channels on every interface it finds (bridges, VPN, a second NIC), so a "
    "job hangs after a healthy bootstrap when one of them leads nowhere.",
    fix=_EXACT,
)
PEER_NO_ROUTE = Kind(
    code="peer-no-route",
    layer=Layer.ROUTE,
    title="A host has no route to the address that another one chose",
    why="The connection fails at once (Network is unreachable); NCCL does not try again.",
    fix="ip route get <address>; add the route or choose an interface in a common network: "
    + _EXACT,
)
MTU_DIFFERS = Kind(
    code="mtu-differs",
    layer=Layer.ROUTE,
    title="Hosts in one network have different MTUs",
    why="What one host may send another one may not receive: at best slower, at worst lost.",
    fix="ip link set dev <nic> mtu <the same value on every host and switch port>",
    severity=Severity.WARN,
)
MTU_BLACKHOLE = Kind(
    code="mtu-blackhole",
    layer=Layer.ROUTE,
    title="Small packets arrive, large ones are lost without a word",
    why="Bootstrap and small collectives work; the first large one hangs until the time-out.",
    fix="lower the MTU to what the path carries (ping -M do -s 1472 <host> finds it), or let ICMP "
    '"fragmentation needed" through',
)
PEER_BLOCKED = Kind(
    code="peer-blocked",
    layer=Layer.PORT,
    title="Hosts cannot connect to each other on ephemeral ports",
    why=_BOTH_WAYS + ": a silent drop costs the job its whole time-out, NCCL up to an hour.",
    fix=_OPEN,
)
PEER_ONE_WAY = Kind(
    code="peer-one-way",
    layer=Layer.PORT,
    title="Connections on ephemeral ports work in one direction only",
    why=_BOTH_WAYS + ", whichever side happens to connect.",
    fix=_OPEN,
)
PEER_INTERCEPTED = Kind(
    code="peer-intercepted",
    layer=Layer.PORT,
    title="Something else answers on the ports between the hosts",
    why="A proxy (service mesh, transparent proxy) or another host accepts the connection and does "
    "not pass it on, so everything looks connected and nothing moves.",
    fix="take the job's traffic out of the proxy (Istio: annotation sidecar.istio.io/inject: "
    '"false"), and look for redirect rules and duplicate addresses',
)

# Every host calls at about the same time, so nobody waits for more than a slow start of the others.
_LISTEN_S = 10.0
# A failed call takes 2 x 3 s dropped, 2 x 8 s at the very worst; one more batch for each 128 calls.
_CALLS_S = 18.0
_BATCH = 128
_DONE_S = 20.0
_RULES_S = 25.0
_WORDS = {
    "dropped": "no answer within 3 s",
    "refused": "connection refused",
    "rejected": "rejected by a firewall",
    "unreachable": "network is unreachable",
    "no-neighbour": "nobody answers for the address on the local network",
    "own-address": "the caller has the same address",
    "mtu": "64 bytes came back, of 1 MiB nothing moved for 3 s",
}


# What to follow through the rules: name, from the caller?, conntrack state, length (0: the MTU).
_PACKETS = {
    "connect": (("first", True, "new", 60), ("reply", False, "established", 60)),
    "upload": (("data", True, "established", 0),),
    "download": (("data", False, "established", 0),),
}


class Firewall(Check):
    """Every ordered pair of hosts, on the addresses that the job would use."""

    name = "firewall"
    layer = Layer.PORT
    scope = Scope.HOST
    cost = "seconds"
    level = Level.QUICK
    together = True
    kinds = (
        INTERFACE_MISSING,
        INTERFACE_DOWN,
        INTERFACE_LOOPBACK,
        INTERFACE_DIFFERS,
        INTERFACE_UNROUTABLE,
        PEER_NO_ROUTE,
        MTU_DIFFERS,
        MTU_BLACKHOLE,
        PEER_BLOCKED,
        PEER_ONE_WAY,
        PEER_INTERCEPTED,
    )

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """The matrix of all hosts; then, for what failed, the rules of the hosts at both ends."""
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        seats = tuple(rank.seat for rank in first if rank is not None)
        if not seats:
            return ()
        batches = len(seats) // _BATCH
        deadline = _LISTEN_S + _CALLS_S + _DONE_S + 10 + 12 * batches
        hosts = max(cluster.nnodes, len(cluster.hosts))
        rounds = [Round("matrix", (seats,), deadline, {"hosts": hosts})]
        pairs = sample_for_rules(_sorted(cluster).failed)
        ends = sorted({pair[end] for pair in pairs for end in ("caller", "listener")})
        if ends:
            groups = tuple((seat,) for seat in ends)
            rounds.append(Round("rules", groups, _RULES_S, {"pairs": pairs}))
        return rounds

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Call every other host, or (round `rules`) read the rules of this one."""
        return _observe_rules(ctx) if ctx.round == "rules" else _observe_matrix(ctx)

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """What the choices say by themselves, then what the calls say."""
        by_fault = _sorted(cluster)
        good = _good_interfaces(cluster, by_fault)
        for rank, facts in _reports(cluster):
            yield from _choice_findings(cluster, rank, facts, good.get(rank.seat, ""))
        yield from _mtu_differs(cluster)
        failing = [*_call_findings(cluster, by_fault), *_unroutable(cluster, by_fault)]
        yield from failing
        yield from _differs(cluster, by_fault, [each for each in failing if each.level == "fail"])


def _reports(cluster: Cluster) -> list[tuple[Rank, Mapping[str, Any]]]:
    return list(cluster.facts(Firewall.name, "matrix"))


def _sorted(cluster: Cluster) -> Sorted:
    return sort_calls(read_calls(_reports(cluster), cluster.backend))


# Observing ----------------------------------------------------------------------------------------


def _observe_matrix(ctx: Context) -> Mapping[str, Any]:
    ctx.breadcrumb("choosing interfaces as NCCL and gloo do")
    facts = survey(ctx.env)
    if ctx.peers is None or len(ctx.group) < 2:
        if any(choice["problem"] for choice in facts["choices"].values()):
            return {**facts, "peers": {}}
        if ctx.params.get("hosts", 1) > 1:
            raise Untested("no other host signed in")
        raise Skip("one host: no peers")
    doors = {scoped(each["address"], each["interface"]): each for each in facts["listen"]}
    own = {address for each in interfaces() for address in each.addresses}
    ctx.breadcrumb("listening", addresses=list(doors))
    with Listeners(list(doors)) as listeners:
        posted = [{**doors[door.address], **door.to_json()} for door in listeners.doors]
        ctx.peers.post("listen", posted)
        ctx.breadcrumb("waiting for the listeners of the other hosts")
        theirs = ctx.peers.collect("listen", min(_LISTEN_S, ctx.left()))
        # Everybody starts with the next one in the group, so that nobody is called by all at once.
        order = ctx.group[ctx.position + 1 :] + ctx.group[: ctx.position]
        entries = [(seat, entry) for seat in order for entry in theirs.get(seat, ())]
        if not entries:
            raise Untested(f"no other host was listening within {_LISTEN_S:g} s")
        called = [each for each in entries if each[1]["address"].partition("%")[0] not in own]
        ctx.breadcrumb("calling the other hosts", hosts=len(order), addresses=len(called))
        budget = min(_CALLS_S + 6 * (len(called) // _BATCH), ctx.left() / 2)
        targets = [
            Door(each["address"], each["port"], each["token"], each["answer"]) for _, each in called
        ]
        results = iter(call_all(targets, budget))
        peers: dict[str, list[dict[str, Any]]] = {}
        for seat, entry in entries:
            known = {key: entry[key] for key in ("address", "interface", "roles", "port")}
            mine = entry["address"].partition("%")[0] in own
            made = [] if mine else [call.to_json() for call in next(results)]
            known["attempts"] = [{"outcome": "own-address"}] if mine else made
            if made and made[-1]["outcome"] != "ok":
                known["source"], lost = source_of(entry["address"])
                if lost is not None:  # this host itself has no route, whatever its errno was
                    known["attempts"] = [{**each, "outcome": "unreachable"} for each in made]
            peers.setdefault(str(seat), []).append(known)
        ctx.breadcrumb("listening until every other host has finished its calls")
        ctx.peers.post("done", True)
        ctx.peers.collect("done", min(_DONE_S, max(0.0, ctx.left() - 2)))
    return {**facts, "peers": peers, "not_bound": listeners.failed}


def _observe_rules(ctx: Context) -> Mapping[str, Any]:
    ctx.breadcrumb("reading the firewall rules of this host")
    rules = read_rules()
    mine = {address: nic for nic in interfaces() for address in nic.addresses}
    range_ = port_range()
    hits = []
    for pair in ctx.params.get("pairs", ()):
        if ctx.seat not in (pair["caller"], pair["listener"]):
            continue
        calling = ctx.seat == pair["caller"]
        nic = mine.get(pair["source"] if calling else pair["target"])
        if nic is None:
            continue
        for packet, forth, state, length in _PACKETS[pair["kind"]]:
            ends = (pair["source"], pair["target"])
            ports = (range_, (pair["port"], pair["port"]))
            incoming = calling != forth
            hits += [
                {**hit.to_json(), **pair, "packet": packet, "incoming": incoming}
                for hit in rules.hits(
                    Packet(
                        incoming=incoming,
                        interface=nic.name,
                        source=ends[not forth],
                        target=ends[forth],
                        source_ports=ports[not forth],
                        target_ports=ports[forth],
                        state=state,
                        length=length or nic.mtu,
                    )
                )
            ]
    return {
        "readable": rules.readable,
        "reason": rules.reason,
        "managers": list(rules.managers),
        "drops": rules.dropping(),
        "hits": hits,
    }


# Judging the choices ------------------------------------------------------------------------------


def _good_interfaces(cluster: Cluster, by_fault: Sorted) -> dict[int, str]:
    """Seat → an interface to recommend: one that a call reached, else one that is running."""
    good = {call.listener: call.interface for call in by_fault.working.values()}
    for rank, facts in _reports(cluster):
        for nic in facts["interfaces"]:
            outside = [a for a in nic["addresses"] if not is_loopback(a)]
            if (
                nic["running"]
                and outside
                and not nic["name"].startswith(("docker", "virbr", "br-"))
            ):
                good.setdefault(rank.seat, nic["name"])
    return good


def _uses(cluster: Cluster, library: str) -> bool:
    return ("nccl" in cluster.backend) == library.startswith("nccl")


def _choice_findings(
    cluster: Cluster, rank: Rank, facts: Mapping[str, Any], good: str
) -> Iterator[Finding]:
    data = "nccl-sockets" if facts["nccl_data"] == "sockets" else "nccl-bootstrap"
    for library in (data, "gloo"):
        choice = facts["choices"][library]
        used = _uses(cluster, library)
        variable, value, names = choice["variable"], choice["value"], choice["names"]
        said = f"{variable}={value}" if variable else f"{library}: {choice['reason']}"
        if choice["origin"] not in ("", "environment"):
            said += f" (in {choice['origin']})"
        severity = Severity.FAIL if used else Severity.WARN if variable else Severity.INFO
        evidence = {
            "decided by": choice["reason"],
            "interfaces": {nic["name"]: nic["addresses"] for nic in facts["interfaces"]},
        }
        kind, message = None, ""
        loops = [pick for pick in choice["picks"] if is_loopback(pick[1])]
        if choice["problem"] and (variable or used):
            kind = INTERFACE_MISSING if choice["problem"] == "missing" else INTERFACE_DOWN
            lack = (
                "no such interface" if kind is INTERFACE_MISSING else "not running, or no address"
            )
            message = f"{said}: {lack}"
        elif loops and cluster.is_multi_host() and (used or library == "gloo" or variable):
            kind, names = INTERFACE_LOOPBACK, [pick[0] for pick in loops]
            message = f"{said}: the others are given {loops[0][1]}"
        if kind is not None:
            yield Finding(
                kind=kind,
                message=message,
                where=Where(hosts=(rank.host.label,), interfaces=tuple(sorted(set(names)))),
                evidence=evidence,
                fix=_name_it(library, good, choice, kind, rank.host.label),
                severity=severity,
            )


def _name_it(library: str, nic: str, choice: Mapping[str, Any], kind: Kind, host: str) -> str:
    nic = nic or "<nic>"
    if library != "gloo":
        elsewhere = choice["origin"] not in ("", "environment")
        return f"export NCCL_SOCKET_IFNAME=={nic}" + (
            f", or correct {choice['origin']}" if elsewhere else ""
        )
    if kind is INTERFACE_MISSING:
        return (
            f"export GLOO_SOCKET_IFNAME={nic} (whole names, separated by commas: the ^, = and "
            "prefixes of NCCL_SOCKET_IFNAME mean nothing to gloo)"
        )
    if not choice["variable"]:
        return (
            f"export GLOO_SOCKET_IFNAME={nic}, or let {host} resolve to the address of {nic} "
            "(/etc/hosts: remove the line with 127.0.1.1)"
        )
    return f"export GLOO_SOCKET_IFNAME={nic}"


def _main(cluster: Cluster, facts: Mapping[str, Any]) -> tuple[str, str, int] | None:
    """(interface, subnet, MTU) of the address that the job's backend uses first."""
    mine = [each for each in facts["listen"] if any(_uses(cluster, role) for role in each["roles"])]
    for entry in (mine or facts["listen"])[:1]:
        for nic in facts["interfaces"]:
            if nic["name"] == entry["interface"]:
                own = ipaddress.ip_address(entry["address"])
                nets = [net for net in nic["subnets"] if own in ipaddress.ip_network(net)]
                return nic["name"], nets[0] if nets else str(own), nic["mtu"]
    return None


def _mtu_differs(cluster: Cluster) -> Iterator[Finding]:
    labels = _labels(cluster)
    by_subnet: dict[str, dict[int, tuple[str, int]]] = {}
    for rank, facts in _reports(cluster):
        main = _main(cluster, facts)
        if main is not None:
            by_subnet.setdefault(main[1], {})[rank.seat] = main[0], main[2]
    for subnet, chosen in by_subnet.items():
        mtus = {seat: mtu for seat, (_, mtu) in chosen.items()}
        odd = odd_ones_out(mtus)
        if odd is None:
            continue
        counts = Counter(mtus.values()).most_common()
        # Of two equal halves nobody can say which one is wrong.
        wrong = () if odd.tie else odd.places
        yield Finding(
            kind=MTU_DIFFERS,
            message=f"in {subnet}: MTU "
            + ", ".join(f"{mtu} on {n} host{'s' * (n > 1)}" for mtu, n in counts),
            where=Where(
                hosts=tuple(sorted(labels[seat] for seat in wrong)),
                interfaces=tuple(sorted({chosen[seat][0] for seat in odd.places})),
            ),
            evidence={"mtu": {labels[seat]: mtu for seat, mtu in mtus.items()}},
            fix=f"ip link set dev {chosen[wrong[0]][0]} mtu {odd.usual}" if wrong else "",
            confidence=Confidence.LIKELY if wrong else Confidence.POSSIBLE,
        )


def _differs(cluster: Cluster, by_fault: Sorted, failing: Sequence[Finding]) -> Iterator[Finding]:
    mains = {rank.seat: _main(cluster, facts) for rank, facts in _reports(cluster)}
    known = {seat: main for seat, main in mains.items() if main is not None}
    labels = _labels(cluster)
    apart = {
        call.pair
        for call in (*by_fault.no_route, *by_fault.blocked, *by_fault.unroutable)
        if call.job
        and (a := known.get(call.caller))
        and (b := known.get(call.listener))
        and a[0] != b[0]
        and a[1] != b[1]
    }
    if not apart:
        return
    odd = odd_ones_out({seat: main[1] for seat, main in known.items()})
    wrong = odd.places if odd is not None and not odd.tie else ()
    yield Finding(
        kind=INTERFACE_DIFFERS,
        message="chosen: "
        + ", ".join(sorted({f"{nic} in {net}" for nic, net, _ in known.values()})),
        where=Where(
            hosts=tuple(sorted(labels[seat] for seat in wrong)),
            links=_links(labels, apart),
            interfaces=tuple(sorted({known[seat][0] for seat in wrong})),
        ),
        evidence={labels[seat]: f"{nic} in {net}" for seat, (nic, net, _) in known.items()},
        confidence=Confidence.LIKELY if wrong else Confidence.POSSIBLE,
        # It is the reason, but by itself no fault: what fails decides the verdict.
        explained_by=failing[0].code if failing else None,
    )


# Judging the calls --------------------------------------------------------------------------------


def _labels(cluster: Cluster) -> dict[int, str]:
    return {rank.seat: rank.host.label for rank in cluster.present}


def _links(labels: Mapping[int, str], pairs: Iterable[Pair]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({(labels[a], labels[b]) for a, b in pairs}))


def _call_findings(cluster: Cluster, by_fault: Sorted) -> Iterator[Finding]:
    rules = {rank.seat: facts for rank, facts in cluster.facts(Firewall.name, "rules")}
    hits = {seat: facts["hits"] for seat, facts in rules.items()}
    for kind, calls, blamed in (
        (PEER_NO_ROUTE, by_fault.no_route, by_fault.blamed),
        (PEER_BLOCKED, by_fault.blocked, by_fault.blamed),
        (PEER_ONE_WAY, by_fault.one_way, by_fault.blamed),
        (PEER_INTERCEPTED, by_fault.intercepted, by_fault.blamed),
        (MTU_BLACKHOLE, by_fault.stuck, by_fault.large_blamed),
    ):
        by_rule = rule_culprits(calls, hits)
        groups: dict[str, list[PeerCall]] = {}
        for call in calls:
            how = "rule" if call.pair in by_rule else ""
            how = how or ("host" if blamed & set(call.pair) else "link")
            groups.setdefault(how, []).append(call)
        for how, group in groups.items():
            found: dict[int, list[Mapping[str, Any]]] = {}
            for call in group:
                for seat, hit in by_rule.get(call.pair, {}).items():
                    known = [quote_hit(each) for each in found.setdefault(seat, [])]
                    found[seat] += [] if quote_hit(hit) in known else [hit]
            seats = set(found)
            if how == "host":
                seats = {seat for call in group for seat in call.pair if seat in blamed}
            yield _finding(
                cluster,
                kind,
                group,
                seats=seats,
                found=found,
                rules=rules,
                tested=len(by_fault.tested),
            )


def _finding(
    cluster: Cluster,
    kind: Kind,
    calls: Sequence[PeerCall],
    *,
    seats: set[int],
    found: Mapping[int, Sequence[Mapping[str, Any]]],
    rules: Mapping[int, Mapping[str, Any]],
    tested: int,
) -> Finding:
    labels = _labels(cluster)
    pairs = {call.stuck if kind is MTU_BLACKHOLE else call.pair for call in calls}
    words = Counter(_words(call) for call in calls)
    evidence: dict[str, Any] = {"calls": [call.shown(labels) for call in calls[:5]]}
    message = (
        f"{', '.join(word for word, _ in words.most_common(3))} on a fresh port, twice "
        f"({len(pairs)} of {tested} ordered pairs)"
    )
    if found:
        quotes = [(labels[seat], quote_hit(hit)) for seat in sorted(found) for hit in found[seat]]
        evidence["rules"] = [f"{host}: {quote}" for host, quote in quotes][:20]
        more = len({quote for _, quote in quotes}) - 1
        message += f"; by {quotes[0][1]}" + (f" and {more} more" if more else "")
    else:
        evidence["local rules"] = _what_rules_say(labels, rules, calls)
    confidence = Confidence.CERTAIN if found else Confidence.LIKELY
    if kind is MTU_BLACKHOLE and not found and any(_moved(call) for call in calls):
        confidence = Confidence.POSSIBLE
    return Finding(
        kind=kind,
        message=message,
        where=Where(
            hosts=tuple(sorted(labels[seat] for seat in seats)), links=_links(labels, pairs)
        ),
        evidence=evidence,
        fix=_fix(cluster, kind, calls, seats=seats, found=found, rules=rules),
        confidence=confidence,
    )


def _words(call: PeerCall) -> str:
    if call.outcome in ("error", "intercepted"):
        return str(call.attempts[-1]["detail"])
    return _WORDS.get(call.outcome, call.outcome)


def _moved(call: PeerCall) -> int:
    """Bytes of the large echo that arrived in the direction that then stood still."""
    last = call.attempts[-1]
    return int(last.get("downloaded" if last.get("stalled") == "download" else "uploaded", 0))


def _what_rules_say(
    labels: Mapping[int, str], rules: Mapping[int, Mapping[str, Any]], calls: Sequence[PeerCall]
) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for seat in sorted({seat for call in calls for seat in call.pair} & set(rules)):
        own = rules[seat]
        pairs = {call.pair for call in calls}
        maybe = [quote_hit(hit) for hit in own["hits"] if (hit["caller"], hit["listener"]) in pairs]
        if not own["readable"]:
            said[labels[seat]] = f"not readable ({own['reason']})"
        else:
            said[labels[seat]] = {"may be": sorted(set(maybe))[:5]} if maybe else "none that fits"
    return said


def _fix(
    cluster: Cluster,
    kind: Kind,
    calls: Sequence[PeerCall],
    *,
    seats: set[int],
    found: Mapping[int, Sequence[Mapping[str, Any]]],
    rules: Mapping[int, Mapping[str, Any]],
) -> str:
    labels = _labels(cluster)
    if kind is PEER_NO_ROUTE:
        call = calls[0]
        return f"on {labels[call.caller]}: " + kind.fix.replace("<address>", call.address)
    if kind is MTU_BLACKHOLE and not found:
        return kind.fix.replace("<host>", calls[0].address)
    if kind is PEER_INTERCEPTED and not found:
        return kind.fix
    remove = kind in (MTU_BLACKHOLE, PEER_INTERCEPTED)
    steps = []
    for seat in sorted(seats):
        peers = {c.source for c in calls if c.listener == seat and c.source}
        peers |= {c.address for c in calls if c.caller == seat}
        managers = rules.get(seat, {}).get("managers", ())
        hits = found.get(seat, ())
        commands = [
            remove_rule(hit) if remove else let_in(hit, sorted(peers), managers) for hit in hits
        ] or [let_in(None, sorted(peers), managers)]
        commands = [command for command in dict.fromkeys(commands) if command]
        steps += [f"on {labels[seat]}: {' && '.join(commands)}"] if commands else []
    return "; ".join(steps) or _open(cluster, calls)


def _open(cluster: Cluster, calls: Sequence[PeerCall]) -> str:
    ends = {call.listener for call in calls}
    for rank, facts in _reports(cluster):
        if rank.seat in ends:
            low, high = facts["port_range"]
            return f"{_OPEN} ({low}-{high}), in the hosts' firewalls, security groups and ACLs"
    return _OPEN


def _unroutable(cluster: Cluster, by_fault: Sorted) -> Iterator[Finding]:
    calls = read_calls(_reports(cluster), cluster.backend)
    labels = _labels(cluster)
    groups: dict[tuple[str, bool], list[PeerCall]] = {}
    for call in by_fault.unroutable:
        groups.setdefault((call.interface if call.job else "", call.job), []).append(call)
    for (_, job), group in sorted(groups.items()):
        pairs = {call.pair for call in group}
        reach = {by_fault.working[pair].interface for pair in pairs if pair in by_fault.working}
        good = sorted(reach)[0] if reach else "<nic>"
        nccl = _uses(cluster, "nccl") == job
        words = sorted({_words(call) for call in group})
        yield Finding(
            kind=INTERFACE_UNROUTABLE,
            message=f"{', '.join(sorted({c.address for c in group})[:8])}: {', '.join(words)}",
            where=Where(
                hosts=tuple(sorted(labels[seat] for seat in unroutable_hosts(group, calls))),
                links=_links(labels, pairs),
                interfaces=tuple(sorted({call.interface for call in group})),
            ),
            evidence={"calls": [call.shown(labels) for call in group[:5]]},
            fix=f"export {'NCCL_SOCKET_IFNAME==' if nccl else 'GLOO_SOCKET_IFNAME='}{good}",
            severity=Severity.FAIL if job else Severity.INFO,
        )
