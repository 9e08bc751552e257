"""Calls between every ordered pair of hosts, sorted by fault. Pure functions.

The names of an outcome are those of `dial.Dial` and `echo.Call`, and `own-address`: the address of
the other host is one of the caller's own, so no call was made.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nccl_doctor.model.cluster import Cluster, Rank
from nccl_doctor.model.findings import Confidence
from nccl_doctor.toolkit.blame import LinkBlame, blame_links
from nccl_doctor.toolkit.hosts import network_of
from nccl_doctor.toolkit.peers.pairs import items, mapping, number

Pair = tuple[int, int]
"""Seats of (caller, listener)."""

SILENT = ("dropped", "no-neighbour")
"""Outcomes of calls whose packets a host may have dropped; a filter drops ARP requests too."""
STRICT = 1
"""Value of rp_filter: packets count only if an answer would leave where they came in."""
_TWICE = 2
_NO_ROUTE = ("unreachable", "turned-back")
_ARRIVES = ("ok", "mtu")
"""Outcomes of a call that reached the other host, if only with small packets."""
_CONNECTED = ("intercepted", "mtu")
"""Outcomes of a call that was connected, and on which something was awaited in vain."""
_WORDS = {
    "dropped": "no answer",
    "refused": "connection refused",
    "rejected": "rejected by a firewall",
    "unreachable": "network is unreachable",
    "no-neighbour": "no host answers for the address on the local network",
    "turned-back": "a router on the way answers that it cannot deliver",
    "own-address": "the caller has the same address",
    "mtu": "64 bytes came back, but 1 MiB stopped for 3 s",
}


class PeerCall(NamedTuple):  # as quick to make as can be: a large cluster has many
    """The calls of one host to one address of another.

    `job` is True if the job's own backend would use the address. `attempts` are `Call`s as plain
    data; `outcome` is their result, as of `outcome_of`. `route` is one of the caller that leads
    nowhere, if that is why. `fixed`: hardware address and interface of an entry of the caller's
    neighbour table that somebody made, and that leads to another machine; empty if there is none.
    `carries`: bytes of the largest packets that pass, where larger ones stop, and `mtu` of the
    caller's interface; 0 if that was not tried. `used`: False where a call failed, or fewer came
    about than wanted, that the job does not make: it connects from the other side alone.
    """

    caller: int
    listener: int
    address: str
    interface: str
    port: int
    source: str | None
    job: bool
    attempts: Sequence[Mapping[str, Any]]
    outcome: str
    route: str = ""
    fixed: tuple[str, ...] = ()
    carries: int = 0
    mtu: int = 0
    used: bool = True

    @property
    def pair(self) -> Pair:
        """Seats of both ends."""
        return self.caller, self.listener

    @property
    def words(self) -> str:
        """The result as text."""
        detail = str(self.attempts[-1].get("detail", ""))
        if self.outcome in ("error", "intercepted"):
            return detail
        if self.outcome == "mtu" and detail.startswith("one packet"):
            return f"64 bytes came back, but {detail}"
        return _WORDS.get(self.outcome, self.outcome)

    @property
    def moved(self) -> int:
        """Bytes of the large echo that arrived in the direction that stopped, for `mtu`."""
        last = self.attempts[-1]
        return int(last.get("downloaded" if last.get("stalled") == "download" else "uploaded", 0))

    @property
    def shortfall(self) -> tuple[int, int] | None:
        """(came about, wanted) of many connections at once, if fewer came about than wanted."""
        last = self.attempts[-1]
        wanted, stood = int(last.get("wanted", 0)), int(last.get("stood", 0))
        return (stood, wanted) if stood < wanted else None

    @property
    def lost(self) -> int:
        """Small segments lost from the caller to the listener."""
        return int(self.attempts[-1].get("lost", 0))

    @property
    def seen(self) -> str:
        """Address from which the listener saw the call come, if it is not the caller's socket's."""
        return str(self.attempts[-1].get("seen", ""))

    @property
    def stuck(self) -> Pair:
        """The ordered pair of hosts in whose direction packets are lost.

        That of the call, but for `mtu` the one in which large packets are lost.
        """
        if self.attempts[-1].get("stalled") == "download":
            return self.listener, self.caller
        return self.pair

    @property
    def kind(self) -> str:
        """The step to follow through a firewall: `connect`, `upload` or `download`."""
        return str(self.attempts[-1].get("stalled") or "connect")

    def shown(self, names: Mapping[int, str]) -> dict[str, Any]:
        """The call as evidence, with the names of both hosts."""
        return {
            "from": names[self.caller],
            "to": names[self.listener],
            "address": self.address,
            "port": self.port,
            "interface": self.interface,
            "source": self.source,
            "attempts": [dict(attempt) for attempt in self.attempts],
        }


def outcome_of(attempts: Sequence[Mapping[str, Any]]) -> str:
    """The result of calls to one address: that of the last one; `untested` where there is none, or
    a failure that was not confirmed.
    """
    if not attempts:
        return "untested"
    last = str(attempts[-1]["outcome"])
    sure = last in ("ok", "own-address") or len(attempts) >= _TWICE
    return last if sure else "untested"


def sure_attempts(
    entry: Mapping[str, Any], listener: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    """The attempts to call a listener; none where it read too late what the caller said.

    Args:
        entry: of the caller, with `attempts`, and `source` if they failed.
        listener: facts of the other host.
    """
    attempts: Sequence[Mapping[str, Any]] = entry["attempts"]
    return () if listener.get("late") and unread_s(entry, listener) else attempts


def unread_s(entry: Mapping[str, Any], listener: Mapping[str, Any]) -> float:
    """Seconds for which the host of a listener had what the caller said, and did not read it, while
    the caller waited in vain: such a call says nothing of the road. Else 0.

    Args:
        entry: of the caller, as for `sure_attempts`; from any version.
        listener: facts of the other host, with `late` as `Visitors.late` returns it.
    """
    last = mapping((items(entry.get("attempts")) or [{}])[-1])
    if last.get("outcome") not in _CONNECTED:
        return 0.0
    source = str(entry.get("source") or "").partition("%")[0]
    return number(mapping(listener.get("late")).get(source)) or 0.0


def read_calls(reports: Iterable[tuple[Rank, Mapping[str, Any]]], backend: str) -> list[PeerCall]:
    """Calls between hosts that both reported, and do not share one network: node ranks of one
    machine reach each other inside it.

    Args:
        reports: (observer, facts) with `peers` (seat as text → entries) and `nccl_data`.
        backend: the job's.
    """
    told = list(reports)
    facts = {rank.seat: report for rank, report in told}
    network = {rank.seat: network_of(rank.host) for rank, _ in told}
    wanted = {sockets: job_roles(backend, sockets) for sockets in (True, False)}
    calls = []
    for caller, report in facts.items():
        for text, entries in report.get("peers", {}).items():
            listener = int(text)
            if listener not in facts or network[listener] == network[caller]:
                continue
            called = facts[listener]
            roles = wanted[called.get("nccl_data") == "sockets"]
            for_job = [not roles.isdisjoint(entry["roles"]) for entry in entries]
            some = any(for_job)
            for entry, is_for_job in zip(entries, for_job, strict=True):
                attempts = sure_attempts(entry, called)
                outcome = outcome_of(attempts)
                if outcome == "untested":
                    continue
                calls.append(
                    PeerCall(
                        caller,
                        listener,
                        entry["address"],
                        entry["interface"],
                        entry["port"],
                        entry.get("source"),
                        is_for_job or not some,
                        attempts,
                        outcome,
                        str(entry.get("route", "")),
                        tuple(map(str, entry.get("fixed", ()))),
                        int(entry.get("carries", 0)),
                        int(entry.get("mtu", 0)),
                    )
                )
    return _by_gloo(calls) if backend == "gloo" else calls


def gloo_calls(own: str, other: str) -> bool | None:
    """True if gloo connects from one address to the other, rather than back; None where their
    families differ or one is not known.

    Of two ranks the one whose address is the greater, byte by byte, connects, with lazy connections
    too: in gloo's transport/tcp/pair.cc (`Pair::connect`), since May 2023 (torch 2.1) in
    transport/tcp/device.cc (`isInitiator`), and in transport/uv/device.cc.
    """
    try:
        ends = [ipaddress.ip_address(end.partition("%")[0]) for end in (own, other)]
    except ValueError:
        return None
    first, second = ends[0].packed, ends[1].packed
    return first > second if len(first) == len(second) and first != second else None


def _by_gloo(calls: Sequence[PeerCall]) -> list[PeerCall]:
    """The calls, with `used`; an own address is the one that the others call."""
    own: dict[tuple[int, str], str] = {}
    for call in calls:
        if call.job:
            own[call.listener, call.interface] = call.address
            own.setdefault((call.listener, ""), call.address)

    def is_used(call: PeerCall) -> bool:
        mine = own.get((call.caller, call.interface)) or own.get((call.caller, ""), "")
        return gloo_calls(mine, call.address) is not False

    return [
        call if call.outcome == "ok" and not call.shortfall else call._replace(used=is_used(call))
        for call in calls
    ]


def first_calls(cluster: Cluster) -> tuple[Sequence[PeerCall], Sorted]:
    """The calls of check `firewall` as the run began, and the same sorted by fault."""
    return cluster.once(first_calls, ("firewall",), lambda: _first_calls(cluster))


def _first_calls(cluster: Cluster) -> tuple[Sequence[PeerCall], Sorted]:
    calls = read_calls(cluster.facts("firewall", "matrix"), cluster.backend)
    return calls, sort_calls(calls)


def filtered_ways(
    reports: Iterable[tuple[Rank, Mapping[str, Any]]],
) -> list[tuple[Rank, Mapping[str, Any]]]:
    """(host, way) of packets that the reverse path filter of a host drops, by its own kernel: the
    answer would leave by another interface. Without any way back, no filter is to blame.

    Args:
        reports: (observer, facts) of round `rules` of check `firewall`.
    """
    return [
        (rank, way)
        for rank, facts in reports
        for way in facts.get("ways", ())
        if way["filter"] == STRICT and not way["taken"]
        if way["leaves"] not in ("", way["interface"])
    ]


def job_roles(backend: str, sockets: bool) -> set[str]:
    """Roles of the addresses that a job of this backend uses."""
    if "nccl" not in backend:
        return {"gloo", "fallback"}
    return {"nccl-bootstrap", "fallback"} | ({"nccl-sockets"} if sockets else set())


@dataclass(frozen=True)
class Sorted:
    """Failed calls by fault; `bad` are the pairs of those that got nowhere.

    `unroutable`: another address of the same host can be reached, or the address is the caller's
    own too. `one_way`: one direction of the host or link to blame fails, and the other one is seen
    to work. `stuck` are the calls whose large packets are lost, `large_blame` explains these.
    """

    tested: frozenset[Pair] = frozenset()
    no_route: tuple[PeerCall, ...] = ()
    blocked: tuple[PeerCall, ...] = ()
    one_way: tuple[PeerCall, ...] = ()
    intercepted: tuple[PeerCall, ...] = ()
    unroutable: tuple[PeerCall, ...] = ()
    stuck: tuple[PeerCall, ...] = ()
    bad: frozenset[Pair] = frozenset()
    large_blame: LinkBlame[int] = field(default_factory=LinkBlame)
    working: Mapping[Pair, PeerCall] = field(default_factory=dict)

    def blame(self, explained: Set[Pair] = frozenset()) -> LinkBlame[int]:
        """Blame for the bad pairs, by comparison, without those that something else explains."""
        return blame_links(self.tested - explained, self.bad - explained)

    @property
    def by_code(self) -> dict[str, tuple[PeerCall, ...]]:
        """Finding code → the calls that failed in this way, the most telling faults first."""
        return {
            "peer-no-route": self.no_route,
            "peer-blocked": self.blocked,
            "peer-one-way": self.one_way,
            "peer-intercepted": self.intercepted,
            "mtu-blackhole": self.stuck,
            "interface-unroutable": self.unroutable,
        }

    @property
    def failed(self) -> tuple[PeerCall, ...]:
        """Every call that a local rule may explain."""
        return (*self.no_route, *self.blocked, *self.one_way, *self.intercepted, *self.stuck)


def sort_calls(calls: Iterable[PeerCall]) -> Sorted:
    """Sort calls by fault, and find the bad hosts and bad links."""
    pairs: dict[Pair, list[PeerCall]] = {}
    for call in calls:
        pairs.setdefault(call.pair, []).append(call)
    no_route: list[PeerCall] = []
    blocked: list[PeerCall] = []
    intercepted: list[PeerCall] = []
    unroutable: list[PeerCall] = []
    stuck: list[PeerCall] = []
    working: dict[Pair, PeerCall] = {}
    for pair, group in pairs.items():
        well = [call for call in group if call.outcome in _ARRIVES]
        if well:
            working[pair] = max(well, key=lambda call: (call.outcome == "ok", call.job))
        for call in group:
            if call.outcome == "ok":
                continue
            if call.outcome == "mtu":
                stuck += [call] if call.job else []
            elif call.outcome == "intercepted":
                intercepted += [call] if call.job else []
            elif well or call.outcome == "own-address":
                unroutable.append(call)
            elif call.job:
                (no_route if call.outcome in _NO_ROUTE else blocked).append(call)
    # A host without a route to another cannot answer it either: the call from there is dropped.
    roadless = {call.pair for call in no_route}
    no_route += [call for call in blocked if call.pair[::-1] in roadless]
    blocked = [call for call in blocked if call.pair[::-1] not in roadless]
    bad = {call.pair for call in (*no_route, *blocked, *intercepted)}
    bad |= {call.pair for call in unroutable if call.job and call.pair not in working}
    one_way = _one_way(blame_links(pairs, bad), pairs.keys() - bad)
    return Sorted(
        tested=frozenset(pairs),
        no_route=tuple(no_route),
        blocked=tuple(call for call in blocked if call.pair not in one_way),
        one_way=tuple(call for call in blocked if call.pair in one_way),
        intercepted=tuple(intercepted),
        unroutable=tuple(unroutable),
        stuck=tuple(stuck),
        bad=frozenset(bad),
        large_blame=_blame_for_large(pairs, stuck),
        working=working,
    )


def _one_way(blame: LinkBlame[int], works: Set[Pair]) -> set[Pair]:
    one: set[Pair] = set()
    both: set[Pair] = set()
    for cause in blame.causes:
        if cause.way == "both":
            both |= cause.pairs
        elif any(pair[::-1] in works for pair in cause.pairs):
            one |= cause.pairs
    return one - both


def _blame_for_large(pairs: Mapping[Pair, list[PeerCall]], stuck: list[PeerCall]) -> LinkBlame[int]:
    moved: set[Pair] = set()
    for pair, group in pairs.items():
        for call in group:
            if call.job and call.outcome == "ok":
                moved |= {pair, pair[::-1]}
            elif call.job and call.outcome == "mtu" and call.stuck != pair:
                moved.add(pair)
    return blame_links(moved, {call.stuck for call in stuck})


def unroutable_hosts(
    calls: Sequence[PeerCall], all_calls: Iterable[PeerCall]
) -> tuple[set[int], Confidence]:
    """Hosts whose choice of an interface explains these calls, and the confidence.

    A host that offers an address which no host reaches, if at least two tried or the address cannot
    be for others (it is the caller's own too, or there is no route to it). If some hosts reach it,
    the bad hosts or links are found by comparing interfaces of that name.
    """
    bad = {_nics(call) for call in calls}
    names = {call.interface for call in calls}
    well = {
        _nics(call) for call in all_calls if call.interface in names and call.outcome in _ARRIVES
    }
    found = set()
    for end in {listener for _, listener in bad} - {listener for _, listener in well}:
        callers = {caller for caller, listener in bad if listener == end}
        outcomes = {call.outcome for call in calls if _nics(call)[1] == end}
        if len(callers) >= _TWICE or outcomes <= {"own-address", "unreachable"}:
            found.add(end[0])
    if found:
        return found, Confidence.CERTAIN
    blame = blame_links(well, bad)
    hosts = [cause for cause in blame.causes if cause.is_host]
    sure = all(cause.confidence is Confidence.CERTAIN for cause in hosts or blame.causes)
    return {seat for seat, _ in blame.hosts}, Confidence.CERTAIN if sure else Confidence.LIKELY


def _nics(call: PeerCall) -> tuple[tuple[int, str], tuple[int, str]]:
    """Both ends of a call, each as the seat of a host and the name of the interface."""
    return (call.caller, call.interface), (call.listener, call.interface)
