"""Do the roads between the hosts lose packets, in which direction, and at which host?

What it checks
--------------
In the calls of check `firewall`, every host sends each other one a few hundred small segments over
TCP, eight at a time, and the kernel counts those that it had to send again: so little traffic that
no queue overflows. Where two or more were lost, the hosts at both ends, and others to compare with,
do it once more, five times as long; not if so much was lost that one try is enough. What the
connections of the store lost until then counts too, where it is a tenth and more. What was lost
is blamed on the host that explains all of it (into it, out of it), or else on the link. Where the
receiving host counts packets that arrived damaged, or that it dropped itself, its interface is the
cause. The evidence also shows by how much the kernel's own counters of TCP rose at both ends (check
`retransmissions`).

Why it matters
--------------
TCP waits 0.2 s and more for many a lost segment, and twice as long for each time that the same one
is lost again: collectives crawl, or hang until a time-out, on ranks that did nothing wrong. NCCL
and gloo say nothing of it.

How to fix
----------
Cable, transceiver and switch port, duplex, a firewall or NAT with full tables: look for counters
that grow in `ethtool -S <nic>`, in `nstat -az TcpRetransSegs`, and on the switch.

When it is wrong
----------------
Segments of 512 bytes, at the start: a road that loses only large packets, or only under the load of
the whole job, is not seen here (checks `firewall`, `links`). What InfiniBand or RoCE lose is seen
by check `rdma_errors`. The segments that the other side had already (D-SACK) are not counted.
Thresholds: 5 segments and 0.5 % lost in both tries, 2 of them in the second one, or 10 segments and
10 % in the first. A job that is only slow is a warning: it is a failure where 10 % and more are
lost, and somebody was not heard, or a group of the ranks did not come to its end. Groups get 40 s
more on such roads. With two hosts, a fault of a host cannot be told from one of the link.

References
----------
tcp(7), TCP_INFO; Linux include/uapi/linux/tcp.h; RFC 2883 (D-SACK); RFC 6298 (time-out of
retransmissions); RFC 8985 (RACK-TLP); ethtool(8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from nccl_doctor.api import (
    Cause,
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    HostLink,
    Kind,
    Layer,
    OutcomeStatus,
    Round,
    Severity,
    Skip,
    Turn,
    Where,
    fill_each,
    host_labels,
    look,
    shell,
)
from nccl_doctor.toolkit.groups.attempts import attempts_of
from nccl_doctor.toolkit.hosts import link_names
from nccl_doctor.toolkit.nccl.survey import other_answers
from nccl_doctor.toolkit.net.shapers import in_words, shaped_at, without_shapers
from nccl_doctor.toolkit.net.tcp_counters import tcp_rises
from nccl_doctor.toolkit.peers.calls import CallMatrix, call_on_chosen_addresses, calls_deadline
from nccl_doctor.toolkit.peers.calm import Calm
from nccl_doctor.toolkit.peers.drops import DAMAGED, DROPPED, judge_drops
from nccl_doctor.toolkit.peers.echo import Talk
from nccl_doctor.toolkit.peers.loss import (
    AGAIN,
    FIRST,
    HEAVY,
    Losses,
    LostSegments,
    first_reports,
    hosts_to_try_again,
    read_losses,
)

LINK_LOSSY = Kind(
    "link-lossy",
    Layer.PORT,
    "TCP segments are lost on a link",
    "TCP waits 0.2 s and more for each of them, so collectives crawl, or hang until a time-out",
    Fix(
        look(shell("ethtool -S NIC | grep -i -e err -e drop -e crc")),
        look(shell("ip -s link show NIC"), "replace the cable or transceiver where errors grow"),
        look(shell("nstat -az TcpRetransSegs")),
        alternatives=[Fix(text="look at the counters of the switch ports")],
    ),
    Severity.WARN,
    effects=(Effect.DELAYS,),
)
_TALKS = {FIRST: Talk(large=False), AGAIN: Talk(Calm(groups=250, limit_s=1.5), large=False)}
_TRIED = ("collectives", "exchanges", "groups")
"""Checks whose groups show whether a job gets through."""
_ALL_ROADS = "TCP segments are lost on all roads of a host"
_WAYS = {
    "in": "on all roads into the host",
    "out": "on all roads out of the host",
    "both": "on all roads into the host and out of it",
}


class Loss(Check):
    """Counts lost segments between hosts, and once more where some were lost."""

    name = "loss"
    layer = Layer.PORT
    cost = "seconds"
    together = True
    kinds = (LINK_LOSSY, DAMAGED, DROPPED)
    turn = Turn.LAST
    reads = (
        "backend_device", "clock", "collectives", "exchanges", "firewall", "gpu_work", "groups",
        "interfaces", "kernel_limits", "retransmissions", "uplink",
    )  # fmt: skip

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One more try among the hosts at the ends of doubtful roads, and some others."""
        if max(cluster.nnodes, len(cluster.hosts)) < 2:
            raise Skip("one host: no roads between hosts")
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        seats = tuple(rank.seat for rank in first if rank is not None)
        given = {"nccl": other_answers(cluster)}
        deadline_s = calls_deadline(len(seats))
        rounds = []
        # Held without success: what kept those calls from being made would keep these, too.
        called = any("matrix" in host.facts.get("firewall", {}) for host in cluster.hosts)
        if seats and not called:
            rounds.append(Round(FIRST, (seats,), deadline_s, given, may_shrink=True))
        again = hosts_to_try_again(cluster, seats)
        if again:
            rounds.append(Round(AGAIN, (again,), deadline_s, given, may_shrink=True))
        if called and not again:
            good = any(True for _ in cluster.facts("firewall", "matrix"))
            raise Skip(f"the calls of check firewall {'lost nothing' if good else 'were not made'}")
        return rounds

    def observe(self, ctx: Context) -> CallMatrix:
        """Call every other host of the round, and let it call this one."""
        return call_on_chosen_addresses(ctx, _TALKS[ctx.round])

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on the hosts and links that lost segments, and on the interfaces that dropped
        them.
        """
        losses = read_losses(cluster)
        labels = host_labels(cluster)
        rises = tcp_rises(cluster) if losses.causes else {}
        risen = {host.label: rises[host.id] for host in cluster.hosts if host.id in rises}
        reports = [*cluster.facts(self.name, AGAIN)] or [*chain(*first_reports(cluster))]
        stops = bool(losses.causes) and _stops_jobs(cluster)
        for cause in losses.causes:
            receivers = {receiver for _, receiver in cause.pairs}
            heavy = stops and losses.of(cause).share >= HEAVY
            level = Severity.FAIL if heavy else Severity.WARN
            seen = [report for report in reports if report[0].seat in receivers]
            dropped = [each.replaced(severity=level) for each in judge_drops(seen, receivers)]
            yield from dropped
            named = {name for each in dropped for name in each.where.hosts}
            told = named == {labels[seat] for seat in receivers}
            found = _finding(cluster, losses, cause, level, risen)
            yield found.replaced(explained_by=dropped[0].code) if told else found

    def sections(self, cluster: Cluster) -> Iterator[HostLink]:
        """Segments sent and lost, on each road that was tried again, or that is known without."""
        losses = read_losses(cluster)
        hosts = {rank.seat: rank.host.id for rank in cluster.present}
        proven = {pair: losses.first[pair] for pair in losses.pairs if pair in losses.first}
        for (start, end), each in {**proven, **losses.again}.items():
            yield HostLink(hosts[start], hosts[end], segments=each.segments, lost=each.lost)


def _stops_jobs(cluster: Cluster) -> bool:
    """True if a rank was not heard, or a group of living ranks did not come to its end."""
    silent = (
        item.outcome.status is OutcomeStatus.SILENT
        for check in (*_TRIED, Loss.name, "firewall")
        for item in cluster.evidence(check)
    )
    tried = (attempts_of(cluster, check).values() for check in _TRIED)
    hung = (
        not (each.is_good or each.is_untried or each.is_cut_short or each.dead)
        for found in chain(*tried)
        for each in found
    )
    return not cluster.complete or any(silent) or any(hung)


def _finding(
    cluster: Cluster,
    losses: Losses,
    cause: Cause[int],
    level: Severity,
    risen: Mapping[str, Mapping[str, int]],
) -> Finding:
    """The finding for one cause; a comparison alone is never certain.

    `risen`: name of a host → by how much the kernel's counters rose there.
    """
    labels = host_labels(cluster)
    lost = losses.of(cause)
    words = f"{lost.lost} of {lost.segments} segments lost ({100 * lost.share:.1f} %)"
    if cause.is_host:
        words += f" {_WAYS[cause.way]}"
    calls = [
        {"from": labels[a], "to": labels[b], "first": vars(one), "again": vars(other)}
        for a, b in sorted(cause.pairs)[:5]
        for one, other in [
            (losses.first.get((a, b), LostSegments()), losses.again.get((a, b), LostSegments()))
        ]
    ]
    tries = "two tries" if any(pair in losses.again for pair in cause.pairs) else "one try"
    most = 2 * len(cause.pairs) > len(losses.again or losses.first)
    unsure = most or cause.confidence is Confidence.POSSIBLE
    ends = sorted(labels[end] for end in cause.ends)
    nics = tuple(sorted({nic for end in cause.ends for nic in losses.interfaces.get(end, ())}))
    held = [each for each in shaped_at(cluster, cause.ends) if each[1] in nics or not nics]
    names = [(labels[end], nic) for end in cause.ends for nic in losses.interfaces.get(end, ())]
    fix = fill_each(LINK_LOSSY.fix, ((host, {"NIC": nic}) for host, nic in sorted(names)))
    return Finding(
        LINK_LOSSY.variant(title=_ALL_ROADS) if cause.is_host else LINK_LOSSY,
        f"{words} with almost no traffic, in {tries}{in_words(held)}",
        Where(
            hosts=tuple(labels[end] for end in cause.ends) if cause.is_host else (),
            links=() if cause.is_host else link_names(labels, cause.pairs),
            interfaces=nics if cause.is_host else (),
        ),
        {"roads": calls, "counters": {name: risen[name] for name in ends if name in risen}},
        fix=without_shapers(held, fix) if held else fix,
        severity=level,
        confidence=Confidence.POSSIBLE if unsure else Confidence.LIKELY,
    )
