"""Are all links between the hosts about equally fast?

What it checks
--------------
On the address that the job would use, every host exchanges a little data with every other one (with
a few of them if there are more than 16 and the level is not `full`), never with two at once: the
round-trip time of 64 bytes, and the bandwidth of one TCP connection in each direction for a tenth
of a second. Each value is compared with those of the other links. Outliers are measured again, and
each of their ends with a partner that was good, with at most half as many pairs at once; only what
is an outlier again is blamed. Links that lose packets (check `loss`), or on which calls fail (check
`firewall`), are left out. Meanwhile each host counts the packets that arrived damaged
(rx_crc_errors, rx_frame_errors), and those that it dropped itself (rx_missed_errors,
rx_fifo_errors, rx_dropped of the interface and of those beneath it; softnet_stat). The size of the
packets that a path carried is compared with the MTU of the interfaces at both of its ends.

Why it matters
--------------
A collective is as fast as its slowest link: one cable that fell back to 1 Gbit/s, or one host
behind a wrong switch port or a VPN, slows every step of the whole job, and no library reports it.

How to fix
----------
host-slow: `ethtool <nic>` shows the negotiated speed, `ip -s link` the errors; look for a NIC in a
narrow PCIe slot, another driver, a rate limit, and work that keeps the CPU busy.
If tc holds packets back on a host itself, it is named: `tc -s qdisc show dev <nic>`.
link-slow, latency-high: the path between these two hosts (routes, VPN, switch uplink, rate limit).
nic-errors-rising: cable, transceiver or switch port of the interface that is named.
path-mtu-low: `tracepath -n <address>` shows the router or tunnel with the smaller MTU.
packets-dropped: a longer ring (`ethtool -G <nic> rx`), a longer backlog, interrupts on more CPUs.

When it is wrong
----------------
One TCP connection per link, on one interface, for a moment: problems that show only under the load
of the whole job, on more interfaces, or over InfiniBand are not seen. With two hosts there is no
other link to compare with: only less than a tenth of the line rate, or a third of the other
direction, is called slow. If most links are slow, that is taken as normal, and slow links that only
lead from one rack to another are reported as information. A host that may be slow
because it is busy is not blamed; the report says so. Thresholds: a third of the median bandwidth;
ten times the median round-trip time and 1 ms more.
A path is named if it carries less than nine tenths of what both interfaces could: a warning only
if others carry it. Packets that a host drops are named only where a link to it is slow (or lossy),
from 20 packets and 0.1 % on: other traffic may fill a queue too. A switch that drops leaves no
trace in a host.
Not validated on hardware: every rule was tested with real sockets and real faults on virtual links,
but not with a real NIC, switch or line rate; latency was tested on made-up clusters only.

References
----------
tcp(7), TCP_INFO; Linux include/uapi/linux/tcp.h; ethtool(8); NCCL user
guide, troubleshooting (networking).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from nccl_doctor.api import (
    Cause,
    Check,
    Cluster,
    Confidence,
    Context,
    Figure,
    Finding,
    HostLink,
    Kind,
    Layer,
    Level,
    Round,
    Scope,
    Severity,
    Skip,
    Turn,
    Untested,
    Where,
    fill,
    fill_each,
    host_labels,
)
from nccl_doctor.toolkit.host import interface_mtu, load_average
from nccl_doctor.toolkit.hosts import link_names
from nccl_doctor.toolkit.nccl.survey import given_answer, other_answers, survey
from nccl_doctor.toolkit.net.shapers import in_words, shaped_at, without_shapers
from nccl_doctor.toolkit.peers.drops import (
    DAMAGED,
    DROPPED,
    grown,
    judge_drops,
    read_counts,
)
from nccl_doctor.toolkit.peers.echo import scoped
from nccl_doctor.toolkit.peers.loss import read_losses
from nccl_doctor.toolkit.peers.matrix import job_roles
from nccl_doctor.toolkit.peers.pairs import by_partner, mapping, number
from nccl_doctor.toolkit.peers.schedule import (
    Schedule,
    in_slots,
    leave_out,
    plan_schedule,
    schedule_of,
)
from nccl_doctor.toolkit.units import bits_text

from .kinds import HOST_LATE, HOST_SLOW, LATENCY_HIGH, LINK_SLOW
from .left_out import from_open_side, lossy_links, shut_links
from .path_mtu import PATH_MTU_LOW, judge_paths
from .second_try import measured_again, reports_again, rounds_held, turns
from .slowness import (
    Confirmed,
    Measure,
    confirm,
    line_rates,
    measures_of,
    suspects,
    try_again,
)
from .timed import Pace, hold_meetings, nic_speed
from .wire import Gate
from .words import WAYS, round_trip, span

_FIRST = "exchange"
_PACE, _PACE_AGAIN = Pace(), Pace(burst_s=0.2, burst_bytes=512 << 20, limit_s=7.0)
_LISTEN_S = 10.0
_WHILE_BUSY = "A link seemed slow while the CPU of one end was busy"
_NOT_KNOWN = "What the link itself can do is not known; a job that shares the CPU would be as slow."
_ALL_PAIRS = 16
"""Hosts up to which every pair is measured; above, only at level full."""
_LEAST_US = 300.0
"""A smaller change of a round-trip time may be the power saving of one CPU: C6 of Sapphire Rapids
takes 290 µs to leave (`spr_cstates` in drivers/idle/intel_idle.c).
"""


class LinksFacts(TypedDict):
    """Facts that `observe` returns. `sent`: seat of a partner → `timed.Sent`, or a `problem`."""

    address: str
    interface: str
    mtu: int
    nic_mbps: int | None
    carries_data: bool
    load: float | None
    drops: Mapping[str, Mapping[str, int]]
    sent: dict[str, dict[str, Any]]


class Links(Check):
    """Compares latency and bandwidth of the links between hosts; measures outliers again."""

    name = "links"
    layer = Layer.SPEED
    scope = Scope.HOST
    cost = "seconds"
    kinds = (HOST_SLOW, LINK_SLOW, LATENCY_HIGH, DAMAGED, DROPPED, PATH_MTU_LOW)
    level = Level.STANDARD
    together = True
    turn = Turn.FIRST  # collectives on a lossy link take all the time that is left
    needs = (Layer.NAME, Layer.ROUTE, Layer.PORT, Layer.RANKS)
    reads = ("clock", "firewall", "interfaces", "loss", "uplink")

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """All pairs of hosts; then the doubtful ones again, with known good partners."""
        if max(cluster.nnodes, len(cluster.hosts)) < 2:
            raise Skip("one host: no links")
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        seats = tuple(rank.seat for rank in first if rank is not None)
        if not seats:
            return ()
        schedule = plan_schedule(cluster, seats, _ALL_PAIRS)
        every = from_open_side(cluster, schedule.slots)
        lossy, shut = lossy_links(cluster), shut_links(cluster, every)
        held = leave_out(lossy | shut, every)
        given: dict[str, Any] = {"nccl": other_answers(cluster)}
        params = {**given, **schedule.to_params()}
        if every and not held and not shut:
            raise Skip("every link loses packets: its speed would be that of the losses")
        if held != schedule.slots and held:  # what shuts all of them blocks the round
            met = {seat for slot in held for meeting in slot for seat in meeting}
            seats = tuple(seat for seat in seats if seat in met)
            params["slots"] = held
        deadline, pairs = _LISTEN_S + 20 + len(held), [m for slot in held for m in slot] or None
        rounds = [Round(_FIRST, (seats,), deadline, params, may_shrink=True, pairs=pairs)]
        measured = measures_of(cluster, self.name, _FIRST)
        meetings = try_again(measured, suspects(cluster, self.name, _FIRST))
        for name, turn in turns(cluster, self.name, meetings, len(seats)):
            again = tuple(sorted({seat for meeting in turn for seat in meeting}))
            held = from_open_side(cluster, in_slots(turn))
            deadline = _LISTEN_S + _PACE_AGAIN.limit_s * (1 + len(held))
            params = {**given, "slots": held}
            rounds.append(Round(name, (again,), deadline, params, may_shrink=True, pairs=turn))
        return rounds

    def observe(self, ctx: Context) -> LinksFacts:
        """Measure with the partners of this round's timetable, one after the other."""
        if ctx.peers is None or len(ctx.group) < 2:
            raise Untested("no other host took part")
        ctx.breadcrumb("choosing the interface as the job's library does")
        answer = given_answer(ctx)
        choice = survey(ctx.env, resolve_timeout_s=1.0, root=ctx.root, ask=lambda: answer)
        sockets = choice["nccl_data"] == "sockets"
        wanted = job_roles(ctx.backend, sockets)
        if not choice["listen"]:
            raise Untested("this host has no address but loopback")
        mine = next((e for e in choice["listen"] if wanted & set(e["roles"])), choice["listen"][0])
        schedule = schedule_of(ctx.group, ctx.params) or Schedule(ctx.group)
        slots = ctx.params.get("slots") or schedule.slots
        partners = {s for slot in slots for pair in slot if ctx.seat in pair for s in pair}
        with Gate(scoped(mine["address"], mine["interface"])) as gate:
            ctx.peers.post("gate", gate.door.to_json())
            ctx.breadcrumb("waiting for the other hosts to listen")
            doors = ctx.peers.collect("gate", min(_LISTEN_S, ctx.left() / 2), partners)
            ctx.breadcrumb("exchanging with the other hosts", partners=len(partners) - 1)
            before = read_counts(mine["interface"], ctx.root)
            pace = _PACE if ctx.round == _FIRST else _PACE_AGAIN
            sent = hold_meetings(
                slots,
                ctx.seat,
                gate,
                doors,
                pace=pace,
                deadline=ctx.deadline - 1,
            )
        if all("problem" in each for each in sent.values()):
            reasons = sorted({each["problem"] for each in sent.values()})
            raise Untested("; ".join(reasons) or "no other host took part")
        return {
            "address": mine["address"],
            "interface": mine["interface"],
            "mtu": interface_mtu(mine["interface"]),
            "nic_mbps": nic_speed(mine["interface"], ctx.root),
            "carries_data": "nccl" not in ctx.backend or sockets,
            "load": load_average(),
            "drops": grown(before, read_counts(mine["interface"], ctx.root)),
            "sent": {str(seat): each for seat, each in sent.items()},
        }

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """Bandwidth and round-trip time of every ordered pair, the better one of its tries."""
        labels = host_labels(cluster)
        again = measured_again(cluster, self.name)
        for pair, first in measures_of(cluster, self.name, _FIRST).items():
            where = Where(links=link_names(labels, [pair]))
            tries = [first, *([again[pair]] if pair in again else [])]
            rates = [(t.rate * 8e-9, "burst" in t.starved) for t in tries if t.rate is not None]
            rtts = [(t.rtt_us, "echo" in t.starved) for t in tries if t.rtt_us is not None]
            if rates:
                rate, counts = _best(rates, max)
                yield Figure("bandwidth", rate, where, "Gbit/s", "higher", counts=counts)
            if rtts:
                rtt, counts = _best(rtts, min)
                yield Figure("round-trip time", rtt, where, "µs", "lower", _LEAST_US, counts)

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings that both tries confirm."""
        return _Judge(cluster).findings()

    def sections(self, cluster: Cluster) -> Iterator[HostLink]:
        """Measured rates and times of each try."""
        for round_name in (_FIRST, *rounds_held(cluster, self.name)):
            for host, partner, record in by_partner(cluster, self.name, round_name, "sent"):
                sent = mapping(record)
                if sent and "problem" not in sent:
                    stood = sent.get("stalled") in ("echo", "burst")
                    yield HostLink(
                        host.id,
                        partner.id,
                        rtt_us=number(sent.get("rtt_us")),
                        rate=0.0 if stood else number(sent.get("rate")),
                    )


def _best(
    tries: Sequence[tuple[float, bool]], better: Callable[[Iterable[float]], float]
) -> tuple[float, bool]:
    """The best value of several tries, and whether the CPU was idle when it was measured.

    Args:
        tries: value, and whether the CPU was busy.
        better: `max` or `min`.
    """
    idle = [value for value, busy in tries if not busy]
    return better(idle or [value for value, _ in tries]), bool(idle)


class _Judge:
    """The findings from both tries, and their texts."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        reports = list(cluster.facts(Links.name, _FIRST))
        self.facts = {rank.seat: facts for rank, facts in reports}
        self.labels = host_labels(cluster)
        self.first = measures_of(cluster, Links.name, _FIRST)
        self.second = measured_again(cluster, Links.name)
        self.reports = [*reports, *reports_again(cluster, Links.name)]
        self.result: Confirmed = confirm(
            self.first,
            self.second,
            suspects(cluster, Links.name, _FIRST),
            line_rates(cluster, Links.name, _FIRST),
        )
        # Where InfiniBand carries the data, this interface carries the bootstrap alone.
        carries = all(facts["carries_data"] for facts in self.facts.values())
        self.speed = Severity.WARN if carries else Severity.INFO

    def findings(self) -> Iterator[Finding]:
        found = self.result
        bad = {pair for cause in found.slow for pair in cause.pairs}
        lossy = {receiver for _, receiver in read_losses(self.cluster).pairs}
        reports = [(rank, facts) for rank, facts in self.reports if rank.seat not in lossy]
        yield from judge_drops(reports, {receiver for _, receiver in bad})
        yield from judge_paths(self.reports, self.labels)
        for cause in found.late:
            words = f"{span(self.values(cause, 'rtt_us'), round_trip)}; {self.usual('rtt_us')}"
            yield self.finding(LATENCY_HIGH, cause, words, self.speed)
        for cause in found.slow:
            words = f"{span(self.values(cause, 'rate'), bits_text)} {WAYS[cause.way]}"
            yield self.finding(
                HOST_SLOW if cause.is_host else LINK_SLOW,
                cause,
                f"{words}, measured twice; {self.usual('rate')}{self.lines()}",
                Severity.INFO if cause in found.weak else self.speed,
            )
        for kind, pairs in ((LINK_SLOW, found.starved.slow), (LATENCY_HIGH, found.starved.late)):
            if pairs:
                yield Finding(
                    kind.variant(title=_WHILE_BUSY, why=_NOT_KNOWN),
                    "measured while the CPU of one end was busy with other work: the cause may be "
                    "the CPU, not the link",
                    Where(links=link_names(self.labels, pairs)),
                    self.evidence(pairs),
                    fix="run again when nothing else runs on these hosts",
                    severity=Severity.INFO,
                    confidence=Confidence.POSSIBLE,
                )

    def finding(self, kind: Kind, cause: Cause[int], words: str, severity: Severity) -> Finding:
        """The finding for one cause; a comparison alone is never certain."""
        seats = cause.ends if cause.is_host else ()
        nics = sorted({self.facts[seat]["interface"] for seat in cause.ends})
        if cause.is_host:
            ends = [(self.labels[end], {"NIC": self.facts[end]["interface"]}) for end in cause.ends]
            fix = fill_each(HOST_LATE if kind is LATENCY_HIGH else kind.fix, ends)
        else:
            caller, called = min(cause.pairs)
            address = self.facts[called]["address"]
            fix = fill(kind.fix, on=(self.labels[caller],), ADDRESS=address)
        held = [each for each in shaped_at(self.cluster, cause.ends) if each[1] in nics]
        words += in_words(held)
        most = 2 * len(cause.pairs) > len(self.first)
        unsure = most or cause.confidence is Confidence.POSSIBLE
        return Finding(
            kind,
            words,
            Where(
                hosts=tuple(self.labels[seat] for seat in seats),
                links=() if seats else link_names(self.labels, cause.pairs),
                interfaces=tuple(nics) if seats else (),
            ),
            self.evidence(cause.pairs),
            fix=without_shapers(held, fix) if held else fix,
            severity=severity,
            confidence=Confidence.POSSIBLE if unsure else Confidence.LIKELY,
        )

    def values(self, cause: Cause[int], name: str) -> list[float]:
        return sorted(getattr(self.result.best[pair], name) or 0.0 for pair in cause.pairs)

    def usual(self, name: str) -> str:
        """The least and the greatest value of the links that no finding names."""
        found = self.result
        bad = {p for cause in (*found.slow, *found.late) for p in cause.pairs}
        values = [getattr(m, name) for pair, m in found.best.items() if pair not in bad]
        good = sorted(value for value in values if value is not None)
        show = bits_text if name == "rate" else round_trip
        return f"the other links: {span(good, show)}" if good else "there is no other link"

    def lines(self) -> str:
        """Line rates, if there are only two hosts to compare."""
        known = [facts["nic_mbps"] for facts in self.facts.values()]
        if len(known) != 2 or None in known:
            return ""
        return f"; line rate {span(sorted(each * 125_000.0 for each in known), bits_text)}"

    def evidence(self, pairs: Iterable[tuple[int, int]]) -> dict[str, Any]:
        def shown(measure: Measure | None) -> dict[str, Any] | None:
            if measure is None:
                return None
            return {**measure._asdict(), "starved": sorted(measure.starved)}

        pairs = sorted(pairs)
        return {
            "links": [
                {
                    "from": self.labels[a],
                    "to": self.labels[b],
                    "first": shown(self.first.get((a, b))),
                    "again": shown(self.second.get((a, b))),
                }
                for a, b in pairs[:5]
            ],
            "load average": {
                self.labels[seat]: self.facts[seat]["load"]
                for seat in sorted({end for pair in pairs for end in pair})
            },
        }
