"""Rules of a host's own packet filter that stop connections to MASTER_PORT.

On the host that connects and on the host that serves. The connecting host is not known in advance,
so rules are followed for a packet from anywhere, and then for one from the network of the
interface: a rule for only some sources is no sure hit.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nccl_doctor.model.cluster import AFTER_LOSS, ALONE, Cluster, Rank
from nccl_doctor.model.fixes import Fix
from nccl_doctor.toolkit.firewall.netfilter import Packet, Rules, quote_hit
from nccl_doctor.toolkit.firewall.opening import let_in
from nccl_doctor.toolkit.firewall.rulesets import read_rules
from nccl_doctor.toolkit.nccl.interface_choice import neighbourhood
from nccl_doctor.toolkit.net.interfaces import interfaces
from nccl_doctor.toolkit.net.ports import port_range
from nccl_doctor.toolkit.net.rtnetlink import leads_back

_LOOKS_LIKE = {"drop": ("dropped",), "reject": ("rejected", "refused")}
"""Verdict of a rule on the first packet → outcomes of a call that it causes."""
_MAX_HITS = 10


def rules_for_calls_out(
    address: str, port: int, timeout_s: float = 3.0, root: Path = Path("/")
) -> dict[str, Any]:
    """Hits of this host's rules on its own calls to `address`, and on the answers.

    Args:
        address: of the other end, numeric.
        port: of the other end.
        timeout_s: for each of at most four commands that read rules.
        root: the folder below which /proc and /etc are read.

    Returns: `readable`, `reason`, `managers` (as `Rules`), `peers`: addresses to allow, and `hits`:
    each a `Hit` as plain data with `incoming` and `packet` (`first` or `reply`) added.
    """
    source = _source_towards(address)
    names = {own: nic.name for nic in interfaces() for own in nic.addresses}
    nic = names.get(source, "lo" if source == address else "")
    first = Packet(False, nic, source, address, port_range(root), (port, port))
    reply = Packet(True, nic, address, source, (port, port), port_range(root), "established")
    reply = replace(reply, way_back=leads_back(source, address, nic), syn_ack=True)
    return follow(read_rules(timeout_s, root), {"first": first, "reply": reply}, [address])


def rules_for_own_calls(
    address: str, port: int, timeout_s: float = 3.0, root: Path = Path("/")
) -> dict[str, Any]:
    """Hits of this host's rules on calls to its own address, which go over `lo`.

    Returns: as `rules_for_calls_out`.
    """
    own, called = port_range(root), (port, port)
    packets = {
        f"{name}{' in' if incoming else ''}": Packet(
            incoming, "lo", address, address, *ports, state=state, syn_ack=name == "reply"
        )
        for name, ports, state in (
            ("first", (own, called), "new"),
            ("reply", (called, own), "established"),
        )
        for incoming in (False, True)
    }
    return follow(read_rules(timeout_s, root), packets, [address])


def rules_for_calls_in(
    address: str, port: int, timeout_s: float = 3.0, root: Path = Path("/")
) -> dict[str, Any]:
    """Hits of this host's rules on incoming calls to one of its addresses, and on the answers.

    Returns: as `rules_for_calls_out`. `anyone` of a hit: it stops calls from everywhere, not only
    from the network of the address.
    """
    nic = next((nic.name for nic in interfaces() if address in nic.addresses), "")
    network = neighbourhood(address)
    rules = read_rules(timeout_s, root)
    hits: list[dict[str, Any]] = []
    for source in filter(None, ("::/0" if ":" in address else "0.0.0.0/0", network)):
        first = Packet(True, nic, source, address, port_range(root), (port, port))
        reply = Packet(False, nic, address, source, (port, port), port_range(root), "established")
        reply = replace(reply, syn_ack=True)
        found = follow(rules, {"first": first, "reply": reply}, whom_to_admit(address, network))
        hits += [{**hit, "anyone": source != network} for hit in found["hits"]]
        if any(hit["sure"] for hit in hits):
            break
    return {**found, "hits": hits[:_MAX_HITS]}


def whom_to_admit(address: str, network: str) -> list[str]:
    """Network of the other hosts for a command, or a word in its place if it is not known.

    Args:
        address: own one.
        network: from `neighbourhood`. An address that stands alone (/32) is that of this host.
    """
    return [network or ("PREFIX-OF-THE-HOSTS::/64" if ":" in address else "NETWORK-OF-THE-HOSTS")]


def follow(rules: Rules, packets: Mapping[str, Packet], peers: list[str]) -> dict[str, Any]:
    """Hits of rules on packets by name; the result is that of `rules_for_calls_out`."""
    hits = [
        {**hit.to_json(), "packet": name, "incoming": packet.incoming}
        for name, packet in packets.items()
        for hit in rules.hits(packet)
    ]
    return {
        "readable": rules.readable,
        "reason": rules.reason,
        "managers": list(rules.managers),
        "peers": peers,
        "hits": hits[:_MAX_HITS],
    }


def _source_towards(address: str) -> str:
    """The address that this host would connect from; the unspecified address without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))  # a datagram socket only looks the route up
            return str(sock.getsockname()[0])
    except OSError:
        return "::" if ":" in address else "0.0.0.0"


def sure_hit(facts: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The first rule that surely drops or rejects, from the result of a function above."""
    return next(_sure_hits(facts), None)


def _sure_hits(facts: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    hits: Iterable[Mapping[str, Any]] = facts["hits"]
    return (hit for hit in hits if hit["sure"] and hit["verdict"] in _LOOKS_LIKE)


@dataclass(frozen=True)
class ShutDoor:
    """A rule on the host that serves the store, which surely stops new connections to MASTER_PORT.

    `facts` are those of check `master_firewall` that have it. `came_later`: the rule was not there
    at first, only when hosts or ranks had already been missed.
    """

    rank: Rank
    facts: Mapping[str, Any]
    hit: Mapping[str, Any]
    came_later: bool


def shut_doors(cluster: Cluster) -> Iterator[ShutDoor]:
    """One for each participant that saw such a rule, of the first look that shows it."""
    seen: set[int] = set()
    shut: set[int] = set()
    for name in (ALONE, AFTER_LOSS):
        for rank, facts in cluster.facts("master_firewall", name):
            hit = sure_hit(facts["rules"])
            if hit is not None and rank.seat not in shut:
                shut.add(rank.seat)
                yield ShutDoor(rank, facts, hit, came_later=rank.seat in seen)
            seen.add(rank.seat)


def fits(facts: Mapping[str, Any], call: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The rule that surely stops such calls, where the outcome of one agrees with it."""
    return next(filter(lambda hit: call["outcome"] in _outcomes(hit), _sure_hits(facts)), None)


def _outcomes(hit: Mapping[str, Any]) -> tuple[str, ...]:
    """Outcomes of a call that a rule causes. A rule that rejects the answer says so to the host
    that answers: the caller hears nothing.
    """
    of_reply = str(hit["packet"]).startswith("reply")
    return _LOOKS_LIKE["drop" if of_reply else hit["verdict"]]


def explains_knock(theirs: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """True if rules on the host that serves explain the answer of MASTER_PORT to another host.

    Args:
        theirs: facts of check `master_firewall`.
        facts: of check `port`, on the other host.
    """
    knock = facts.get("knock")
    same = facts["port"] == theirs["port"]
    return bool(same and knock and fits(theirs["rules"], knock["last"]))


def was_let_in(theirs: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """True if another host got an answer at the port that the host serves; see `explains_knock`."""
    last = (facts.get("knock") or {}).get("last") or {}
    return bool(facts["port"] == theirs["port"] and last.get("answer") == "store")


def stopped_by(hit: Mapping[str, Any]) -> str:
    """The rule in words: `nft inet filter input: tcp dport 29500 drop (incoming, first packet)`."""
    way = "incoming" if hit["incoming"] else "outgoing"
    return f"{quote_hit(hit)} ({way}, {hit['packet']} packet)"


def how_to_let_pass(facts: Mapping[str, Any], hit: Mapping[str, Any], host: str) -> Fix:
    """The fix for the host that has the rule."""
    steps = let_in(hit, facts["peers"], facts["managers"])
    return Fix(*(replace(step, on=(host,)) for step in steps))
