"""Addresses for which another interface, or another machine, answers. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Severity,
    Step,
    Where,
    fill,
    host_labels,
    look,
    shell,
)
from nccl_doctor.toolkit.peers.matrix import first_calls

from .room import networks_of

_KEYS = "sysctl -w net.ipv4.conf.all.arp_ignore={} net.ipv4.conf.all.arp_announce={}"
APART = Fix(
    Step(shell(_KEYS, 1, 2), undo=shell(_KEYS, 0, 0)),
    alternatives=["for the next boot: the same in /etc/sysctl.d/90-arp.conf"],
)
"""Each interface answers for its own addresses only, and asks in its own name."""
OTHER_NIC = Kind(
    "arp-answered-by-other-nic",
    Layer.ROUTE,
    "Another interface of the host answers for an address",
    "Packets for one NIC arrive at the other, which then carries the data of both; RoCE packets "
    "are lost.",
    APART,
    Severity.INFO,
)
ANOTHER = Kind(
    "address-answered-by-another",
    Layer.ROUTE,
    "Another machine answers for the address of a host",
    "Packets for the host go to the machine that answered last: connections are refused, or get no "
    "answer, or break at random.",
    Fix(
        look(
            shell("ip neigh show ADDRESS"),
            "shows its hardware address (switch: show mac address-table)",
        ),
        alternatives=[Fix(text="find the machine with that one, and take the address from it")],
    ),
)


FIXED = ANOTHER.variant(
    title="A fixed entry of the neighbour table leads to another machine",
    why="The kernel asks nobody for that address: what the host sends to it goes to a machine that "
    "does not take it, and calls get no answer.",
    fix=Fix(look(shell("ip neigh show nud permanent"), "delete what is wrong, and what makes it")),
)
"""An entry that a person or a program made, and that only stands where nothing asks again."""


@dataclass
class _Answer:
    """The answers for one address of a host, by an interface that does not have it.

    `failed`, `worked`: seats of the callers. `sound`: whether some caller has other neighbours in
    that network which answer for themselves.
    """

    listener: int
    address: str
    interface: str
    mac: str
    carries: bool
    failed: set[int] = field(default_factory=set)
    worked: set[int] = field(default_factory=set)
    sound: bool = False


def judge_answers(cluster: Cluster, hosts: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """Findings on each such address; `hosts`: seat → facts of the check."""
    answers = [answer for answer in _collect(cluster) if answer.listener in hosts]
    if not answers:
        return
    labels = host_labels(cluster)
    owners: dict[str, list[tuple[int, str]]] = {}
    for seat, facts in hosts.items():
        for name, nic in facts["nics"].items():
            owners.setdefault(nic["mac"], []).append((seat, name))
    for answer in answers:
        known = owners.get(answer.mac, [])
        own = [name for seat, name in known if seat == answer.listener]
        others = sorted({labels[seat] for seat, _ in known} - {labels[answer.listener]})
        where = Where(hosts=(labels[answer.listener],), interfaces=(answer.interface,))
        evidence = {
            "callers": sorted(labels[seat] for seat in answer.failed | answer.worked)[:20],
            "answered by": answer.mac,
        }
        if own:
            if _one_interface(hosts[answer.listener]["nics"], answer.interface, own):
                continue
            yield Finding(
                OTHER_NIC,
                f"{own[0]} answers for {answer.address} of {answer.interface}",
                where,
                {**evidence, **hosts[answer.listener]["arp"]},
                fix=_keep_apart(answer.address),
                severity=Severity.WARN if answer.carries else None,
            )
        elif answer.failed and (others or answer.sound):
            said = f"which is {', '.join(others)}" if others else "which no host of the job has"
            yield Finding(
                ANOTHER,
                f"{answer.mac} answers for {answer.address}, {said}",
                where | Where(hosts=tuple(others)),
                evidence,
                fix=fill(ANOTHER.fix, on=(labels[min(answer.failed)],), ADDRESS=answer.address),
                confidence=Confidence.LIKELY,
            )


def _keep_apart(address: str) -> Fix:
    """The fix for a host that answers by another interface than the one with the address."""
    flush = Step(shell("ip neigh flush to {}", address), On.OTHERS, persists=True)
    return Fix(*APART.steps, flush, alternatives=APART.alternatives)


def judge_fixed(cluster: Cluster, hosts: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    """Findings on hosts whose own neighbour table leads their failed calls to another machine.

    `hosts`: seat → facts of the check. An entry for another interface of the right host is good: it
    takes the packets. It is certain where a host without such an entry gets through.
    """
    calls, _ = first_calls(cluster)
    failed = [call for call in calls if call.fixed and call.outcome != "ok"]
    if not failed:
        return
    labels = host_labels(cluster)
    reached = {(call.listener, call.address) for call in calls if call.outcome == "ok"}
    for call in failed:
        if call.listener not in hosts:
            continue
        (mac, nic), address = call.fixed, call.address.partition("%")[0]
        if mac in {each["mac"] for each in hosts[call.listener]["nics"].values()}:
            continue
        entry = shell("{} dev {}", address, nic)
        caller, listener = labels[call.caller], labels[call.listener]
        yield Finding(
            FIXED,
            f"an entry made by hand says that {address} is at {mac}, which is not so",
            Where(hosts=(caller,), links=((caller, listener),), interfaces=(nic,)),
            {"entry": [address, mac, nic]},
            fix=Fix(
                Step(
                    shell("ip neigh del {}", entry),
                    on=(caller,),
                    undo=shell("ip neigh replace {} lladdr {} nud permanent", entry, mac),
                    persists=True,
                )
            ),
            confidence=Confidence.CERTAIN
            if (call.listener, call.address) in reached
            else Confidence.LIKELY,
        )


def _collect(cluster: Cluster) -> list[_Answer]:
    """Addresses for which another interface answers than the one that has them."""
    reports = {rank.seat: facts for rank, facts in cluster.facts("firewall", "matrix")}
    interfaces = {rank.seat: facts for rank, facts in cluster.facts("interfaces")}
    found: dict[tuple[int, str, str], _Answer] = {}
    for caller, facts in reports.items():
        calls = [(text, e) for text, entries in facts["peers"].items() for e in entries]
        wrong = [(int(text), entry) for text, entry in calls if entry.get("answers")]
        if not wrong:
            continue
        nets = [
            ipaddress.ip_network(net)
            for net in (networks_of(interfaces[caller]) if caller in interfaces else ())
        ]
        right = [entry for _, entry in calls if not entry.get("answers") and _worked(entry)]
        for listener, entry in wrong:
            if listener not in reports:
                continue
            carries = (
                "nccl" in cluster.backend
                and "nccl-sockets" in entry["roles"]
                and reports[listener].get("nccl_data") == "sockets"
            )
            key = (listener, entry["address"], entry["answers"])
            answer = found.setdefault(
                key, _Answer(listener, entry["address"], entry["interface"], key[2], carries)
            )
            (answer.worked if _worked(entry) else answer.failed).add(caller)
            alone = sum(each["answers"] == answer.mac for _, each in wrong) == 1
            near = [net for net in nets if _within(answer.address, net)]
            answer.sound |= alone and any(
                _within(each["address"], net) for net in near for each in right
            )
    return list(found.values())


def _worked(entry: Mapping[str, Any]) -> bool:
    attempts = entry["attempts"]
    return bool(attempts) and attempts[-1]["outcome"] == "ok"


def _within(address: str, net: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]) in net


def _one_interface(nics: Mapping[str, Any], called: str, answering: Iterable[str]) -> bool:
    """True if one of the interfaces that have the hardware address is the one that was called, or
    made of it, or a part of it.
    """
    called = called.partition(":")[0]
    above = {called, *nics.get(called, {}).get("above", ())}
    return any(name in above or called in nics[name]["above"] for name in answering)
