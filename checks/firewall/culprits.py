"""Rules of the local packet filters that explain failed calls between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nccl_doctor.api import Cause, Confidence, LinkBlame, Step
from nccl_doctor.toolkit.firewall.netfilter import Packet, Rules, quote_hit
from nccl_doctor.toolkit.firewall.opening import let_in, remove_rule
from nccl_doctor.toolkit.net.interfaces import Interface
from nccl_doctor.toolkit.peers.matrix import Pair, PeerCall, Sorted

_SAMPLES = 2
"""Number of failed calls from and to each host that are followed through its firewall."""

_PACKETS = {
    "connect": (("first", True, "new", 60), ("reply", False, "established", 60)),
    "upload": (("data", True, "established", 0),),
    "download": (("data", False, "established", 0),),
}
"""Packets to follow: name, whether the caller sends it, conntrack state, length (0: the MTU)."""

_COMPARED = ("peer-no-route", "peer-blocked", "peer-one-way", "peer-intercepted")
"""Faults that are laid to hosts together, the most telling first."""


def sample_for_rules(calls: Iterable[PeerCall]) -> list[dict[str, Any]]:
    """A few failed calls for each host, as parameters of a round that reads local rules."""
    sampled: list[dict[str, Any]] = []
    seen: dict[tuple[str, int], int] = {}
    for call in sorted(calls, key=lambda each: (each.pair, each.address)):
        if call.source is None:
            continue
        ends = [("caller", call.caller, call.kind), ("listener", call.listener, call.kind)]
        keys = [(f"{side} {kind}", seat) for side, seat, kind in ends]
        if all(seen.get(key, 0) >= _SAMPLES for key in keys):
            continue
        for key in keys:
            seen[key] = seen.get(key, 0) + 1
        sampled.append(
            {
                "caller": call.caller,
                "listener": call.listener,
                "source": call.source,
                "target": call.address.partition("%")[0],
                "port": call.port,
                "kind": call.kind,
            }
        )
    return sampled


def follow_pairs(
    rules: Rules,
    pairs: Iterable[Mapping[str, Any]],
    seat: int,
    nics: Sequence[Interface],
    ports: tuple[int, int],
    *,
    leads_back: Callable[[str, str, str], bool | None],
) -> list[dict[str, Any]]:
    """Follow the packets of failed calls through the rules of this host.

    Args:
        rules: of this host.
        pairs: from `sample_for_rules`; those that do not touch this host are left out.
        seat: of this host.
        nics: of this host.
        ports: the caller's own port is one of this range.
        leads_back: whether answers from an own address to a peer leave by an interface, if known.

    Returns: every `Hit` as plain data, with its pair, the name of the packet and `incoming` added.
    """
    owners = {address: nic for nic in nics for address in nic.addresses}
    hits = []
    for pair in pairs:
        calling = seat == pair["caller"]
        nic = owners.get(pair["source"] if calling else pair["target"])
        if nic is None or not (calling or seat == pair["listener"]):
            continue
        ends = (pair["source"], pair["target"])
        spans = (ports, (pair["port"], pair["port"]))
        own, peer = ends if calling else ends[::-1]
        back = leads_back(own, peer, nic.name.partition(":")[0])
        for name, forth, state, length in _PACKETS[pair["kind"]]:
            packet = Packet(
                incoming=calling != forth,
                interface=nic.name,
                source=ends[not forth],
                target=ends[forth],
                source_ports=spans[not forth],
                target_ports=spans[forth],
                state=state,
                length=length or nic.mtu,
                way_back=back,
                syn_ack=name == "reply",
            )
            hits += [
                {**hit.to_json(), **pair, "packet": name, "incoming": packet.incoming}
                for hit in rules.hits(packet)
            ]
    return hits


def rule_culprits(
    calls: Iterable[PeerCall], hits: Mapping[int, Sequence[Mapping[str, Any]]]
) -> dict[Pair, dict[int, Mapping[str, Any]]]:
    """Local rules that surely stop packets of these calls: pair → seat of the host → the hit.

    Only some pairs were followed through the rules. A rule for packets of all sources explains the
    other pairs of its host too; one that was seen on two pairs counts as such a rule.

    Args:
        calls: failed ones, of one fault.
        hits: seat → what `follow_pairs` returned there.
    """
    calls = list(calls)
    wanted = {(call.pair, call.kind) for call in calls}
    found: dict[Pair, dict[int, Mapping[str, Any]]] = {}
    general: dict[tuple[int, str], dict[Pair, Mapping[str, Any]]] = {}
    for seat, entries in hits.items():
        for hit in entries:
            pair = (int(hit["caller"]), int(hit["listener"]))
            if hit["sure"] and (pair, hit["kind"]) in wanted:
                found.setdefault(pair, {}).setdefault(seat, hit)
                side = "caller" if seat == pair[0] else "listener"
                general.setdefault((seat, side), {}).setdefault(pair, hit)
    for call in calls:
        for seat, side in ((call.caller, "caller"), (call.listener, "listener")):
            seen = list(general.get((seat, side), {}).values())
            if call.pair not in found and len(seen) >= _SAMPLES and _same_rule(seen):
                found[call.pair] = {seat: seen[0]}
    return found


def _same_rule(hits: Sequence[Mapping[str, Any]]) -> bool:
    return len({(hit["tool"], hit["table"], hit["chain"], hit["rule"]) for hit in hits}) == 1


def what_rules_say(
    labels: Mapping[int, str], rules: Mapping[int, Mapping[str, Any]], pairs: set[Pair]
) -> dict[str, Any]:
    """Host at an end of these pairs → rules that may explain them, or why none is known."""
    said: dict[str, Any] = {}
    for seat in sorted({seat for pair in pairs for seat in pair} & rules.keys()):
        own = rules[seat]
        maybe = {quote_hit(hit) for hit in own["hits"] if (hit["caller"], hit["listener"]) in pairs}
        if not own["readable"]:
            said[labels[seat]] = f"not readable ({own['reason']})"
        else:
            said[labels[seat]] = {"may be": sorted(maybe)[:5]} if maybe else "none that matches"
    return said


@dataclass(frozen=True)
class Suspects:
    """Failed calls of one fault, with the hosts to blame for them (none: the links).

    `cause` is the host that comparison blames, and in which direction. `rules` maps the seat of a
    host to its rules that surely stop some of the calls.
    """

    calls: tuple[PeerCall, ...]
    seats: frozenset[int]
    confidence: Confidence
    cause: Cause[int] | None = None
    rules: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


def suspects_of_all(
    calls: Sorted, hits: Mapping[int, Sequence[Mapping[str, Any]]]
) -> Iterator[tuple[str, Suspects]]:
    """Code of each fault of these calls, with the hosts to blame; `hits` as for `rule_culprits`."""
    faults = {code: calls.by_code[code] for code in _COMPARED}
    # A pair that a rule of one end explains says nothing of the other end.
    explained = {pair for each in faults.values() for pair in rule_culprits(each, hits)}
    blame = calls.blame(explained)
    for code, each in faults.items():
        for found in suspects(each, blame, hits):
            yield code, found
    for found in suspects(calls.stuck, calls.large_blame, hits):
        yield "mtu-blackhole", found


def suspects(
    calls: Sequence[PeerCall],
    blame: LinkBlame[int],
    hits: Mapping[int, Sequence[Mapping[str, Any]]],
) -> list[Suspects]:
    """Failed calls of one fault, grouped by the hosts to blame and by how that is known.

    Hosts with the same rules are one group. So are links, except links that surely are faults of
    their own and fail in different ways.

    Args:
        calls: of one fault.
        blame: what comparison blames, for the calls of every fault together.
        hits: as for `rule_culprits`; what a rule explains is not left to comparison.
    """
    by_rule = rule_culprits(calls, hits)
    laid_to = _laid_to({pair: frozenset(each) for pair, each in by_rule.items()})
    rules: dict[frozenset[int], dict[int, dict[str, Mapping[str, Any]]]] = {}
    for pair, groups in laid_to.items():
        for seats in groups:
            for seat in seats:
                hit = by_rule[pair][seat]
                own = rules.setdefault(seats, {}).setdefault(seat, {})
                own.setdefault(quote_hit(hit), hit)
    # The same rule on several hosts is one fault.
    alike: dict[frozenset[str], set[frozenset[int]]] = {}
    for seats, each in rules.items():
        quotes = frozenset(quote for own in each.values() for quote in own)
        alike.setdefault(quotes, set()).add(seats)
    found = [
        Suspects(
            calls=tuple(call for call in calls if groups & {*laid_to.get(call.pair, ())}),
            seats=frozenset().union(*groups),
            confidence=Confidence.CERTAIN,
            rules={
                seat: tuple(own.values()) for seats in groups for seat, own in rules[seats].items()
            },
        )
        for groups in alike.values()
    ]
    return found + _compared([call for call in calls if call.pair not in by_rule], blame)


def _compared(calls: Sequence[PeerCall], blame: LinkBlame[int]) -> list[Suspects]:
    hosts: dict[Pair, dict[int, Cause[int]]] = {}
    links: dict[Pair, Confidence] = {}
    for cause in blame.causes:
        for pair in cause.pairs:
            if cause.is_host:
                hosts.setdefault(pair, {})[cause.ends[0]] = cause
            else:
                links[pair] = cause.confidence
    said: dict[frozenset[int], set[str]] = {}
    for call in calls:
        said.setdefault(frozenset(call.pair), set()).add(call.words)
    laid_to = _laid_to({call.stuck: frozenset(hosts.get(call.stuck, ())) for call in calls})
    groups: dict[tuple[Cause[int] | None, Confidence, str], list[PeerCall]] = {}
    for call in calls:
        for seats in laid_to[call.stuck]:
            host = hosts[call.stuck][min(seats)] if len(seats) == 1 else None
            # Two bad hosts, and neither fails like this elsewhere: it may be either of them.
            sure = host.confidence if host else links.get(call.stuck, Confidence.POSSIBLE)
            # Links that surely are faults of their own do not count as one fault.
            apart = host is None and sure is Confidence.CERTAIN
            words = ", ".join(sorted(said[frozenset(call.pair)])) if apart else ""
            groups.setdefault((host, sure, words), []).append(call)
    return [
        Suspects(tuple(group), frozenset(host.ends if host else ()), sure, host)
        for (host, sure, _), group in groups.items()
    ]


def _laid_to(explained: Mapping[Pair, frozenset[int]]) -> dict[Pair, list[frozenset[int]]]:
    """Pair → sets of hosts that are blamed for it.

    Where several hosts explain a pair: each that alone explains another pair; else all together.
    """
    alone = {seat for seats in explained.values() if len(seats) == 1 for seat in seats}
    return {
        pair: [frozenset([seat]) for seat in sorted(seats & alone)] or [seats]
        for pair, seats in explained.items()
    }


def how_to_open(
    found: Suspects,
    labels: Mapping[int, str],
    rules: Mapping[int, Mapping[str, Any]],
    *,
    remove: bool,
) -> list[Step]:
    """Steps for the hosts that let the calls pass; none where nothing is known.

    Args:
        found: the calls and the hosts.
        labels: seat → host name.
        rules: seat → facts of the host about its rules, with `managers`.
        remove: whether to remove the rules, rather than to let the peers pass before them.
    """
    steps: list[Step] = []
    for seat in sorted(found.seats):
        peers = {call.source for call in found.calls if call.listener == seat and call.source}
        peers |= {call.address for call in found.calls if call.caller == seat}
        managers = rules.get(seat, {}).get("managers", ())
        for hit in found.rules.get(seat) or (None,):
            own = [remove_rule(hit)] if remove and hit else let_in(hit, sorted(peers), managers)
            steps += [replace(step, on=(labels[seat],)) for step in own]
    return list(dict.fromkeys(steps))
