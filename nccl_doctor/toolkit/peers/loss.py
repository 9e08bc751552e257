"""Roads between hosts that lose packets, from the calls that the hosts made. Pure functions.

`calm` counts on each connection what was sent and what was lost. What the calls of check `firewall`
make doubtful, check `loss` measures again; what lost segments twice is blamed, or so many at once
that no second try is needed: on such a road it would take long, and might not come to its end. What
the connections of the store have lost counts with the first calls, where it proves a road lossy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from nccl_doctor.model.cluster import Cluster, Rank
from nccl_doctor.toolkit.blame import Cause, blame_links
from nccl_doctor.toolkit.peers.matrix import PeerCall, read_calls
from nccl_doctor.toolkit.peers.standing import roads_seen

FIRST, AGAIN = "calls", "again"
"""Rounds of check `loss`; the first one is held only where check `firewall` did not call."""
LOSSY = 0.005
MANY_LOST = 5
"""Less may be chance; TCP between hosts of one cluster loses nothing on an idle link."""
HEAVY = 0.1
"""From here on most exchanges of a job wait for a segment that was lost twice or more in a row."""
_SUSPECT_LOST = 2
_TOLD_LOST, _TOLD_SHARE = 6, 0.15
"""Of a connection of the store: it has sent little yet, where each segment takes seconds."""
_CLEAN = 20
"""Segments on a connection of the store from which on none lost means a clean road."""
_PROVEN_LOST = 10
"""With `HEAVY`, in a single try; some seconds without a link lose all of a few groups, and less."""
_MOST_HOSTS, _DOUBTFUL = 16, 12
"""Hosts that are measured again, and those of them that are ends of doubtful roads at most."""

_READ = ("clock", "firewall", "loss", "uplink")
"""Checks whose facts tell of losses."""

Pair = tuple[int, int]
"""Seats of (sender, receiver)."""
Report = tuple[Rank, Mapping[str, Any]]
"""(observer, facts), with those of `calls.Matrix`."""


@dataclass(frozen=True)
class LostSegments:
    """Small segments sent from one host to another, and those that were lost."""

    segments: int = 0
    lost: int = 0

    def __add__(self, other: LostSegments) -> LostSegments:
        return LostSegments(self.segments + other.segments, self.lost + other.lost)

    @property
    def share(self) -> float:
        """Lost part, 0 to 1."""
        return self.lost / self.segments if self.segments else 0.0


@dataclass(frozen=True)
class Losses:
    """Losses of every road on which hosts called each other.

    Attributes:
        first, again: pair → what was lost in each of the tries.
        causes: of what was lost in both tries, or proven by the first; hosts first.
        interfaces: seat → the interfaces at which the others called its host.
    """

    first: Mapping[Pair, LostSegments]
    again: Mapping[Pair, LostSegments]
    causes: tuple[Cause[int], ...]
    interfaces: Mapping[int, Set[str]]

    @property
    def pairs(self) -> frozenset[Pair]:
        """Roads that lose packets, in this direction."""
        return frozenset(pair for cause in self.causes for pair in cause.pairs)

    def of(self, cause: Cause[int]) -> LostSegments:
        """Losses of all its roads together."""
        return sum((_both(pair, self.first, self.again) for pair in cause.pairs), LostSegments())


def read_losses(cluster: Cluster) -> Losses:
    """Losses between the hosts of a cluster, by checks `firewall` and `loss`.

    It looks only at the hosts that tried again, or that lost so much at first that none did.
    """
    return cluster.once(read_losses, _READ, lambda: _read_losses(cluster))


def _read_losses(cluster: Cluster) -> Losses:
    standing = _standing(cluster)
    reports = list(cluster.facts("loss", AGAIN))
    if reports:
        seats = {rank.seat for rank, _ in reports}
        reports += _called_in_vain(cluster, seats)
        seats = {rank.seat for rank, _ in reports}
    else:
        called = {rank.seat for each in first_reports(cluster) for rank, _ in each}
        called.update(end for pair in standing for end in pair)
        seats = set(_compared(_doubtful(cluster, standing)[0], called))
    if not seats:
        return Losses({}, {}, (), {})
    calls = [
        call
        for each in first_reports(cluster)
        for call in _good_calls((r for r in each if r[0].seat in seats), cluster.backend)
    ]
    tried_again = _good_calls(reports, cluster.backend)
    first, again = _lost(calls), _lost(tried_again)
    told = {pair for pair, each in standing.items() if each.lost}
    agreed = {pair for pair in told if first.get(pair, LostSegments()).lost >= MANY_LOST}
    for pair, lost in standing.items():
        if lost.lost or pair not in first:
            first[pair] = first.get(pair, LostSegments()) + lost
    good = {pair for pair, each in first.items() if each.lost < _SUSPECT_LOST}
    lossy = set(_lossy(first, again, told, agreed))
    blame = blame_links(good | again.keys() | lossy, lossy)
    nics: dict[int, set[str]] = {}
    for call in (*calls, *tried_again):
        nics.setdefault(call.listener, set()).add(call.interface)
    return Losses(first, again, blame.causes, nics)


def _called_in_vain(cluster: Cluster, reported: Set[int]) -> list[Report]:
    """Facts of those that took part in the second try and did not get to its end, without calls of
    their own: what the others lost on the way to them counts.
    """
    began = {each.rank.seat for each in cluster.evidence("loss", AGAIN)} - reported
    first = {rank.seat: (rank, facts) for each in first_reports(cluster) for rank, facts in each}
    known = (first[seat] for seat in sorted(began) if seat in first)
    return [(rank, {**facts, "peers": {}}) for rank, facts in known]


def hosts_to_try_again(cluster: Cluster, seats: Iterable[int]) -> tuple[int, ...]:
    """Hosts that call each other once more; none where nothing is doubtful, or all is proven.

    Args:
        cluster: after the first calls.
        seats: of one participant of each host.

    Returns: some of the seats: the ends of doubtful roads, those of most of them first, and others
    to compare them with.
    """
    doubtful, unproven = _doubtful(cluster, _standing(cluster))
    return _compared(doubtful, seats) if unproven else ()


def _compared(doubtful: Counter[int], seats: Iterable[int]) -> tuple[int, ...]:
    """The ends of doubtful roads, those of most of them first, and others to compare them with."""
    if not doubtful:
        return ()
    worst_first = sorted(seats, key=lambda seat: (-doubtful[seat], seat))
    chosen = [seat for seat in worst_first if doubtful[seat]][:_DOUBTFUL]
    others = [seat for seat in reversed(worst_first) if seat not in chosen]
    return tuple(sorted([*chosen, *others[: _MOST_HOSTS - len(chosen)]]))


def _standing(cluster: Cluster) -> dict[Pair, LostSegments]:
    """Losses of the connections of the store, on the roads that they prove lossy and on those that
    they show clean; none where they prove nothing.
    """
    seen = {pair: LostSegments(*each) for pair, each in roads_seen(cluster).items()}
    lossy = {pair: each for pair, each in seen.items() if _is_told(each)}
    if not lossy:
        return {}
    clean = {p: each for p, each in seen.items() if not each.lost and each.segments >= _CLEAN}
    return lossy | clean


def _doubtful(cluster: Cluster, standing: Mapping[Pair, LostSegments]) -> tuple[Counter[int], int]:
    """Seat → number of roads from and to its host on which the first calls lost segments; and the
    number of roads for which a second try is needed.

    Of a thousand hosts with a million roads, only those that lost something are read in full.
    """
    lossy = [pair for pair, each in standing.items() if each.lost]
    found = Counter(end for pair in lossy for end in pair)
    unproven = 0
    for reports in map(list, first_reports(cluster)):
        of_seat = {rank.seat: (rank, facts) for rank, facts in reports}
        for rank, facts in reports:
            for text, entries in facts.get("peers", {}).items():
                if int(text) in of_seat and any(map(_has_lost, entries)):
                    other, theirs = of_seat[int(text)]
                    ends = [(rank, {**facts, "peers": {text: entries}})]
                    ends.append((other, {**theirs, "peers": {}}))
                    for pair, lost in _lost(_good_calls(ends, cluster.backend)).items():
                        if lost.lost >= _SUSPECT_LOST:
                            found.update(pair)
                            known = standing.get(pair, LostSegments())
                            unproven += not (known.lost or _is_proven(lost + known))
    return found, unproven


def _has_lost(entry: Mapping[str, Any]) -> bool:
    attempts = entry["attempts"]
    return bool(attempts) and attempts[-1].get("lost", 0) >= _SUSPECT_LOST


def loses_heavily(cluster: Cluster) -> bool:
    """True if a road or a host loses so much that every further exchange of hosts takes seconds."""
    losses = read_losses(cluster)
    return any(losses.of(cause).share >= HEAVY for cause in losses.causes)


def roads_are_slow(cluster: Cluster) -> bool:
    """True if roads lose packets, or take only some of several new connections: groups then need
    longer to form, as TCP waits for what was lost.
    """
    return cluster.once(roads_are_slow, _READ, lambda: _roads_are_slow(cluster))


def _roads_are_slow(cluster: Cluster) -> bool:
    few = any(
        call.shortfall
        for reports in first_reports(cluster)
        for call in _good_calls(reports, cluster.backend)
    )
    return few or bool(read_losses(cluster).causes)


def lossy_data_roads(cluster: Cluster) -> frozenset[frozenset[int]]:
    """Ids of both hosts of each road that loses packets, if the data of the job takes it.

    What InfiniBand carries does not.
    """
    losses = read_losses(cluster)
    reports = [report for each in first_reports(cluster) for report in each]
    if cluster.backend == "nccl" and all(f.get("nccl_data") != "sockets" for _, f in reports):
        return frozenset()
    hosts = {rank.seat: rank.host.id for rank in cluster.present}
    return frozenset(frozenset(hosts[end] for end in pair) for pair in losses.pairs)


def first_reports(cluster: Cluster) -> tuple[Iterable[Report], Iterable[Report]]:
    """Reports of the first calls, by whichever check made them."""
    return cluster.facts("loss", FIRST), cluster.facts("firewall", "matrix")


def _good_calls(reports: Iterable[Report], backend: str) -> list[PeerCall]:
    """Calls to addresses that the job would use, on which something passed."""
    return [call for call in read_calls(reports, backend) if call.job and call.outcome == "ok"]


def _lost(calls: Iterable[PeerCall]) -> dict[Pair, LostSegments]:
    """Losses of each pair, on the worst of its roads."""
    found: dict[Pair, LostSegments] = {}
    for call in calls:
        last = call.attempts[-1]
        each = LostSegments(int(last.get("segments", 0)), int(last.get("lost", 0)))
        found[call.pair] = max(found.get(call.pair, LostSegments()), each, key=_by_lost)
    return found


def _by_lost(each: LostSegments) -> tuple[int, int]:
    return each.lost, each.segments


def _lossy(
    first: Mapping[Pair, LostSegments],
    again: Mapping[Pair, LostSegments],
    told: Set[Pair],
    agreed: Set[Pair],
) -> Iterator[Pair]:
    """The pairs that lost segments when tried again, and many in total; or very many at first, and
    were not tried again, or are `told` by the connections of the store, or `agreed` on by these and
    by the calls.

    Where answers are lost, segments are sent again that had arrived. The other side reports them,
    and some of these reports are lost as well: of what looks lost on the way there, a share of up
    to the square of the loss on the way back is none.
    """
    for pair in first.keys() | again.keys():
        total = _both(pair, first, again)
        back = _both(pair[::-1], first, again).share
        if pair in again:
            many = again[pair].lost >= _SUSPECT_LOST and total.lost >= MANY_LOST
        else:
            many = _is_proven(total) or (pair in told and total.share >= HEAVY) or pair in agreed
        if many and total.share >= LOSSY and total.share > back**2:
            yield pair


def _is_told(lost: LostSegments) -> bool:
    """True if a connection of the store has lost so much that its road is lossy."""
    return _is_proven(lost) or (lost.lost >= _TOLD_LOST and lost.share >= _TOLD_SHARE)


def _is_proven(lost: LostSegments) -> bool:
    """True if so much was lost in one try that a second one would only take longer."""
    return lost.lost >= _PROVEN_LOST and lost.share >= HEAVY


def _both(
    pair: Pair, first: Mapping[Pair, LostSegments], again: Mapping[Pair, LostSegments]
) -> LostSegments:
    return first.get(pair, LostSegments()) + again.get(pair, LostSegments())
