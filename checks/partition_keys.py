"""Are the RDMA ports of all hosts in the same partition, at the index that NCCL uses?

What it checks
--------------
The partition key at the index NCCL_IB_PKEY (0 if it is not set) of every active port that NCCL's
settings allow (sysfs: pkeys). The keys of all hosts are compared: the number of the partition (15
bits), and whether a port is a full member of it or a limited one. Nothing is sent.

Why it matters
--------------
A queue pair sends with the key at that index, and the other end drops what has another partition.
NCCL finds that out only when the first ranks connect: `Got completion … with error 12` after a
while, or an error of ibv_modify_qp if the index is beyond the table. Two limited members of one
partition do not reach each other either. The subnet manager fills the tables: the same partition
may be at another index on hosts that are in more partitions.

How to fix
----------
`cat /sys/class/infiniband/*/ports/*/pkeys/*` shows the tables. Set NCCL_IB_PKEY on each host to the
index of the job's partition (a file such as /etc/nccl.conf can differ between hosts), or unset it.
If the key is missing, or is a limited one (below 0x8000), change the partition in the subnet
manager: opensm's partitions.conf, `ALL=full`, or the tenant's key in UFM.

When it is wrong
----------------
NCCL uses one index for all ports: a list of ports in several partitions is compared as it is. From
2.31.2 on, NCCL_IB_PKEY_VALUE may choose by value: then nothing is said. A container may not show
the tables. If ranks of one host have different variables, only those of its first rank are checked.
Whether the switches enforce partitions is not known.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
NCCL user guide, environment variables (NCCL_IB_PKEY); NCCL src/transport/net_ib/connect.cc
(`pkey_index`); InfiniBand architecture specification, volume 1, 10.9 (partitioning); kernel
documentation, ABI/stable/sysfs-class-infiniband (pkeys); opensm(8), partition configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Skip,
    Step,
    Untested,
    Where,
    export,
    look,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.fabric.hca import HCA, rdma_admits, rdma_settings
from nccl_doctor.toolkit.fabric.ports import rdma_ports, speaks_verbs, word
from nccl_doctor.toolkit.hosts import WHO, who_has_what
from nccl_doctor.toolkit.nccl.conf import Setting
from nccl_doctor.toolkit.variables.values import as_strtoll

INDEX, VALUE = "NCCL_IB_PKEY", "NCCL_IB_PKEY_VALUE"
_FIRST = 16
_FULL = 0x8000
"""Bit of a key that says that the port is a full member of the partition."""

EMPTY = Kind(
    "pkey-index-empty",
    Layer.ROUTE,
    "NCCL_IB_PKEY points to no partition key",
    "NCCL does not look for another one: ibv_modify_qp fails, or nothing arrives, when the first "
    "ranks connect.",
    Fix(
        Step(shell("unset NCCL_IB_PKEY")),
        alternatives=[
            Fix(
                look(
                    shell("cat /sys/class/infiniband/*/ports/*/pkeys/*"),
                    "set it to the index of the job's partition",
                )
            )
        ],
    ),
)
DIFFERS = Kind(
    "pkey-differs",
    Layer.ROUTE,
    "Hosts would use different partitions of the fabric",
    "A port drops what comes from another partition: the first communicator ends with error 12.",
    Fix(
        look(
            shell("cat /sys/class/infiniband/*/ports/*/pkeys/*"),
            "set NCCL_IB_PKEY on each host to the index of the job's partition",
            on=On.EVERY,
        ),
        alternatives=["correct the partition in the subnet manager"],
    ),
    effects=(Effect.DIFFERENCE,),
)
LIMITED = Kind(
    "pkey-limited",
    Layer.ROUTE,
    "Hosts are limited members of the partition",
    "Two limited members of a partition do not reach each other: the first communicator ends with "
    "error 12.",
    "make the ports full members of the partition in the subnet manager (opensm's partitions.conf: "
    "ALL=full)",
)


class PartitionKeys(Check):
    """Reads the key at NCCL's index, port by port, and compares hosts."""

    name = "partition_keys"
    layer = Layer.ROUTE
    kinds = (EMPTY, DIFFERS, LIMITED)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """Read the tables.

        Returns: `index`; `told`: the setting, or empty; `ports`: each `name`, `key` (None: the
        table has no such index), and `others`: index → key of the first other keys that it holds.
        """
        settings = rdma_settings(ctx)
        if VALUE in settings:
            raise Untested(f"{VALUE} chooses the key by its value")
        ctx.breadcrumb("read the partition keys in /sys/class/infiniband")
        hca = settings[HCA].value if HCA in settings else ""
        index = as_strtoll(settings.get(INDEX, Setting("0", "")).value)
        folder = ctx.root / "sys/class/infiniband"
        ports = []
        for port in rdma_ports(folder):
            wanted = speaks_verbs(port) and rdma_admits(hca, port["device"], int(port["port"]))
            if wanted and port["state"] == "ACTIVE":
                at = folder / port["device"] / "ports" / port["port"] / "pkeys"
                if port["link"] == "Ethernet" and index == 0:
                    continue  # RoCE has the default partition there, and iWARP none at all
                keys = _table(at, index)
                if keys:
                    ports.append(
                        {
                            "name": f"{port['device']}:{port['port']}",
                            "key": keys.pop(index, None),
                            "others": {str(n): key for n, key in sorted(keys.items()) if key},
                        }
                    )
        if not ports:
            raise Skip("no active port that NCCL may use shows its partition keys")
        told = f"{INDEX}={settings[INDEX].value}" if INDEX in settings else ""
        return {"index": index, "told": told, "ports": ports}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on entries without a key; then on hosts in another partition than the others, or
        with limited membership at both ends.
        """
        if not cluster.is_multi_host():
            return
        seen = {rank.host.label: facts for rank, facts in cluster.facts(self.name)}
        keys: dict[str, dict[str, int]] = {}
        for host, facts in seen.items():
            empty = [port["name"] for port in facts["ports"] if not port["key"]]
            if empty:
                yield _empty(host, facts, empty)
            else:
                keys[host] = {port["name"]: port["key"] for port in facts["ports"]}
        apart = list(_apart(seen, keys))
        yield from apart
        if not apart:
            yield from _limited(seen, keys)


def _table(folder: Path, index: int) -> dict[int, int]:
    """Index → key; empty where the key at this index cannot be read.

    Only the first keys and that one: the driver asks the firmware for each.
    """
    there = sorted(int(file.name) for file in folder.glob("*") if file.name.isdigit())
    keys: dict[int, int] = {}
    for each in there:
        if each < _FIRST or each == index:
            try:
                keys[each] = int(word(folder / str(each)), 16)
            except ValueError:
                if each == index:
                    return {}
    return keys


def _empty(host: str, facts: Mapping[str, Any], ports: list[str]) -> Finding:
    others = {each for port in facts["ports"] for each in port["others"].items()}
    shown = ", ".join(f"{index}: {key:#06x}" for index, key in sorted(others)) or "none"
    setting = facts["told"] or f"{INDEX} is not set (0)"
    return Finding(
        EMPTY,
        f"{setting}: {', '.join(ports)} has no key at index {facts['index']}; other keys: {shown}",
        Where(hosts=(host,), interfaces=tuple(ports)),
        {"ports": facts["ports"]},
        # Without a setting it is what the subnet manager gives, and it may not be ready.
        confidence=Confidence.CERTAIN if facts["told"] else Confidence.LIKELY,
    )


def _apart(
    seen: Mapping[str, Mapping[str, Any]], keys: Mapping[str, Mapping[str, int]]
) -> Iterator[Finding]:
    """Hosts that have no partition in common with most of the others."""
    partitions = {
        host: frozenset(key & ~_FULL for key in mine.values()) for host, mine in keys.items()
    }
    odd = odd_ones_out(partitions)
    if odd is None:
        return
    usual = odd.usual
    who = who_has_what(
        (host, ", ".join(f"{key | _FULL:#06x}" for key in sorted(mine)))
        for host, mine in partitions.items()
    )
    for host in odd.places:
        others = [mine for other, mine in partitions.items() if other != host]
        wanted = usual if usual is not None else frozenset().union(*others)
        if partitions[host] & wanted:
            continue  # several partitions, one for each rail: order is not known to matter
        shown = ", ".join(f"{key | _FULL:#06x}" for key in sorted(wanted))
        mine = ", ".join(f"{name} {key:#06x}" for name, key in keys[host].items())
        elsewhere = sorted(
            index
            for port in seen[host]["ports"]
            for index, key in port["others"].items()
            if key & ~_FULL in wanted
        )
        at = f"; here that partition is at index {elsewhere[0]}" if elsewhere else ""
        yield Finding(
            DIFFERS,
            f"{mine} at index {seen[host]['index']}; the other hosts: {shown}{at}",
            Where(hosts=(host,), interfaces=tuple(keys[host])),
            {"ports": seen[host]["ports"], WHO: who},
            fix=Fix(Step(shell("export {:variable}={}", INDEX, elsewhere[0]))) if elsewhere else "",
            confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
        )


def _limited(
    seen: Mapping[str, Mapping[str, Any]], keys: Mapping[str, Mapping[str, int]]
) -> Iterator[Finding]:
    """A finding on all hosts that are limited members, if there are two or more."""
    limited = {
        host: [name for name, key in mine.items() if not key & _FULL] for host, mine in keys.items()
    }
    limited = {host: names for host, names in limited.items() if names}
    if len(limited) > 1:
        values = sorted({f"{keys[host][n]:#06x}" for host, names in limited.items() for n in names})
        names = {n for mine in limited.values() for n in mine}
        full = [
            {(index, key) for index, key in port["others"].items() if key & _FULL}
            for host in limited
            for port in seen[host]["ports"]
        ]
        better = sorted(frozenset.intersection(*map(frozenset, full)))
        yield Finding(
            LIMITED,
            f"{', '.join(values)}: limited members on {len(limited)} of {len(keys)} hosts",
            Where(hosts=tuple(sorted(limited)), interfaces=tuple(sorted(names))),
            {"keys": {host: {n: f"{k:#06x}" for n, k in keys[host].items()} for host in limited}},
            fix=Fix(
                replace(
                    export(**{INDEX: str(better[0][0])}),
                    note=f"there all are full members of {better[0][1]:#06x}",
                ),
                alternatives=[LIMITED.fix],
            )
            if better
            else "",
            confidence=Confidence.LIKELY,
        )
