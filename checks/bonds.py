"""Does every bond of a host send through all of its members?

What it checks
--------------
On every host with bonded interfaces, as the kernel lists them (/proc/net/bonding): members that are
down, members of different speeds, and in mode 802.3ad members that are not in one aggregate, as
happens where the switch does not answer with LACP on all ports. In mode active-backup, whether the
active member is as fast as the fastest one.

Why it matters
--------------
A bond goes on with the members that are left, and no library reports it: with one cable of two the
host has half of its bandwidth, and every collective waits for it.

How to fix
----------
bond-member-down: `ip link show <member>`, `ethtool <member>`; cable, transceiver and switch port.
bond-split: put the switch ports of all members into one LACP group (on two switches: MLAG), and
`cat /proc/net/bonding/<bond>`. bond-speeds-differ: the same negotiated speed on all members.

When it is wrong
----------------
A member that is down on every host may be so on purpose: then this is only information, as it is
for a bond that the job does not use, and for a backup that is down. Which bond the job uses is
known by the interfaces above it (VLANs, bridges); behind Open vSwitch every bond counts. Team
devices, and in a container the bonds of the machine, are not seen. The speed is what the driver
told the bond last.
Not validated on hardware: tested with texts of the kernel.

References
----------
Kernel documentation, networking/bonding; `bond_info_show_slave` in the kernel's
drivers/net/bonding/bond_procfs.c; IEEE 802.1AX.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Figure,
    Finding,
    Fix,
    Kind,
    Layer,
    Rank,
    Severity,
    Skip,
    Where,
    fill,
    look,
    shell,
)
from nccl_doctor.toolkit.host import text_of
from nccl_doctor.toolkit.net.interfaces import interfaces_above

_LESS = "The bond goes on with less bandwidth, and every collective waits for this host."

MEMBER_DOWN = Kind(
    "bond-member-down",
    Layer.ROUTE,
    "A member of a bond is down",
    _LESS,
    Fix(
        look(shell("ethtool NIC"), "check the cable, the transceiver and the switch port"),
        look(shell("cat /proc/net/bonding/NAME")),
    ),
    Severity.WARN,
)
SPLIT = Kind(
    "bond-split",
    Layer.ROUTE,
    "The members of a bond are not in one LACP aggregate",
    "Only one aggregate sends, the other members are idle: the switch does not answer with LACP on "
    "all ports, or these belong to different groups.",
    Fix(
        look(shell("cat /proc/net/bonding/NAME"), "the aggregate of each member"),
        alternatives=[
            Fix(
                text="put the switch ports of all members into one LACP group (MLAG on two "
                "switches)"
            )
        ],
    ),
    Severity.WARN,
)
SPEEDS_DIFFER = Kind(
    "bond-speeds-differ",
    Layer.ROUTE,
    "The members of a bond have different speeds",
    "Connections that are sent through the slow member take several times as long; with LACP the "
    "slow members are idle.",
    Fix(
        look(
            shell("ethtool NIC | grep -i speed"),
            "check the cable and the switch port of the slow one",
        ),
        look(shell("cat /proc/net/bonding/NAME")),
    ),
    Severity.WARN,
)

_LACP = "IEEE 802.3ad"
_BACKUP = "active-backup"
_SWITCH = "ovs-system"
"""Open vSwitch: which of its bridges a bond belongs to is not in sysfs."""
_MOST = 32


class Bonds(Check):
    """Reads the bonds of this host; judges those that lack members."""

    name = "bonds"
    layer = Layer.ROUTE
    kinds = (MEMBER_DOWN, SPLIT, SPEEDS_DIFFER)
    reads = ("fabric_ports", "interfaces")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`bonds`: name → from `read_bond`, and `above`: the interfaces on top of it."""
        try:
            files = sorted((ctx.root / "proc/net/bonding").iterdir())[:_MOST]
        except OSError:
            files = []
        if not files:
            raise Skip("this host has no bonded interfaces")
        return {
            "bonds": {
                each.name: {
                    **read_bond(text_of(each)),
                    "above": sorted(interfaces_above(each.name, ctx.root)),
                }
                for each in files
            }
        }

    def figures(self, cluster: Cluster) -> Iterator[Figure]:
        """Mode, hash policy and members of each bond."""
        for rank, facts in cluster.facts(self.name):
            for name, bond in facts["bonds"].items():
                speeds = ", ".join(f"{m['name']} {_speed(m)}" for m in bond["members"])
                said = f"{bond['mode']}, {bond['hash'] or 'no hash policy'}: {speeds}"
                yield Figure(f"bond {name}", said, Where(hosts=(rank.host.label,)))

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on the members of each bond that is up."""
        used = _used(cluster)
        reports = list(cluster.facts(self.name))
        for rank, facts in reports:
            for name, bond in facts["bonds"].items():
                above = {name, *bond["above"]}
                counts = _SWITCH in above or bool(above & used.get(rank.host.id, set()))
                others = [
                    other["bonds"][name]
                    for peer, other in reports
                    if peer.host.id != rank.host.id and name in other["bonds"]
                ]
                yield from _of_bond(rank, name, bond, others, counts=counts)


def read_bond(text: str) -> dict[str, Any]:
    """A bond from its file below /proc/net/bonding.

    Returns: `mode`, `hash` (transmit hash policy), `active` (its active member), and `members`,
    each with `name`, `up`, `mbps` (None where not known), `failures` (how often its link was lost),
    `aggregate` (its number in mode 802.3ad, else None) and `partner` (whether the switch answered
    with LACP; None where only root may know).
    """
    head, *parts = text.split("\nSlave Interface: ")
    top = _fields(head)
    return {
        "mode": top.get("Bonding Mode", ""),
        "hash": top.get("Transmit Hash Policy", "").partition(" ")[0],
        "active": top.get("Currently Active Slave", ""),
        "members": [_member(part) for part in parts],
    }


def _member(text: str) -> dict[str, Any]:
    own, _, partner = text.partition("details partner lacp pdu:")
    fields = _fields(own)
    switch = _fields(partner).get("system mac address")
    return {
        "name": own.partition("\n")[0].strip(),
        "up": fields.get("MII Status") == "up",
        "mbps": _number(fields.get("Speed", "")),
        "failures": _number(fields.get("Link Failure Count", "")),
        "aggregate": _number(fields.get("Aggregator ID", "")),
        "partner": None if switch is None else any(c not in "0:" for c in switch),
    }


def _of_bond(
    rank: Rank,
    name: str,
    bond: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    *,
    counts: bool,
) -> Iterator[Finding]:
    """Findings on one bond.

    Args:
        rank: on whose host it is.
        name: of the bond.
        bond: from `read_bond`.
        others: the bonds of that name on the other hosts.
        counts: whether the job may use it.
    """
    members = bond["members"]
    up = [each for each in members if each["up"]]
    if not up:
        return  # check `interfaces` says more of one that is down as a whole

    def finding(kind: Kind, said: str, bad: Sequence[str], *, weak: bool = False) -> Finding:
        return Finding(
            kind,
            f"{name} ({bond['mode']}): {said}",
            Where(hosts=(rank.host.label,), interfaces=tuple(sorted(bad))),
            {"members": list(members), "transmit hash policy": bond["hash"]},
            fix=fill(kind.fix, NIC=bad[0], NAME=name),
            severity=None if counts and not weak else Severity.INFO,
            confidence=Confidence.LIKELY,
        )

    shown = ", ".join(f"{each['name']} {_speed(each)}" for each in members)
    if _BACKUP in bond["mode"]:
        yield from _of_backup(bond, finding, shown)
        return
    if down := [each["name"] for each in members if not each["up"]]:
        everywhere = bool(others) and all(_lacks(other) for other in others)
        said = f"{len(up)} of {len(members)} members carry data: {shown}"
        yield finding(MEMBER_DOWN, said, down, weak=everywhere)
    speeds = {each["mbps"] for each in up if each["mbps"]}
    if len(speeds) > 1:
        slow = [each["name"] for each in up if each["mbps"] and each["mbps"] < max(speeds)]
        yield finding(SPEEDS_DIFFER, shown, slow)
    elif _LACP in bond["mode"] and len({each["aggregate"] for each in up}) > 1:
        groups = ", ".join(f"{each['name']} in {each['aggregate'] or 'none'}" for each in up)
        mute = [each["name"] for each in up if each["partner"] is False]
        said = f"members are in different aggregates: {groups}"
        if mute:
            said += f"; no LACP from the switch at {', '.join(mute)}"
        yield finding(SPLIT, said, mute or [each["name"] for each in up])


def _of_backup(bond: Mapping[str, Any], finding: Any, shown: str) -> Iterator[Finding]:
    """Findings on a bond that uses one member at a time."""
    members = bond["members"]
    active = next((each for each in members if each["name"] == bond["active"]), None)
    best = max((each["mbps"] or 0 for each in members if each["up"]), default=0)
    if active and active["mbps"] and active["mbps"] < best:
        said = f"the active member {active['name']} is not the fastest: {shown}"
        yield finding(SPEEDS_DIFFER, said, [active["name"]])
    if down := [each["name"] for each in members if not each["up"]]:
        yield finding(MEMBER_DOWN, f"without a backup: {shown}", down, weak=True)


def _lacks(bond: Mapping[str, Any]) -> bool:
    return not all(each["up"] for each in bond["members"])


def _speed(member: Mapping[str, Any]) -> str:
    if not member["up"]:
        return "down"
    return f"{member['mbps'] / 1000:g} Gbit/s" if member["mbps"] else "up"


def _used(cluster: Cluster) -> dict[int, set[str]]:
    """Host → interfaces that NCCL or gloo would take, and those of its RDMA ports."""
    used: dict[int, set[str]] = {}
    for rank, facts in cluster.facts("interfaces"):
        names = {entry["interface"].partition(":")[0] for entry in facts.get("listen") or ()}
        used.setdefault(rank.host.id, set()).update(names)
    for rank, facts in cluster.facts("fabric_ports"):
        ports = (port for device in facts["devices"] for port in device["ports"])
        names = {port["netdev"] for port in ports if port["wanted"]}
        used.setdefault(rank.host.id, set()).update(names)
    return used


def _fields(text: str) -> dict[str, str]:
    """`Name: value` of each line; of those with one name, the first."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.strip().partition(": ")
        if colon:
            found.setdefault(name, value.strip())
    return found


def _number(text: str) -> int | None:
    word = text.partition(" ")[0]
    return int(word) if word.isdecimal() else None
