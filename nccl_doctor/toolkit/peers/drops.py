"""Packets that arrive damaged, or that the host drops, while the hosts call each other.

What a switch or a cable loses leaves no trace in the host; this does, and names the end at which
packets are lost. Sources: `struct rtnl_link_stats64` in the kernel's include/uapi/linux/if_link.h;
`softnet_seq_show` in net/core/net-procfs.c.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nccl_doctor.model.cluster import Rank
from nccl_doctor.model.commands import shell
from nccl_doctor.model.findings import Confidence, Finding, Kind, Layer, Severity, Where
from nccl_doctor.model.fixes import Fix, Step, fill, look
from nccl_doctor.toolkit.net.interfaces import interfaces

_COUNTERS = look(shell("ethtool -S NIC | grep -i -e drop -e miss -e buf"), "which queue is full")
DAMAGED = Kind(
    "nic-errors-rising",
    Layer.ROUTE,
    "Packets arrive damaged at a network interface",
    "Each damaged packet is lost and sent again: TCP waits for it, and RDMA too.",
    Fix(
        look(
            shell("ethtool -S NIC | grep -i err"),
            "clean or replace the cable and the transceiver of this port, then try another switch "
            "port",
        )
    ),
    Severity.WARN,
)
DROPPED = Kind(
    "packets-dropped",
    Layer.ROUTE,
    "A host drops packets that have arrived",
    "They are sent again, and TCP slows down: the host cannot take packets as fast as they come.",
    Fix(_COUNTERS),
    Severity.WARN,
)

_LONGER_BACKLOG = Fix(
    Step(shell("sysctl -w net.core.netdev_max_backlog=10000 net.core.netdev_budget=600"))
)
_LONGER_RING = Fix(
    look(shell("ethtool -g NIC"), "how long the ring is, and may be"),
    Step(shell("# ethtool -G NIC rx 4096"), note="or the maximum, if that is less"),
    _COUNTERS,
)
_BAD = ("rx_crc_errors", "rx_frame_errors")
"""`rx_errors` and `rx_length_errors` also count sound packets that are longer than the MTU."""
_RING = ("rx_missed_errors", "rx_fifo_errors", "rx_over_errors")
_OTHER = "rx_dropped"
"""It also counts packets of protocols that this host does not speak."""
_BACKLOG = "softnet dropped"
_LEAST_BAD = 3
"""Bit errors of a good link are minutes apart."""
_LEAST_DROPPED, _SHARE = 20, 0.001
"""A sender that finds its speed may overflow a queue once."""
_MOST = 16
_DROPPED_COLUMN = 1

Counts = dict[str, dict[str, int]]


def read_counts(interface: str, root: Path) -> Counts:
    """Interface → counter → value, of an interface and all that are beneath it (members of a bond,
    the one that carries a VLAN); and behind an empty name, those of the host.
    """
    nics = root / "sys/class/net"
    found: Counts = {}
    left = [interface.partition(":")[0]]
    while left and len(found) < _MOST:
        name = left.pop(0)
        if name in found:
            continue
        try:
            entries = [each.name for each in (nics / name).iterdir()]
        except OSError:
            entries = []
        below = [each.removeprefix("lower_") for each in entries if each.startswith("lower_")]
        left += below
        # What is made of others has their counts once more.
        names = ("rx_packets",) if below else ("rx_packets", *_BAD, *_RING, _OTHER)
        found[name] = {each: _number(nics / name / "statistics" / each) for each in names}
    return {**found, "": {_BACKLOG: _softnet(root)}}


def read_counts_of_all(root: Path) -> Counts:
    """Counts of every interface of this host that is up, as of `read_counts`."""
    found: Counts = {}
    for nic in interfaces():
        if nic.up and not nic.loopback:
            found |= read_counts(nic.name, root)
    return found


def grown(before: Counts, after: Counts) -> Counts:
    """By how much each counter grew, of those that did; one that was reset is left out."""
    found: Counts = {}
    for nic, counts in after.items():
        for name, value in counts.items():
            rise = value - before.get(nic, {}).get(name, 0)
            if rise > 0 and nic in before:
                found.setdefault(nic, {})[name] = rise
    return found


def judge_drops(
    reports: Iterable[tuple[Rank, Mapping[str, Any]]], receivers: Collection[int]
) -> Iterator[Finding]:
    """Findings on hosts whose counters grew.

    Args:
        reports: (observer, facts) of both tries, with `drops`: from `grown`.
        receivers: seats of hosts that are at the end of a slow or lossy link, where data arrive.
    """
    ranks: dict[int, Rank] = {}
    totals: dict[int, dict[str, Counter[str]]] = {}
    for rank, facts in reports:
        ranks[rank.seat] = rank
        for nic, counts in (facts.get("drops") or {}).items():
            totals.setdefault(rank.seat, {}).setdefault(nic, Counter()).update(counts)
    for seat, nics in totals.items():
        host = ranks[seat].host.label
        for nic, counts in nics.items():
            bad = {name: counts[name] for name in _BAD if counts[name]}
            if sum(bad.values()) >= _LEAST_BAD:
                yield _finding(DAMAGED, host, nic, bad, counts=counts, fix=DAMAGED.fix)
        if seat in receivers:
            yield from _dropped(host, nics)


def _dropped(host: str, nics: Mapping[str, Counter[str]]) -> Iterator[Finding]:
    packets = max(counts["rx_packets"] for counts in nics.values())
    for nic, counts in nics.items():
        lost = {name: counts[name] for name in (*_RING, _OTHER, _BACKLOG) if counts[name]}
        if sum(lost.values()) < max(_LEAST_DROPPED, _SHARE * packets):
            continue
        if nic == "":
            yield _finding(DROPPED, host, nic, lost, counts=counts, fix=_LONGER_BACKLOG)
        else:
            ring = any(name in lost for name in _RING)
            fix = _LONGER_RING if ring else DROPPED.fix
            yield _finding(DROPPED, host, nic, lost, counts=counts, fix=fix)


def _finding(
    kind: Kind,
    host: str,
    nic: str,
    shown: Mapping[str, int],
    *,
    counts: Mapping[str, int],
    fix: str,
) -> Finding:
    said = ", ".join(f"{name} +{by}" for name, by in sorted(shown.items()))
    of = f"{nic}: " if nic else ""
    return Finding(
        kind,
        f"{of}{said} while the hosts were examined",
        Where(hosts=(host,), interfaces=(nic,) if nic else ()),
        {"grown": dict(counts)},
        fix=fill(fix, NIC=nic) if nic else fix,
        confidence=Confidence.LIKELY,
    )


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _softnet(root: Path) -> int:
    """Packets that the CPUs of this machine dropped, as their backlog was full."""
    total = 0
    try:
        lines = (root / "proc/net/softnet_stat").read_text(encoding="ascii").splitlines()
        for line in lines:
            total += int(line.split()[_DROPPED_COLUMN], 16)
    except (OSError, ValueError, IndexError):
        return 0
    return total
