"""Can every host reach every other one on the ports and addresses that the job will use?

What it checks
--------------
On each address that NCCL (bootstrap, and data over sockets) and gloo would choose (see check
`interfaces`; where NCCL itself names another one, on that), every host listens on a new ephemeral
port, and every other host connects to it. The answer must prove that it is the right listener; 64
bytes and then 1 MiB must come back unchanged; in between, small segments count what the road loses,
for check `loss`, and packets of the largest size must come back, as where cards or virtual links
cut streams themselves, a stream may pass where a full packet is lost. Then it opens as many
connections at once as the job would, 8 at least. What fails is tried twice. Of more than 64 hosts,
each calls and is called by log2(hosts) + 4 partners (with 1 MiB in 4 of these pairs), by chance
others in each run, and at least two hosts of each two leaf switches that `--topology` or Slurm
(SLURM_TOPOLOGY_ADDR) tells: a bad host shows in all of its pairs. `--level full` tries every pair.
Where ranks fail or hang together later, the hosts call once more: a firewall may have come up
during the run. Where something failed, the firewall rules of both ends are read (nft, iptables;
needs root) and the packet is followed through them; and the kernels are asked by netlink how they
route it. That tells what a rule on the way back does too (`fib saddr . iif oif missing`, or `-m
rpfilter` of iptables), with which firewalld drops IPv6 packets (IPv6_rpfilter). Meanwhile rank 0's
host looks up the names of the addresses that call its store, for check `master_addr`. A listener
says from which address it sees a call come: where that is none of the caller's own, and no call to
that host succeeds, it is behind an address translation (NAT); where it is one of the called host
itself, a proxy there takes the calls and passes them on. Whoever else connects to the ports of this
check and of `advertised_addresses` is counted, with the first thing that they say. A listener notes
for how long what a caller said lay unread: a call that failed as the host had no CPU is none that
failed.

Why it matters
--------------
MASTER_PORT is only the meeting point. NCCL and gloo then connect every host to every other one, on
random ports that the kernel picks and on addresses that they pick themselves: NCCL in both
directions, gloo from the host whose address is the greater to the other one, so that the other
direction, if shut, is a warning to a job of gloo. A firewall that passes MASTER_PORT and drops the
rest, an interface that the others cannot route to, or a path that loses large packets lets the job
start and then hang for minutes or hours. A port scan or a metrics scraper that connects to a port
of NCCL before 2.30.7 can stop its proxy thread for ever.

How to fix
----------
Open all tcp between the hosts of the job, or at least net.ipv4.ip_local_port_range (in a cloud: a
security group that allows traffic from itself); or, where only a window of ports may be open, set
that range to lie inside of it: the finding says how many ports the job needs, by estimate. Keep the
libraries off interfaces that the others cannot route to: NCCL_SOCKET_IFNAME==eth0 and
GLOO_SOCKET_IFNAME=eth0. Let ICMP "fragmentation needed" pass. Keep scanners from the ephemeral
ports of the hosts.

When it is wrong
----------------
Only one participant per host connects, at the start: a firewall that drops idle connections, or
that limits what comes in more than 2 seconds, is not seen. InfiniBand traffic is not tested. A rule
with a condition that is not understood (a named set, a rate) is never blamed. A path that delivers
less than 16 KiB in 3 seconds counts as one that loses large packets. Where no rule is found, a
host, or its incoming or outgoing direction, is blamed by comparison alone: only if every
explanation of the failures that needs the fewest faults contains it. Otherwise the finding names
the links; with two hosts alone, a fault of a host cannot be told from a fault of the link.
Strangers are seen only in the seconds in which the ports are open. A host behind an address
translation that can be called all the same (a pod whose packets are masqueraded) is well; if a
firewall stops the calls to it, the translation is named, and only likely. A host that reads late
what was said knows no caller behind an address translation.

References
----------
NCCL user guide, environment variables and troubleshooting (networking); NCCL src/misc/socket.cc;
PyTorch documentation of torch.distributed (choosing the network interface); nft(8); RFC 2923 (TCP
problems with path MTU discovery).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    HostLink,
    Kind,
    Layer,
    Round,
    Severity,
    Skip,
    Step,
    Where,
    fill,
    host_labels,
    shell,
    spans_machines,
)
from nccl_doctor.toolkit.firewall.netfilter import by_rule, quote_hit, who_stops
from nccl_doctor.toolkit.hosts import link_names, some_of
from nccl_doctor.toolkit.nccl.survey import other_answers
from nccl_doctor.toolkit.net.ports import port_range
from nccl_doctor.toolkit.peers.calls import CallMatrix, call_on_chosen_addresses, calls_deadline
from nccl_doctor.toolkit.peers.common_interface import interface_fix
from nccl_doctor.toolkit.peers.echo import Talk
from nccl_doctor.toolkit.peers.matrix import (
    SILENT,
    PeerCall,
    filtered_ways,
    unroutable_hosts,
)
from nccl_doctor.toolkit.peers.schedule import partners_enough, plan_schedule
from nccl_doctor.toolkit.shared_kinds import HOST_ANSWERS_LATE

from .again import AGAIN, RULES_AGAIN, latest_calls, seats_again, was_open
from .clients import clients_of_store, looked_up
from .culprits import (
    Suspects,
    how_to_open,
    sample_for_rules,
    suspects_of_all,
    what_rules_say,
)
from .few_at_once import calls_cut_short, few_at_once
from .forwarded import forwarded_calls, judge_forwarded
from .kinds import (
    DEAD_ROUTE,
    INTERFACE_UNROUTABLE,
    MTU_BLACKHOLE,
    NO_ANSWER,
    NO_NEIGHBOUR,
    OPEN,
    PEER_BLOCKED,
    PEER_INTERCEPTED,
    PEER_NO_ROUTE,
    PEER_ONE_WAY,
    UNUSED,
    if_reached,
    lower_mtu,
)
from .late import judge_late
from .local import RulesFacts, observe_rules
from .sampled import SAMPLED, UNPLACED, judge_places, judge_sample
from .shown import links_of
from .strangers import STRANGER, judge_strangers
from .translated import TRANSLATED, is_translated, seen_addresses, translation
from .windows import how_to_stay_inside, where_other_ports_pass

_RULES_S = 25.0
_LEAST_AT_ONCE, _MOST_AT_ONCE = 8, 64
"""Connections that are made to each host at once, in addition to one that is tried in full."""

_WAYS = {
    "in": "into the host",
    "out": "out of the host",
    "both": "into the host or out of it",
}


class MatrixFacts(CallMatrix):
    """Facts that `observe` returns in round `matrix`; other checks read them."""

    port_range: list[int]
    clients: list[dict[str, Any]]


class Firewall(Check):
    """Every ordered pair of hosts, on the addresses that the job would use."""

    name = "firewall"
    layer = Layer.PORT
    cost = "seconds"
    together = True
    kinds = (
        PEER_NO_ROUTE,
        PEER_BLOCKED,
        PEER_ONE_WAY,
        PEER_INTERCEPTED,
        MTU_BLACKHOLE,
        INTERFACE_UNROUTABLE,
        STRANGER,
        SAMPLED,
        UNPLACED,
        HOST_ANSWERS_LATE,
    )
    reads = ("advertised_addresses", "duplicate_address", "interfaces", "nccl_library", "own_name")

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """The matrix of all hosts; then the rules and routes at both ends of failed calls. Where
        something fails later, the same again.
        """
        if max(cluster.nnodes, len(cluster.hosts)) < 2:
            raise Skip("only one host: no peers")
        if not spans_machines(cluster):
            raise Skip("all node ranks are on one machine: no peers")
        speakers = [cluster.first_on(host) for host in cluster.present_hosts]
        seats = tuple(rank.seat for rank in speakers if rank is not None)
        if not seats:
            return ()
        given = {"nccl": other_answers(cluster), **clients_of_store(cluster)}
        schedule = plan_schedule(cluster, seats)
        partners = len(seats) if schedule.all_pairs else partners_enough(len(seats))
        params = {**given, **schedule.to_params()}
        limit_s = calls_deadline(partners)
        rounds = [Round("matrix", (seats,), limit_s, params, may_shrink=True)]
        first = _Matrix(cluster, at_first=True)
        if first.unanswered:
            return [*rounds, *_of_rules("rules", first)]
        rounds += _of_rules("rules", first)
        if first.calls and (again := seats_again(cluster, seats, self.name)):
            limit_s = calls_deadline(len(again))
            rounds.append(Round(AGAIN, (again,), limit_s, given, may_shrink=True))
            rounds += _of_rules(RULES_AGAIN, _Matrix(cluster))
        return rounds

    def observe(self, ctx: Context) -> MatrixFacts | RulesFacts:
        """Call every other host, or (rounds `rules`) read the rules of this one."""
        reads = ctx.round in ("rules", RULES_AGAIN)
        return observe_rules(ctx) if reads else _observe_matrix(ctx)

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on failed calls, with the firewall rules that explain them."""
        matrix = _Matrix(cluster)
        yield from _failed(matrix)
        yield from _unroutable(matrix)
        yield from judge_forwarded(cluster, matrix.forwarded, matrix.rules)
        yield from few_at_once(
            PEER_BLOCKED, matrix.calls, matrix.labels, matrix.rules, matrix.ranks
        )
        yield from judge_sample(cluster, matrix.sorted.tested)
        yield from judge_places(cluster)
        yield from judge_late(cluster, ("matrix", AGAIN))
        troubled = {call.listener for call in matrix.calls if call.outcome != "ok"}
        yield from judge_strangers(cluster, troubled)

    def sections(self, cluster: Cluster) -> Iterator[HostLink]:
        """Every pair of hosts, and whether one reaches the other."""
        return links_of(cluster, self.name)


# Observing ----------------------------------------------------------------------------------------


def _observe_matrix(ctx: Context) -> MatrixFacts:
    serves = ctx.params.get("store") == ctx.seat
    ports = list(port_range(ctx.root))
    with looked_up(ctx.params["clients"] if serves else ()) as clients:

        def whole(made: Mapping[str, Any]) -> MatrixFacts:
            return cast(MatrixFacts, {**made, "port_range": ports, "clients": clients})

        calling = replace(ctx, so_far=lambda made: ctx.so_far(whole(made)))
        talk = Talk(burst=_burst(ctx.launch.local_world_size or 1))
        made = call_on_chosen_addresses(calling, talk)
    return whole(made)


def _of_rules(name: str, matrix: _Matrix) -> Sequence[Round]:
    """The round that reads rules and routes at both ends of calls that failed or were diverted, if
    there are any.
    """
    pairs = sample_for_rules((*matrix.unanswered, *matrix.forwarded))
    ends = sorted({pair[end] for pair in pairs for end in ("caller", "listener")})
    groups = tuple((seat,) for seat in ends)
    return (Round(name, groups, _RULES_S, {"pairs": pairs}),) if groups else ()


def _burst(local_ranks: int) -> int:
    """Connections between two hosts at once: one for each pair of ranks, within reason."""
    return min(_MOST_AT_ONCE, max(_LEAST_AT_ONCE, local_ranks**2))


# Judging ------------------------------------------------------------------------------------------


class _Matrix:
    """All calls, and the rules that were read; `at_first`: those before anything else."""

    def __init__(self, cluster: Cluster, *, at_first: bool = False) -> None:
        reports = list(cluster.facts(Firewall.name, "matrix"))
        self.again = [] if at_first else list(cluster.facts(Firewall.name, AGAIN))
        of_rules = "rules" if at_first or not self.again else RULES_AGAIN
        self.cluster = cluster
        self.backend = cluster.backend
        self.labels = host_labels(cluster)
        self.ranks = (
            {rank.seat: len(cluster.ranks_on(rank.host)) for rank, _ in reports}
            if cluster.backend == "gloo"
            else None
        )
        self.ranges = {rank.seat: facts["port_range"] for rank, facts in reports}
        self.calls, self.sorted = latest_calls(cluster, self.again)
        self.routes = {(each.caller, each.address): each.route for each in self.calls if each.route}
        """(Seat, address) → the route of the host to it, where calls asked for one."""
        self.seen = seen_addresses(self.calls)
        self.forwarded = forwarded_calls(cluster, self.calls)
        self.down = {
            (rank.seat, nic["name"])
            for rank, facts in cluster.facts("interfaces")
            for nic in facts.get("interfaces", ())
            if not (nic["up"] and nic["running"])
        }
        rules = list(cluster.facts(Firewall.name, of_rules))
        self.rules = {rank.seat: facts for rank, facts in rules}
        self.likely = {
            facts["likely"][1]
            for _, facts in cluster.facts("duplicate_address")
            if facts.get("likely")
        }
        """Addresses that check `duplicate_address` compares."""
        self.filtered = {(rank.seat, way["own"]) for rank, way in filtered_ways(rules)}

    @property
    def unanswered(self) -> tuple[PeerCall, ...]:
        """Every call that a filter or a route of a host may explain."""
        lost = (call for call in self.sorted.unroutable if call.outcome in SILENT)
        return (*self.sorted.failed, *lost, *calls_cut_short(self.calls).values())

    def is_down(self, call: PeerCall) -> bool:
        """True if the interface that was called is down on its own host."""
        return (call.listener, call.interface) in self.down

    def is_filtered(self, call: PeerCall) -> bool:
        """True if the reverse path filter of the host that was called drops such calls."""
        return (call.listener, call.address) in self.filtered

    def names(self, seats: Iterable[int]) -> tuple[str, ...]:
        return tuple(sorted(self.labels[seat] for seat in seats))

    def shown(self, calls: Sequence[PeerCall]) -> list[dict[str, Any]]:
        return [call.shown(self.labels) for call in calls[:5]]


def _failed(matrix: _Matrix) -> Iterator[Finding]:
    hits = {seat: facts["hits"] for seat, facts in matrix.rules.items()}
    kinds = (PEER_NO_ROUTE, PEER_BLOCKED, PEER_ONE_WAY, PEER_INTERCEPTED, MTU_BLACKHOLE)
    for code, found in suspects_of_all(matrix.sorted, hits):
        yield _finding(matrix, next(kind for kind in kinds if kind.code == code), found)


def _finding(matrix: _Matrix, kind: Kind, found: Suspects) -> Finding:
    labels, calls, large = matrix.labels, found.calls, kind is MTU_BLACKHOLE
    pairs = {call.stuck for call in calls}
    words = Counter(call.words for call in calls).most_common(3)
    message = f"{', '.join(word for word, _ in words)} on a new port, twice "
    if found.cause is None:
        message += f"({len(pairs)} of {len(matrix.sorted.tested)} ordered pairs)"
    else:
        nothing = "no large packet" if large else "nothing"
        message = f"{nothing} gets {_WAYS[found.cause.way]}: {message}"
        message += f"({len(pairs)} of {len(found.cause.pairs)} tried)"
    if was_open({call.pair for call in calls}, matrix.again):
        message += ", which were good as the run began"
    # Large packets are lost on connections that the other side makes, too.
    severity = None if large or any(call.used for call in calls) else Severity.WARN
    if severity:
        message += UNUSED
    evidence: dict[str, Any] = {"calls": matrix.shown(calls)}
    confidence = found.confidence
    cause = ""
    answered = kind in (PEER_INTERCEPTED, MTU_BLACKHOLE)
    if not answered and not found.rules and is_translated(calls, matrix.seen):
        said, fix = translation(calls, matrix.seen, labels, if_reached(_fix(matrix, kind, found)))
        return Finding(
            kind.variant(**TRANSLATED),
            f"{said}; {message}",
            Where(
                hosts=matrix.names({call.listener for call in calls}),
                links=link_names(labels, pairs),
            ),
            evidence,
            fix=fix,
            severity=severity,
            confidence=Confidence.LIKELY,
        )
    dead = _dead_routes(matrix, calls)
    if dead:
        some = ", ".join(sorted({route for route, _ in dead})[:3])
        message += f"; by a route of the host that leads nowhere: {some}"
        confidence = Confidence.CERTAIN
    if found.rules:
        quotes = [
            (labels[seat], quote_hit(hit))
            for seat, hits in sorted(found.rules.items())
            for hit in hits
        ]
        evidence["rules"] = [f"{host}: {quote}" for host, quote in quotes][:20]
        more = len({quote for _, quote in quotes}) - 1
        first = found.rules[min(found.rules)][0]
        message += f"; {by_rule(first)}" + (f" and {more} more" if more else "")
        if not large:  # of large packets, a rule may stop what only tells their size
            cause = _cause(labels, found)
    else:
        ends = {call.pair for call in calls}
        evidence["local rules"] = what_rules_say(labels, matrix.rules, ends)
        if large and any(call.moved for call in calls):
            confidence = Confidence.POSSIBLE
    if _has_no_neighbour(calls):
        kind = kind.variant(**NO_NEIGHBOUR)
    return Finding(
        kind.variant(title=DEAD_ROUTE) if dead else kind,
        message,
        Where(
            hosts=matrix.names(found.seats | {seat for _, seat in dead}),
            links=link_names(labels, pairs),
        ),
        evidence,
        fix=_without_routes(matrix, dead) if dead else _fix(matrix, kind, found),
        severity=severity,
        confidence=confidence,
        cause="" if dead else cause,
    )


def _cause(labels: Mapping[int, str], found: Suspects) -> str:
    """The rule that stops the calls, its hosts, and the hosts whose packets it stops."""
    hit = next(hit for _, hits in sorted(found.rules.items()) for hit in hits)
    others = {
        labels[end] for call in found.calls for end in call.pair if end not in found.rules
    } or {labels[end] for call in found.calls for end in call.pair}
    hosts = sorted(labels[seat] for seat in found.rules)
    return who_stops(hosts, hit, others=some_of(sorted(others)))


def _dead_routes(matrix: _Matrix, calls: Iterable[PeerCall]) -> list[tuple[str, int]]:
    """Route and seat of the host that has it, for each route that leads calls nowhere, or the
    answers to them: what the job does not use was called as well.
    """
    found: dict[tuple[str, int], None] = {}
    for call in calls:
        if call.route:
            found[call.route, call.caller] = None
        elif call.source and (route := matrix.routes.get((call.listener, call.source))):
            found[route, call.listener] = None
    return list(found)


def _without_routes(matrix: _Matrix, dead: Iterable[tuple[str, int]]) -> Fix:
    return Fix(
        *(
            Step(
                shell("ip route del {}", route.split()),
                on=(matrix.labels[seat],),
                undo=shell("ip route add {}", route.split()),
            )
            for route, seat in dead
        )
    )


def _has_no_neighbour(calls: Iterable[PeerCall]) -> bool:
    return all(call.outcome == "no-neighbour" for call in calls)


def _fix(matrix: _Matrix, kind: Kind, found: Suspects) -> str:
    call = found.calls[0]
    if kind is PEER_NO_ROUTE:
        return _with_interface(matrix, kind.fix, call)
    if _has_no_neighbour(found.calls):
        return _with_interface(matrix, NO_ANSWER, call)
    remove = kind in (MTU_BLACKHOLE, PEER_INTERCEPTED)
    if kind is MTU_BLACKHOLE and not found.rules:
        call = next((each for each in found.calls if each.carries), call)
        return lower_mtu(call, matrix.labels[call.caller])
    if remove and not found.rules:
        return kind.fix
    steps = how_to_open(found, matrix.labels, matrix.rules, remove=remove)
    if steps:
        seats = [] if remove else sorted(found.rules)
        inside = how_to_stay_inside(matrix.cluster, matrix.rules, seats, matrix.ranges)
        return Fix(*steps, alternatives=inside)
    ends = {call.listener for call in found.calls}
    low, high = matrix.ranges[min(ends & matrix.ranges.keys())]
    everywhere = "in the hosts' firewalls, security groups and ACLs"
    known = remove or matrix.again
    some = "" if known else where_other_ports_pass(matrix.cluster, found.calls)
    return f"{OPEN} ({low}-{high}), {everywhere}" + (f"; {some}" if some else "")


def _with_interface(matrix: _Matrix, fix: str, call: PeerCall) -> Fix:
    """The fix for a call, and the interface that reaches all hosts as another way."""
    filled = fill(fix, on=(matrix.labels[call.caller],), ADDRESS=call.address)
    nccl = "nccl" in matrix.backend
    other = interface_fix(matrix.cluster, nccl=nccl, gloo=not nccl)
    return Fix(*getattr(filled, "steps", ()), alternatives=[other])


def _unroutable(matrix: _Matrix) -> Iterator[Finding]:
    groups: dict[tuple[str, bool, bool], list[PeerCall]] = {}
    for call in matrix.sorted.unroutable:
        key = call.interface if call.job else "", call.job, matrix.is_down(call)
        groups.setdefault(key, []).append(call)
    for (_, job, is_down), group in sorted(groups.items()):
        pairs = {call.pair for call in group}
        nccl = ("nccl" in matrix.backend) == job
        words = sorted({call.words for call in group})
        hosts, confidence = unroutable_hosts(group, matrix.calls)
        severity = Severity.INFO
        if job:
            severity = Severity.FAIL if any(call.used for call in group) else Severity.WARN
            words += [] if severity is Severity.FAIL else [UNUSED.strip("; ")]
        # Another check reports it, and that is the reason.
        reason = "rp-filter-strict" if all(map(matrix.is_filtered, group)) else None
        if is_down:
            reason = "interface-down"
        if all(call.outcome == "own-address" and call.address in matrix.likely for call in group):
            reason = "address-duplicate"
        yield Finding(
            INTERFACE_UNROUTABLE,
            f"{', '.join(sorted({c.address for c in group})[:8])}: {', '.join(words)}",
            Where(
                hosts=matrix.names(hosts),
                links=link_names(matrix.labels, pairs),
                interfaces=tuple(sorted({call.interface for call in group})),
            ),
            {"calls": matrix.shown(group)},
            fix=interface_fix(matrix.cluster, nccl=nccl, gloo=not nccl),
            severity=severity,
            confidence=confidence,
            explained_by=reason,
        )
