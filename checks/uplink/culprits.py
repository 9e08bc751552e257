"""Hosts that are cut off: by their carriers, else by the answers after the loss. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nccl_doctor.api import (
    AFTER_LOSS,
    Cluster,
    Confidence,
    Effect,
    Finding,
    Fix,
    Host,
    Kind,
    Step,
    Where,
    blame_links,
    fill,
    look,
    master_host,
    shell,
)
from nccl_doctor.toolkit.peers.matrix import first_calls

_CHECK = "check the cable, the transceiver and the switch port"
CABLE = Fix(
    look(shell("ip -br link")),
    look(shell("ethtool NIC"), f"if it says Link detected: no: {_CHECK}"),
)
_LOST = ("silent", "no-neighbour", "unreachable")
_TWICE = 2
_FOR_A_MOMENT = "A network cable or port of a host lost its link for a moment"
_FOR_A_MOMENT_WHY = (
    "What was under way was lost: a job that meets this ends, or waits until a time-out."
)
"""A carrier that went away and came back has changed twice."""

End = str
"""A host: its name, or what it was called by."""


@dataclass(frozen=True)
class View:
    """Facts of one host: from its start, and after a loss (None: it did not look again)."""

    host: Host
    first: Mapping[str, Any] | None
    after: Mapping[str, Any] | None

    @property
    def last(self) -> Mapping[str, Any]:
        """The newest of the two."""
        return self.after or self.first or {}

    @cached_property
    def nics(self) -> list[Mapping[str, Any]]:
        """The interface to MASTER_ADDR; where that is not known, all that have an address."""
        nics = list(self.last.get("interfaces", ()))
        names = {facts["towards_master"] for facts in (self.first, self.after) if facts} - {""}
        return [nic for nic in nics if nic["name"] in names] or nics

    @property
    def down(self) -> list[Mapping[str, Any]]:
        """These interfaces, if none of them runs."""
        return [] if any(nic["running"] for nic in self.nics) else self.nics

    @property
    def flapped(self) -> list[tuple[Mapping[str, Any], int]]:
        """Those that lost their carrier while the host was examined, and how often it changed."""
        before = {nic["name"]: nic for nic in (self.first or {}).get("interfaces", ())}
        found = []
        for nic in self.nics if self.first and self.after else ():
            was = before.get(nic["name"], nic)
            if was["changes"] is not None and nic["changes"] is not None:
                changes = nic["changes"] - was["changes"]
                found += [(nic, changes)] if changes >= _TWICE and was["running"] else []
        return found

    @property
    def gateway(self) -> bool | None:
        """True if the gateway answers; None if there is none, or none that ever did."""
        now = (self.last.get("gateway") or {}).get("outcome")
        before = ((self.first or {}).get("gateway") or {}).get("outcome")
        if now == "answers":
            return True
        return False if before == "answers" and now in _LOST else None


def find_culprits(cluster: Cluster, check: str, kind: Kind) -> Iterator[Finding]:
    """Hosts without a carrier; then hosts and links that explain who gave no answer."""
    views = _views(cluster, check)
    master = master_host(cluster)
    cut = set()
    for view in views:
        if not _is_in_trouble(cluster, view, master):
            continue
        finding = _by_carrier(view, kind)
        if finding is not None:
            cut.add(view.host.label)
            is_master = master is not None and view.host.id == master.id
            yield finding.replaced(effects=(Effect.SHUTS_OUT,) if is_master else ())
    yield from _by_answers(_Answers(cluster, views, cut), kind, master)


def _views(cluster: Cluster, check: str) -> list[View]:
    first = {rank.host.id: facts for rank, facts in cluster.facts(check)}
    after = {rank.host.id: facts for rank, facts in cluster.facts(check, AFTER_LOSS)}
    return [
        View(host, first.get(host.id), after.get(host.id))
        for host in cluster.present_hosts
        if host.id in first or host.id in after
    ]


def _is_in_trouble(cluster: Cluster, view: View, master: Host | None) -> bool:
    """True if a host lost another, could not sign in, or is rank 0's and no other came.

    Only then is an interface without a carrier more than a port that nobody uses.
    """
    if view.after is not None or not view.host.joined:
        return True
    if master is None or master.id != view.host.id:
        return False
    return not any(host.joined and host.id != master.id for host in cluster.present_hosts)


def _set_up(name: str, host: str) -> Step:
    device = name.partition(":")[0]
    return Step(
        shell("ip link set {} up", device), on=(host,), undo=shell("ip link set {} down", device)
    )


def _by_carrier(view: View, kind: Kind) -> Finding | None:
    host = view.host.label
    if view.down:
        names = tuple(sorted(nic["name"] for nic in view.down))
        shown = ", ".join(names)
        said = f"{shown} has no carrier"
        fix = fill(CABLE, NIC=names[0])
        if not any(nic["up"] for nic in view.down):
            said, fix = f"{shown} is down", Fix(_set_up(names[0], host))
        where = Where(hosts=(host,), interfaces=names)
        return Finding(kind, said, where, {"interfaces": view.last["interfaces"]}, fix=fix)
    if view.flapped:
        shown = ", ".join(f"{nic['name']} ({times} changes)" for nic, times in view.flapped)
        return Finding(
            kind.variant(title=_FOR_A_MOMENT, why=_FOR_A_MOMENT_WHY),
            f"the carrier went away and came back during the run: {shown}",
            Where(hosts=(host,), interfaces=tuple(sorted(nic["name"] for nic, _ in view.flapped))),
            {"interfaces": view.last["interfaces"]},
            fix=Fix(look(shell("dmesg -T | grep -i link"), f"shows when; then {_CHECK}")),
            confidence=Confidence.LIKELY,
        )
    return None


class _Answers:
    """Answers after the loss: `tested` and `failed` are pairs (caller, called).

    Left out: what a host with a cut cable did not reach, and links that were found broken before
    (check `firewall`): these are faults of their own.
    """

    def __init__(self, cluster: Cluster, views: Iterable[View], cut: set[End]) -> None:
        self.views = [view for view in views if view.after and view.host.label not in cut]
        self._owners = {
            address: host.label for host in cluster.present_hosts for address in host.addresses
        }
        self._names = {host.label for host in cluster.hosts}
        broken = _broken_before(cluster)
        self.tested: set[tuple[End, End]] = set()
        self.failed: set[tuple[End, End]] = set()
        for view in self.views:
            for call in (view.after or {}).get("calls", ()):
                pair = (view.host.label, self._end(call))
                if pair[0] == pair[1] or pair[1] in cut or call["outcome"] == "untested":
                    continue
                if call["outcome"] in _LOST and pair in broken:
                    continue
                self.tested.add(pair)
                self.failed |= {pair} if call["outcome"] in _LOST else set()
        self.gateways = {view.host.label: view.gateway for view in self.views}

    def _end(self, call: Mapping[str, Any]) -> End:
        """The host that was called: by its address, else by its name."""
        found = {self._owners[each] for each in call["addresses"] if each in self._owners}
        return found.pop() if len(found) == 1 else str(call["host"])

    def sees_nobody(self, end: End) -> bool:
        """True if at least two could have answered a host, none did, and it answered none."""
        called = {other for caller, other in self.tested if caller == end}
        heard = {pair for pair in self.tested - self.failed if end in pair}
        gateway = self.gateways.get(end)
        return len(called) + (gateway is False) >= _TWICE and not heard and gateway is not True

    @property
    def witnesses(self) -> list[str]:
        """Hosts that answered at least one other."""
        found = {other for _, other in self.tested - self.failed}
        return sorted(found) + (["the gateway"] if True in self.gateways.values() else [])


def _broken_before(cluster: Cluster) -> set[tuple[End, End]]:
    """Ordered pairs of hosts whose calls failed when all were there."""
    labels = {rank.seat: rank.host.label for rank in cluster.present}
    _, by_fault = first_calls(cluster)
    return {(labels[call.caller], labels[call.listener]) for call in by_fault.failed}


def _by_answers(answers: _Answers, kind: Kind, master: Host | None) -> Iterator[Finding]:
    """Findings on hosts that see no other, on hosts that no other sees, and on the links left."""
    left = answers.failed
    lonely = {view.host.label for view in answers.views if answers.sees_nobody(view.host.label)}
    if len(lonely) > 1 and not answers.witnesses:
        lonely = set()  # nobody sees anybody: it may be what is between all of them
    for end in sorted(lonely):
        mine = {pair for pair in left if end in pair}
        left = left - mine
        yield Finding(
            kind,
            f"no answer from {_names(mine, end)}"
            + (", nor from the gateway" if answers.gateways.get(end) is False else "")
            + ": it sees nobody any more",
            Where(hosts=(end,)),
            _shown(answers, mine),
            confidence=Confidence.LIKELY,
            effects=(Effect.SHUTS_OUT,) if master is not None and end == master.label else (),
        )
    blame = blame_links(answers.tested - (answers.failed - left), left)
    for end in blame.hosts:
        mine = {pair for pair in left if end in pair}
        left = left - mine
        callers = {caller for caller, _ in mine} - {end}
        yield Finding(
            kind,
            f"no answer to {len(callers)} other hosts, which answer each other",
            Where(hosts=(end,)),
            _shown(answers, mine),
            confidence=Confidence.LIKELY,
            effects=(Effect.SHUTS_OUT,) if master is not None and end == master.label else (),
        )
    for pairs in _edges(left):
        ends = sorted({end for pair in pairs for end in pair})
        who = answers.witnesses
        said = "no answer any more; without a third host or a gateway that answers, it cannot be "
        said += "told which end is cut off"
        if who:
            said = f"no answer any more, but {', '.join(who[:4])} answered: the other end is off "
            said += "or cut off, or what is between"
        yield Finding(
            kind,
            said,
            Where(links=((ends[0], ends[1]), (ends[1], ends[0]))),
            _shown(answers, pairs),
            fix=Fix(
                look(shell("ip -br link"), "is the interface UP, and the other host?"),
                alternatives=[Fix(text="check the cables and the switch ports of both")],
            ),
            confidence=Confidence.LIKELY,
        )


def _edges(pairs: Iterable[tuple[End, End]]) -> list[set[tuple[End, End]]]:
    edges: dict[frozenset[End], set[tuple[End, End]]] = {}
    for pair in pairs:
        edges.setdefault(frozenset(pair), set()).add(pair)
    return [edges[edge] for edge in sorted(edges, key=sorted)]


def _names(pairs: Iterable[tuple[End, End]], but: End) -> str:
    names = sorted({end for pair in pairs for end in pair} - {but})
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _shown(answers: _Answers, pairs: Iterable[tuple[End, End]]) -> dict[str, Any]:
    return {
        "no answer": [list(pair) for pair in sorted(pairs)][:20],
        "answered": [list(pair) for pair in sorted(answers.tested - answers.failed)][:20],
        "gateway answers": dict(sorted(answers.gateways.items())),
    }
