"""What calls between every ordered pair of hosts say, sorted by fault. Pure functions.

The words of an outcome are those of `net.Dial` and `echo.Call`, and `own-address`: the address of
the other host is one of the caller's own, so no call was made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.cluster import Rank
from nccl_doctor.tools.blame import blame_links

Pair = tuple[int, int]
"""Seats of (caller, listener)."""

_TWICE = 2
_WORDS = {
    "dropped": "no answer within 3 s",
    "refused": "connection refused",
    "rejected": "rejected by a firewall",
    "unreachable": "network is unreachable",
    "no-neighbour": "nobody answers for the address on the local network",
    "own-address": "the caller has the same address",
    "mtu": "64 bytes came back, of 1 MiB nothing moved for 3 s",
}


@dataclass(frozen=True)
class PeerCall:
    """The calls of one host to one address of another.

    `job` is True where the job's own backend would use the address. `attempts` are `Call`s as
    plain data; the last one is the result.
    """

    caller: int
    listener: int
    address: str
    interface: str
    port: int
    source: str | None
    job: bool
    attempts: Sequence[Mapping[str, Any]]

    @property
    def pair(self) -> Pair:
        """Seats of both ends."""
        return self.caller, self.listener

    @property
    def outcome(self) -> str:
        """The result, or `untested`: none, or a failure that was not confirmed."""
        if not self.attempts:
            return "untested"
        last = str(self.attempts[-1]["outcome"])
        sure = last in ("ok", "own-address") or len(self.attempts) >= _TWICE
        return last if sure else "untested"

    @property
    def words(self) -> str:
        """The result, for people."""
        if self.outcome in ("error", "intercepted"):
            return str(self.attempts[-1]["detail"])
        return _WORDS.get(self.outcome, self.outcome)

    @property
    def moved(self) -> int:
        """For `mtu`: bytes of the large echo that arrived in the direction that stood still."""
        last = self.attempts[-1]
        return int(last.get("downloaded" if last.get("stalled") == "download" else "uploaded", 0))

    @property
    def stuck(self) -> Pair:
        """For `mtu`: the ordered pair of hosts in whose direction large packets are lost."""
        if self.attempts[-1].get("stalled") == "download":
            return self.listener, self.caller
        return self.pair

    @property
    def kind(self) -> str:
        """What to follow through a firewall: `connect`, `upload` or `download`."""
        return str(self.attempts[-1].get("stalled") or "connect")

    def shown(self, names: Mapping[int, str]) -> dict[str, Any]:
        """As evidence, with the names of both hosts."""
        return {
            "from": names[self.caller],
            "to": names[self.listener],
            "address": self.address,
            "port": self.port,
            "interface": self.interface,
            "source": self.source,
            "attempts": [dict(attempt) for attempt in self.attempts],
        }


def read_calls(reports: Iterable[tuple[Rank, Mapping[str, Any]]], backend: str) -> list[PeerCall]:
    """Calls between hosts that both reported; a host that was killed meanwhile tests nobody.

    Args:
        reports: (observer, facts) with `peers` (seat as text → entries) and `nccl_data`.
        backend: the job's.
    """
    facts = {rank.seat: dict(report) for rank, report in reports}
    calls = []
    for caller, report in facts.items():
        for text, entries in report.get("peers", {}).items():
            listener = int(text)
            if listener not in facts:
                continue
            sockets = facts[listener].get("nccl_data") == "sockets"
            wanted = job_roles(backend, sockets)
            some = any(wanted & set(entry["roles"]) for entry in entries)
            for entry in entries:
                call = PeerCall(
                    caller,
                    listener,
                    entry["address"],
                    entry["interface"],
                    entry["port"],
                    entry.get("source"),
                    bool(wanted & set(entry["roles"])) or not some,
                    entry["attempts"],
                )
                if call.outcome != "untested":
                    calls.append(call)
    return calls


def job_roles(backend: str, sockets: bool) -> set[str]:
    """Roles of the addresses that a job of this backend uses."""
    if "nccl" not in backend:
        return {"gloo", "fallback"}
    return {"nccl-bootstrap", "fallback"} | ({"nccl-sockets"} if sockets else set())


@dataclass(frozen=True)
class Sorted:
    """Failed calls by fault; `blamed` are seats of hosts that explain failed pairs.

    `unroutable`: another address of the same host can be reached, or the address is the caller's
    own too. `one_way`: the other direction of the pair was tested and works. `stuck` are the
    calls of which large packets are lost, `large_blamed` the seats that explain these.
    """

    tested: frozenset[Pair] = frozenset()
    no_route: tuple[PeerCall, ...] = ()
    blocked: tuple[PeerCall, ...] = ()
    one_way: tuple[PeerCall, ...] = ()
    intercepted: tuple[PeerCall, ...] = ()
    unroutable: tuple[PeerCall, ...] = ()
    stuck: tuple[PeerCall, ...] = ()
    blamed: frozenset[int] = frozenset()
    large_blamed: frozenset[int] = frozenset()
    working: Mapping[Pair, PeerCall] = field(default_factory=dict)

    @property
    def by_code(self) -> dict[str, tuple[PeerCall, ...]]:
        """Finding code → the calls that failed so: those first that say most about the cause."""
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
    """Sort calls by fault, and tell bad hosts from bad links."""
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
        well = [call for call in group if call.outcome in ("ok", "mtu")]
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
                (no_route if call.outcome == "unreachable" else blocked).append(call)
    # Who has no route to a host cannot answer it either: the call from there is only dropped.
    roadless = {call.pair for call in no_route}
    no_route += [call for call in blocked if call.pair[::-1] in roadless]
    blocked = [call for call in blocked if call.pair[::-1] not in roadless]
    bad = {call.pair for call in (*no_route, *blocked, *intercepted)}
    bad |= {call.pair for call in unroutable if call.job and call.pair not in working}
    one_way = {
        call.pair for call in blocked if call.pair[::-1] in pairs and call.pair[::-1] not in bad
    }
    return Sorted(
        tested=frozenset(pairs),
        no_route=tuple(no_route),
        blocked=tuple(call for call in blocked if call.pair not in one_way),
        one_way=tuple(call for call in blocked if call.pair in one_way),
        intercepted=tuple(intercepted),
        unroutable=tuple(unroutable),
        stuck=tuple(stuck),
        blamed=frozenset(blame_links(pairs, bad).hosts),
        large_blamed=_large_blamed(pairs, stuck),
        working=working,
    )


def _large_blamed(pairs: Mapping[Pair, list[PeerCall]], stuck: list[PeerCall]) -> frozenset[int]:
    moved: set[Pair] = set()
    for pair, group in pairs.items():
        for call in group:
            if call.job and call.outcome == "ok":
                moved |= {pair, pair[::-1]}
            elif call.job and call.outcome == "mtu" and call.stuck != pair:
                moved.add(pair)
    lost = {call.stuck for call in stuck}
    return frozenset(blame_links(moved, lost).hosts)


def unroutable_hosts(calls: Sequence[PeerCall], all_calls: Iterable[PeerCall]) -> set[int]:
    """Hosts whose choice of an interface is to blame, for calls to interfaces of one name.

    A host that offers an address which nobody reaches, where at least two tried or the address
    cannot be meant for others (it is the caller's own too, or there is no route to it). Where some
    reach it, hosts are told from links by comparison.
    """
    bad = {call.pair for call in calls}
    names = {call.interface for call in calls}
    tested = {call.pair for call in all_calls if call.interface in names}
    found = set()
    for listener in {call.listener for call in calls}:
        callers = {pair for pair in tested if pair[1] == listener}
        outcomes = {call.outcome for call in calls if call.listener == listener}
        if callers <= bad and (
            len(callers) >= _TWICE or outcomes <= {"own-address", "unreachable"}
        ):
            found.add(listener)
    return found or set(blame_links(tested, bad).hosts)
