"""Are the RDMA ports of all hosts alike: number, fabric, rate, MTU, firmware, PCIe slot?

What it checks
--------------
The RDMA ports that NCCL's settings allow (NCCL_IB_HCA), as the kernel of each host shows them:
their number, link layer and subnet, rate, MTU (as check `rdma` reads it from libibverbs; for RoCE
also from its interface), firmware of the adapter, and width and speed of its PCIe slot. Hosts are
compared; nothing is sent. The error counters are read as well, for check `rdma_errors`.

Why it matters
--------------
Every collective is as slow as its slowest port, and NCCL does not report that a host has one rail
less. A port that is set to Ethernet while the others are InfiniBand, or that is in another subnet,
cannot connect. With a different MTU at each end, NCCL from 2.20 on may end with a local length or
access error, or hang.

How to fix
----------
ibstat and ibv_devinfo show the ports. Fewer devices: `lspci | grep -i mellanox`, kernel log (it
fell off the bus), container options. Rate: cable, transceiver, switch port. Link layer: mlxconfig
-d <device> set LINK_TYPE_P1=1 (InfiniBand) or 2 (Ethernet). MTU: RoCE: ip link set dev <nic> mtu
4200 or 9000 on every host; InfiniBand: ibv_devinfo shows active_mtu, which the partition of the
subnet manager limits (opensm's partitions.conf: mtu=5 is 4096). PCIe: reseat the adapter, or use
another slot.

When it is wrong
----------------
In clusters with several kinds of hosts, ports differ on purpose. NICs that are not for training
(storage, management) count as well, unless NCCL_IB_HCA leaves them out. The MTU of InfiniBand is
known only where libibverbs can be loaded and the device opened. Subnets that a router joins differ
on purpose. A fault that all hosts have is not seen, except for the PCIe slot. Where the ranks of a
host have different lists, the ports that any of them may use are compared.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
Kernel documentation, ABI/stable/sysfs-class-infiniband and ABI/testing/sysfs-bus-pci; NCCL user
guide, troubleshooting; NVIDIA/nccl issue 1524 and pull request 2135 (MTU).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Severity,
    Skip,
    Step,
    Where,
    fill,
    look,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.fabric.counters import error_counters
from nccl_doctor.toolkit.fabric.hca import HCA, rdma_admits, rdma_settings
from nccl_doctor.toolkit.fabric.ports import rdma_devices
from nccl_doctor.toolkit.hosts import WHO, who_has_what

from .lists import as_ranks_want, lists_of_ranks

MISSING = Kind(
    "rdma-device-missing",
    Layer.ROUTE,
    "A host has fewer RDMA ports than the others",
    "NCCL continues silently: the GPUs beside the missing port share the others, or rails do "
    "not match.",
    Fix(
        look(shell("ibv_devices")),
        look(shell("dmesg | grep -i -e mlx -e pcie"), "did it fall off the bus?"),
        alternatives=["in a container: look at the devices that it gets"],
    ),
    Severity.WARN,
)
FABRIC = Kind(
    "rdma-fabric-differs",
    Layer.ROUTE,
    "The RDMA ports of some hosts are in another fabric",
    "InfiniBand does not connect to Ethernet, nor one subnet to another: the first "
    "communicator fails or hangs.",
    Fix(
        look(shell("ibstat"), "the link layer of each port"),
        Step(
            shell("# mlxconfig -d DEVICE set LINK_TYPE_P1=1"),
            note="1 is InfiniBand, 2 Ethernet; then reboot",
            persists=True,
        ),
        alternatives=[Fix(text="select the right ports with NCCL_IB_HCA")],
    ),
)
RATE = Kind(
    "rdma-rate-differs",
    Layer.ROUTE,
    "RDMA ports run at another rate than on the other hosts",
    "Every collective is as slow as its slowest port.",
    Fix(look(shell("ibstat"), "check cable, transceiver and switch port of the slow one")),
    Severity.WARN,
)
MTU = Kind(
    "rdma-mtu-differs",
    Layer.ROUTE,
    "RDMA ports have another MTU than on the other hosts",
    "NCCL from 2.20 on may not use the smaller one of both ends: local length errors, or a hang.",
    Fix(
        Step(
            shell("# ip link set dev NIC mtu SIZE"),
            On.EVERY,
            note="RoCE: the same on every host and switch port",
        ),
        alternatives=[
            Fix(
                look(
                    shell("ibv_devinfo | grep mtu"),
                    "InfiniBand: the same for the partition and its ports in the subnet manager",
                )
            )
        ],
    ),
    Severity.WARN,
)
FIRMWARE = Kind(
    "rdma-firmware-differs",
    Layer.ROUTE,
    "Adapters of one kind have different firmware",
    "A fault of one firmware version then appears only on some hosts.",
    Fix(look(shell("mlxfwmanager --query"), "as root; install one firmware on all", on=On.EVERY)),
    Severity.INFO,
)
_ONE_SUBNET = Fix(
    look(shell("sminfo"), "the subnet: cable these ports to one fabric"),
    alternatives=["select the ports of one fabric with NCCL_IB_HCA"],
)
PCI = Kind(
    "rdma-pci-slow",
    Layer.ROUTE,
    "The PCIe slot of an RDMA adapter is slower than its ports",
    "The adapter can do more than the slot gives: every collective waits for it.",
    Fix(
        look(
            shell("lspci -vv -s ADDRESS | grep -e LnkCap: -e LnkSta:"),
            "reseat the adapter, or use another slot",
        )
    ),
    Severity.WARN,
)


class FabricPortsFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    at_s: float
    devices: list[dict[str, Any]]
    counters: dict[str, dict[str, int]]


class FabricPorts(Check):
    """RDMA ports as sysfs shows them, compared between hosts."""

    name = "fabric_ports"
    layer = Layer.ROUTE
    kinds = (MISSING, FABRIC, RATE, MTU, FIRMWARE, PCI)
    reads = ("environment", "rdma")

    def observe(self, ctx: Context) -> FabricPortsFacts:
        """Read the devices and their error counters.

        Returns: `devices`: from `rdma_devices`, each port with `wanted`; `counters`: from
        `error_counters`, read at the `time.monotonic()` second `at_s`.
        """
        settings = rdma_settings(ctx)
        ctx.breadcrumb("read /sys/class/infiniband")
        devices = rdma_devices(ctx.root)
        if not devices:
            raise Skip("no RDMA device here")
        hca = settings[HCA].value if HCA in settings else ""
        for device in devices:
            for port in device["ports"]:
                port["wanted"] = rdma_admits(hca, port["device"], int(port["port"]))
        return {
            "at_s": time.monotonic(),
            "devices": devices,
            "counters": error_counters(ctx.root),
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on one property after the other, without ports that are missing or down."""
        lists = lists_of_ranks(cluster)
        seen = {
            rank.host.label: as_ranks_want(facts["devices"], lists.get(rank.host.label, ()))
            for rank, facts in cluster.facts(self.name)
        }
        heard = {rank.host.label: facts.get("mtus") for rank, facts in cluster.facts("rdma")}
        wanted: dict[str, list[Mapping[str, Any]]] = {
            host: [_with_mtu(port, heard.get(host) or {}) for port in _ports(devices)]
            for host, devices in seen.items()
        }
        used = {
            host: [port for port in ports if port["state"] == "ACTIVE"]
            for host, ports in wanted.items()
        }
        yield from _missing(wanted)
        used = {host: ports for host, ports in used.items() if ports}
        layers = list(_layers(used))
        yield from layers
        if not layers:
            yield from _subnets(used)
        used = {host: _comparable(host, ports, layers) for host, ports in used.items()}
        for kind, field, unit in ((RATE, "rate", ""), (MTU, "mtu", "MTU ")):
            values = {
                host: {port["name"]: port[field] for port in ports if port[field]}
                for host, ports in used.items()
            }
            yield from _unlike(kind, values, unit)
        yield from _firmware(seen)
        for host, devices in seen.items():
            for device in devices:
                yield from _slot(host, device)


def _ports(devices: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (port for device in devices for port in device["ports"] if port["wanted"])


def _with_mtu(port: Mapping[str, Any], heard: Mapping[str, Any]) -> Mapping[str, Any]:
    """The port, with the MTU that check `rdma` has `heard` of, if any: name of a port → MTU."""
    mtu = heard.get(port["name"], port["mtu"])
    return port if mtu == port["mtu"] else {**port, "mtu": mtu}


def _missing(wanted: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Finding]:
    """Findings on hosts with fewer ports than most, up or down; on a tie nothing is certain."""
    names = {host: {port["name"] for port in ports} for host, ports in wanted.items()}
    odd = odd_ones_out({host: len(mine) for host, mine in names.items()})
    if odd is None:
        return
    usual = odd.usual if odd.usual is not None else max(len(mine) for mine in names.values())
    full = [mine for mine in names.values() if len(mine) == usual]
    for host in odd.places:
        mine = names[host]
        if len(mine) < usual:
            lacks = sorted(set.intersection(*full) - mine)
            shown = f": no {', '.join(lacks)}" if lacks else ""
            yield Finding(
                MISSING,
                f"{len(mine)} RDMA ports that NCCL may use, {usual} on the other hosts{shown}",
                Where(hosts=(host,), interfaces=tuple(lacks)),
                {"ports": sorted(mine)},
                confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
            )


def _layers(used: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Finding]:
    """Findings on hosts without the usual link layer; else on single ports with another one."""
    links = {
        host: {port["name"]: port["link"] for port in ports if port["link"]}
        for host, ports in used.items()
    }
    apart = list(_apart({host: frozenset(mine.values()) for host, mine in links.items()}, None))
    yield from apart
    reported = {host for finding in apart for host in finding.where.hosts}
    rest = {host: mine for host, mine in links.items() if host not in reported}
    for finding in _unlike(FABRIC, rest):
        yield finding.replaced(severity=Severity.WARN)


def _subnets(used: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Finding]:
    """Findings on hosts that have no InfiniBand subnet in common with most others."""
    subnets = {
        host: mine
        for host, ports in used.items()
        if (mine := frozenset(port["subnet"] for port in ports if port["subnet"]))
    }
    for finding in _apart(subnets, Severity.WARN):
        yield finding.replaced(fix=_ONE_SUBNET)


def _comparable(
    host: str, ports: Iterable[Mapping[str, Any]], layers: Iterable[Finding]
) -> list[Mapping[str, Any]]:
    """The ports to compare: without those of another link layer, whose rates differ anyway."""
    reported = [finding.where.interfaces for finding in layers if host in finding.where.hosts]
    if not reported:
        return list(ports)
    return [
        port for port in ports if not any(not names or port["name"] in names for names in reported)
    ]


def _apart(values: Mapping[str, frozenset[str]], severity: Severity | None) -> Iterator[Finding]:
    odd = odd_ones_out({host: mine for host, mine in values.items() if mine})
    if odd is None:
        return
    usual = odd.usual
    who = who_has_what((host, ", ".join(sorted(mine))) for host, mine in values.items() if mine)
    sets = [values[host] for host in odd.places]
    if usual is None and any(a & b for i, a in enumerate(sets) for b in sets[:i] if a != b):
        return
    for host in odd.places:
        if usual is None or not values[host] & usual:
            mine = ", ".join(sorted(values[host]))
            yield Finding(
                FABRIC,
                f"{mine} here; the other hosts: {', '.join(sorted(usual))}" if usual else who,
                Where(hosts=(host,)),
                {WHO: who},
                severity=severity,
                confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
            )


def _unlike(kind: Kind, seen: Mapping[str, Mapping[str, Any]], unit: str = "") -> Iterator[Finding]:
    """Findings on hosts where ports have a value that the usual host lacks or has less often.

    Names are not compared, as hosts may number their devices in another way. `unit`: in front of
    each value.
    """
    first = next(iter(seen.values()), {})
    if all(mine == first for mine in seen.values()):
        return
    values = {
        host: {name: f"{unit}{value}" for name, value in mine.items()}
        for host, mine in seen.items()
    }
    counts = {host: Counter(mine.values()) for host, mine in values.items() if mine}
    odd = odd_ones_out({host: tuple(sorted(count.items())) for host, count in counts.items()})
    if odd is None:
        return
    if odd.usual is not None:
        usual = most = Counter(dict(odd.usual))
    else:  # no usual host: what all have in common
        usual = Counter(dict.fromkeys(set.intersection(*(set(c) for c in counts.values())), 1))
        most = Counter()
        for count in counts.values():
            most |= count
    examples = [values[host] for host in counts if host not in odd.places]
    who = who_has_what((host, ", ".join(sorted(count))) for host, count in counts.items())
    for host in odd.places:
        mine = values[host]
        if all(counts[host][v] >= n for v, n in most.items()):
            continue  # it only has additional ports, perhaps for storage
        more = {v for v, n in counts[host].items() if v not in usual or (usual[v] < n and examples)}
        ports = [name for name, value in mine.items() if value in more]
        # A port of the same name that has the same value elsewhere is not the one that differs.
        missing = [n for n in ports if not any(each.get(n) == mine[n] for each in examples)]
        ports = missing or ports
        if ports:
            rest = set(usual) if examples else {v for c in counts.values() for v in c} - more
            yield Finding(
                kind,
                f"{', '.join(ports)}: {', '.join(sorted({mine[n] for n in ports}))}; the other "
                f"hosts: {', '.join(sorted(rest)) or 'another value'}",
                Where(hosts=(host,), interfaces=tuple(ports)),
                {"ports": dict(mine), WHO: who},
                confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
            )


def _firmware(seen: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Finding]:
    boards: dict[str, dict[str, set[str]]] = {}
    for host, devices in seen.items():
        for device in devices:
            if device["board"] and device["firmware"]:
                boards.setdefault(device["board"], {}).setdefault(host, set()).add(
                    device["firmware"]
                )
    for board, by_host in boards.items():
        odd = odd_ones_out({host: frozenset(found) for host, found in by_host.items()})
        if odd is None:
            continue
        who = who_has_what((host, ", ".join(sorted(found))) for host, found in by_host.items())
        for host in odd.places:
            usual = ", ".join(sorted(odd.usual)) if odd.usual else ""
            mine = ", ".join(sorted(by_host[host]))
            yield Finding(
                FIRMWARE,
                f"{board}: " + (f"{mine} here; the other hosts: {usual}" if usual else who),
                Where(hosts=(host,)),
                {WHO: who},
            )


def _slot(host: str, device: Mapping[str, Any]) -> Iterator[Finding]:
    """A finding on a slot that is slower than the adapter and than its active ports."""
    pci = device["pci"]
    width, speed = pci["width"], pci["speed"]
    if None in (width, speed, pci["width_max"], pci["speed_max"]):
        return
    if width >= pci["width_max"] and speed >= pci["speed_max"]:
        return
    gives = width * speed * (0.8 if speed <= 5 else 128 / 130)  # the coding on the line
    carries = sum(
        port["gbps"] or 0
        for port in device["ports"]
        if port["wanted"] and port["state"] == "ACTIVE"
    )
    if gives < carries:
        yield Finding(
            PCI,
            f"{device['device']} ({pci['address'] or 'PCI'}): x{width:.0f} at {speed:g} GT/s gives "
            f"{gives:.0f} Gb/s, its ports carry {carries:.0f}; the adapter supports "
            f"x{pci['width_max']:.0f} at {pci['speed_max']:g} GT/s",
            Where(hosts=(host,), devices=(device["device"],)),
            {"pci": dict(pci)},
            fix=fill(PCI.fix, ADDRESS=pci["address"]) if pci["address"] else "",
        )
