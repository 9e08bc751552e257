"""Does NCCL_IB_HCA name ports that exist and are up?

What it checks
--------------
NCCL_IB_HCA, from the environment and NCCL's configuration files, is read as NCCL reads it: `^`
excludes, `=` (after it) means whole names, without it names are prefixes, and `:1` is a port. Every
name is compared with the ports that the kernel of the host shows (/sys/class/infiniband). Every
rank is checked, as a wrapper may give each rank its own list. The order of the names has no effect:
NCCL counts its ports by PCI address (before 2.29.7 as libibverbs lists them); whether the ports at
the same places of that list are the same on all hosts, checks `rails` and `fabric_ports` say.
Nothing is sent.

Why it matters
--------------
A list that matches no active port is no error for NCCL: it silently uses sockets, many times
slower; with NCCL_NET=IB it fails. If this happens on some hosts only, they cannot connect to the
others. Without `=` a name is a prefix: `mlx5_1` also matches mlx5_10 to mlx5_19.

How to fix
----------
List the devices with `ibv_devices` or `ls /sys/class/infiniband`, and write whole names: export
NCCL_IB_HCA==mlx5_0:1,mlx5_3:1. Or unset it: NCCL then takes every active port.

When it is wrong
----------------
A list for several kinds of hosts names devices that some hosts do not have: a name that exists on
any host is accepted. A port that is named and down is reported even if the host can work without
it. A container may show devices in sysfs that it cannot open. Plug-ins have their own rules.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
NCCL user guide, environment variables (NCCL_IB_HCA); NCCL src/transport/net_ib/init.cc and
src/misc/utils.cc.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Rank,
    Scope,
    Severity,
    Skip,
    Step,
    Where,
    look,
    place_of,
    shell,
)
from nccl_doctor.toolkit.fabric.down import ports_down, seen_by_rdma
from nccl_doctor.toolkit.fabric.hca import HCA, HcaList, rdma_settings
from nccl_doctor.toolkit.fabric.ports import rdma_ports, speaks_verbs

_LIST = Fix(
    look(shell("ibv_devices"), "the names"),
    Step(shell("# export NCCL_IB_HCA==DEVICE:NUMBER"), note="with one of them, and its port"),
    alternatives=[Fix(Step(shell("unset NCCL_IB_HCA")))],
)

UNMATCHED = Kind(
    "ib-hca-unmatched",
    Layer.ENV,
    "NCCL_IB_HCA names devices that do not exist",
    "NCCL silently ignores them; if no device is left, it uses sockets.",
    _LIST,
    Severity.WARN,
)
EXCLUDES_ALL = UNMATCHED.variant(
    title="NCCL_IB_HCA excludes every RDMA port of the host",
    why="NCCL then silently uses sockets, which are much slower.",
)
PORT_DOWN = Kind(
    "ib-hca-port-down",
    Layer.ENV,
    "NCCL_IB_HCA names a port that is not active",
    "NCCL silently ignores it; if no port is left, it uses sockets.",
    Fix(
        look(shell("ibstat"), "bring the port up: cable, switch, subnet manager"),
        alternatives=["name another in NCCL_IB_HCA"],
    ),
    Severity.WARN,
)
OVERMATCH = Kind(
    "ib-hca-overmatch",
    Layer.ENV,
    "NCCL_IB_HCA also matches devices that it does not name",
    "Without `=` every name is a prefix: NCCL uses, or excludes, more devices than intended.",
    Fix(Step(shell("# export NCCL_IB_HCA==DEVICE:NUMBER"), On.EVERY, note="whole names")),
    Severity.WARN,
)


@dataclass(frozen=True)
class _List:
    """A value of NCCL_IB_HCA, with the host and the ranks that have it; `codes`: port → the code
    under which check `rdma` reports why it is not active on this host.
    """

    where: Where
    facts: Mapping[str, Any]
    codes: Mapping[str, str]


class IbHca(Check):
    """Reads the list as NCCL does, on every rank: each process has its own environment."""

    name = "ib_hca"
    layer = Layer.ENV
    scope = Scope.RANK
    kinds = (UNMATCHED, PORT_DOWN, OVERMATCH)
    reads = ("rdma",)

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`hca`: the value, and its `origin`; `net`: the value of NCCL_NET; `ports`: [device, port,
        state].
        """
        settings = rdma_settings(ctx)
        if HCA not in settings or not HcaList.parse(settings[HCA].value).entries:
            raise Skip(f"{HCA} is not set")
        ctx.breadcrumb("read /sys/class/infiniband")
        ports = rdma_ports(ctx.root / "sys/class/infiniband")
        return {
            "hca": settings[HCA].value,
            "origin": settings[HCA].origin,
            "net": settings["NCCL_NET"].value if "NCCL_NET" in settings else "",
            "ports": [
                [port["device"], int(port["port"]), port["state"]]
                for port in ports
                if speaks_verbs(port)
            ],
            "others": len([port for port in ports if not speaks_verbs(port)]),
        }

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on what each list leaves, then on single names that no host has."""
        lists = list(_lists(cluster))
        everywhere = {tuple(port) for each in lists for port in each.facts["ports"]}
        # A host without a list, or whose own list leaves RDMA ports, uses RDMA as well.
        roads = [facts["road"] for _, facts in cluster.facts("rdma")]
        somebody = any(_active(each.facts) for each in lists) or "infiniband" in roads
        for each in lists:
            if _active(each.facts):
                yield from _single_names(each, everywhere)
            else:
                yield from _nothing_left(each, others_go=somebody)


def _lists(cluster: Cluster) -> Iterator[_List]:
    """Each list once for each host; a list that all ranks of a host have belongs to the host."""
    codes: dict[str, dict[str, str]] = {}
    for down in ports_down(seen_by_rdma(cluster)):
        code = "rdma-port-unconfigured" if down.unconfigured else "rdma-port-down"
        codes.setdefault(down.host, {})[down.name] = code
    same: dict[tuple[int, str], tuple[Mapping[str, Any], list[Rank]]] = {}
    for rank, facts in cluster.facts("ib_hca"):
        same.setdefault((rank.host.id, json.dumps(facts, sort_keys=True)), (facts, []))[1].append(
            rank
        )
    for facts, ranks in same.values():
        host = ranks[0].host
        # Earlier versions read it once for each host.
        whole = "ib_hca" in host.facts or len(ranks) == len(cluster.ranks_on(host))
        where = Where(hosts=(host.label,))
        yield _List(where if whole else where | place_of(ranks), facts, codes.get(host.label, {}))


def _wanted(facts: Mapping[str, Any]) -> list[list[Any]]:
    hca = HcaList.parse(facts["hca"])
    return [port for port in facts["ports"] if hca.admits(port[0], port[1])]


def _active(facts: Mapping[str, Any]) -> list[list[Any]]:
    return [port for port in _wanted(facts) if port[2] == "ACTIVE"]


def _nothing_left(one: _List, *, others_go: bool) -> Iterator[Finding]:
    """A list that leaves no active port: a failure if other hosts use RDMA, or NCCL must."""
    facts = one.facts
    if not facts["ports"] and facts["others"]:
        return  # EFA alone, which this list does not choose
    setting = f"{HCA}={facts['hca']} ({facts['origin']})"
    wanted = _wanted(facts)
    there = any(port[2] == "ACTIVE" for port in facts["ports"])
    # Without any active port, it is not the list that is wrong: check rdma compares the hosts.
    severity = Severity.FAIL if there and (others_go or _has_to(facts)) else None
    if wanted:
        yield Finding(
            PORT_DOWN,
            f"{setting} matches {_names(wanted)}, none active; active: {_names(_up(facts))}",
            one.where | Where(interfaces=tuple(f"{d}:{p}" for d, p, _ in wanted)),
            {"ports": facts["ports"]},
            severity=severity,
            explained_by=None if severity else _why_down(one, wanted),
        )
    else:
        yield Finding(
            EXCLUDES_ALL if HcaList.parse(facts["hca"]).exclude else UNMATCHED,
            f"{setting} matches no port; the host has: {_names(facts['ports'])}",
            one.where,
            {"ports": facts["ports"]},
            severity=severity,
        )


def _why_down(one: _List, ports: Iterable[Iterable[Any]]) -> str | None:
    """The code under which check rdma reports all of these ports."""
    codes = {one.codes.get(f"{device}:{port}") for device, port, _ in ports}
    return codes.pop() if len(codes) == 1 else None


def _has_to(facts: Mapping[str, Any]) -> bool:
    return bool(facts["net"].lower() == "ib")


def _single_names(one: _List, everywhere: Collection[tuple[Any, ...]]) -> Iterator[Finding]:
    facts = one.facts
    hca = HcaList.parse(facts["hca"])
    devices = {device for device, _, _ in facts["ports"]}
    listed = {entry.name for entry in hca.entries}
    setting = f"{HCA}={facts['hca']} ({facts['origin']})"
    for entry in dict.fromkeys(hca.entries):
        if not any(hca.hits(entry, device, port) for device, port, _ in everywhere):
            yield Finding(
                UNMATCHED,
                f"{setting}: no host has {entry}; this host has: {_names(facts['ports'])}",
                one.where,
            )
        # A prefix of many may mean some that are unused.
        mine = [
            [d, p, s] for d, p, s in facts["ports"] if d == entry.name and hca.hits(entry, d, p)
        ]
        if mine and not hca.exclude and not any(state == "ACTIVE" for _, _, state in mine):
            yield Finding(
                PORT_DOWN,
                f"{setting}: {_names(mine)}",
                one.where | Where(interfaces=tuple(f"{d}:{p}" for d, p, _ in mine)),
                explained_by=_why_down(one, mine),
            )
        more = sorted(d for d in devices - listed if d.startswith(entry.name))
        if entry.name in devices and more and not hca.exact:
            does = "excludes" if hca.exclude else "matches"
            whole = f"{'^' * hca.exclude}={','.join(map(str, hca.entries))}"
            yield Finding(
                OVERMATCH,
                f"{setting}: {entry} also {does} {', '.join(more)}",
                one.where | Where(interfaces=tuple(more)),
                fix=Fix(
                    Step(
                        shell("export {:variable}={}", HCA, whole),
                        undo=shell("unset {:variable}", HCA),
                    )
                ),
            )


def _up(facts: Mapping[str, Any]) -> list[list[Any]]:
    return [port for port in facts["ports"] if port[2] == "ACTIVE"]


def _names(ports: Iterable[Iterable[Any]]) -> str:
    return ", ".join(f"{d}:{p} {state or 'unknown'}" for d, p, state in ports) or "none"
