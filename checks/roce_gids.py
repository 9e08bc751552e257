"""Would NCCL use the same kind of GID on every RoCE port?

What it checks
--------------
The GID table of every Ethernet port of an RDMA device that NCCL would use (sysfs: gids,
gid_attrs/types), and the entry that NCCL would use: that of NCCL_IB_GID_INDEX, else the one that it
finds by NCCL_IB_ROCE_VERSION_NUM, NCCL_IB_ADDR_FAMILY and NCCL_IB_ADDR_RANGE (since 2.21.5; older
releases use index 0), and whether that is of a link-local address (fe80::, 169.254.x.x). Hosts are
compared; nothing is sent.

Why it matters
--------------
A queue pair needs a GID of the same kind at both ends: RoCE v1 cannot connect to v2, and a
link-local address is not routed. NCCL then fails after a while with `Got completion … with error
12`, or at once in ibv_modify_qp. The same index is another entry on hosts whose interfaces came up
in another order, or that have one more VLAN or address. An interface that got no address by DHCP
may have one of 169.254.0.0/16: NCCL takes it as any other, also before a good one that comes later
in the table.

How to fix
----------
Give the interface of the NIC its IPv4 address: the kernel then adds the RoCE v2 GID. Unset
NCCL_IB_GID_INDEX (NCCL 2.21.5 or later finds it), or set it on each host to the index that
`show_gids` shows for `v2` and the address. If the port has a good address beside a link-local one:
NCCL_IB_ADDR_RANGE=<its network>.

When it is wrong
----------------
A fabric in one layer 2 network may work on purpose with RoCE v1 or link-local GIDs; if all hosts
agree that is only a warning, and nothing if NCCL_IB_ADDR_RANGE is in 169.254.0.0/16. If hosts
differ, those that use the kind that NCCL looks for are not blamed, unless most hosts use another
kind on purpose. Whether GIDs reach each other is not tested. In a container the table may be that
of the host, and entries of other namespaces are empty. If ranks of one host have different
variables, only those of its first rank are checked; if a host has several versions of NCCL, the
oldest counts. A plug-in chooses by itself.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
NCCL user guide, environment variables (NCCL_IB_GID_INDEX, NCCL_IB_ROCE_VERSION_NUM,
NCCL_IB_ADDR_FAMILY, NCCL_IB_ADDR_RANGE); NCCL src/transport/net_ib/connect.cc; NVIDIA/nccl issues
426, 1664 and 1814; RFC 3927 (169.254.0.0/16).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

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
    look,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.fabric.gids import (
    GID_SETTINGS,
    SEARCHES_SINCE,
    GidKind,
    PickedGid,
    fixed_index,
    gid_kind,
    gid_tables,
    is_link_local_ipv4,
    pick_gid,
    wanted_kind,
)
from nccl_doctor.toolkit.fabric.hca import HCA, rdma_admits, rdma_settings
from nccl_doctor.toolkit.hosts import WHO, who_has_what
from nccl_doctor.toolkit.versions import loaded_nccl, release

EMPTY = Kind(
    "roce-gid-index-empty",
    Layer.ROUTE,
    "NCCL_IB_GID_INDEX points to an empty entry",
    "NCCL does not look for another entry: ibv_modify_qp fails when the first ranks connect.",
    Fix(
        Step(shell("unset NCCL_IB_GID_INDEX"), note="NCCL 2.21.5 or later finds the GID"),
        alternatives=[Fix(look(shell("show_gids"), "set the index of v2 and the IPv4 address"))],
    ),
)
MISSING = Kind(
    "roce-gid-missing",
    Layer.ROUTE,
    "NCCL would not use a RoCE v2 GID with an IPv4 address",
    "RoCE v1 and link-local GIDs (fe80::, 169.254.x.x) are not routed, and do not connect to the "
    "GIDs that NCCL looks for: NCCL fails with error 12.",
    Fix(
        look(shell("show_gids"), "give the interface its IPv4 address"),
        Step(shell("unset NCCL_IB_GID_INDEX"), note="or point it at that entry"),
    ),
    Severity.WARN,
)
USUAL = GidKind(2, "IPv4")
INDICES = "Hosts have the same kind of GID at different indices"
DIFFERS = Kind(
    "roce-gid-differs",
    Layer.ROUTE,
    "Hosts would use different kinds of GID",
    "RoCE v1 and v2, or IPv4 and IPv6, do not connect to each other: NCCL fails with error 12.",
    Fix(
        look(shell("show_gids"), "give the interface its IPv4 address"),
        Step(shell("unset NCCL_IB_GID_INDEX"), On.EVERY),
    ),
)


class RoceGids(Check):
    """Picks the GID as NCCL does, port by port, and compares hosts."""

    name = "roce_gids"
    layer = Layer.ROUTE
    kinds = (EMPTY, MISSING, DIFFERS)
    reads = ("backend_device", "nccl_library")

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`ports`: from `gid_tables`, the active ports that NCCL's settings allow; `fixed`: the
        index that the user set; `wanted`: [RoCE version, family]; `subnet`; `told`: the settings.
        """
        settings = rdma_settings(ctx)
        ctx.breadcrumb("read the GID tables in /sys/class/infiniband")
        hca = settings[HCA].value if HCA in settings else ""
        ports = [
            port
            for port in gid_tables(ctx.root)
            if port["state"] == "ACTIVE" and rdma_admits(hca, port["device"], int(port["port"]))
        ]
        if not ports:
            raise Skip("no active RoCE port")
        wanted = wanted_kind(settings)
        shown = [f"{n}={settings[n].value}" for n in GID_SETTINGS if n in settings]
        subnet = settings["NCCL_IB_ADDR_RANGE"].value if "NCCL_IB_ADDR_RANGE" in settings else ""
        facts = {
            "ports": ports,
            "fixed": fixed_index(settings),
            "wanted": [wanted.version, wanted.family],
            "subnet": subnet,
            "told": shown,
        }
        rows = [
            [name, pick.index, str(pick.kind) if pick.kind else "empty", pick.address or ""]
            for name, pick in _picks(facts, searches=True).items()
        ]
        columns = ["port", "GID index", "kind", "address"]
        return {**facts, "picks": {"columns": columns, "rows": rows}}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on empty entries; then on hosts whose kind of GID differs from the others."""
        versions = _versions(cluster)
        seen = {rank.host.label: facts for rank, facts in cluster.facts(self.name)}
        picks: dict[str, dict[str, PickedGid]] = {}
        for host, facts in seen.items():
            version = versions.get(host)
            searches = version is None or release(version) >= SEARCHES_SINCE
            mine = _picks(facts, searches=searches)
            empty = {name: pick for name, pick in mine.items() if pick.kind is None}
            if empty and facts["fixed"] is not None:
                yield _empty(host, facts, empty)
            else:
                picks[host] = mine
        yield from _kinds(seen, picks, versions)


def _versions(cluster: Cluster) -> dict[str, str]:
    """Host → the oldest NCCL version that its ranks load, or that their torch was built with."""
    loaded = loaded_nccl(cluster)
    for rank, facts in cluster.facts("backend_device"):
        if facts.get("nccl"):
            loaded.setdefault(rank.seat, facts["nccl"])
    found: dict[str, str] = {}
    for rank in cluster.present:
        if rank.seat in loaded:
            mine, host = loaded[rank.seat], rank.host.label
            known = found.setdefault(host, mine)
            if mine != known:
                found[host] = min(known, mine, key=release)
    return found


def _picks(facts: Mapping[str, Any], *, searches: bool) -> dict[str, PickedGid]:
    wanted = GidKind(*facts["wanted"])
    return {
        port["name"]: pick_gid(
            port["gids"], wanted, facts["fixed"], subnet=facts["subnet"], searches=searches
        )
        for port in facts["ports"]
    }


def _empty(host: str, facts: Mapping[str, Any], empty: Mapping[str, PickedGid]) -> Finding:
    wanted = GidKind(*facts["wanted"])
    good = sorted(
        {gid["index"] for port in facts["ports"] for gid in _good(port, facts)},
    )
    shown = ", ".join(map(str, good)) or "none"
    return Finding(
        EMPTY,
        f"NCCL_IB_GID_INDEX={facts['fixed']}: entry {facts['fixed']} of {', '.join(empty)} is "
        f"empty; entries with {wanted}: {shown}",
        Where(hosts=(host,), interfaces=tuple(empty)),
        {"ports": facts["ports"]},
    )


def _good(port: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Entries of the kind that NCCL looks for, of an address beyond the link."""
    wanted = GidKind(*facts["wanted"])
    return [
        gid
        for gid in port["gids"]
        if gid_kind(gid) == wanted and (_meant(facts) or not is_link_local_ipv4(gid["address"]))
    ]


def _meant(facts: Mapping[str, Any]) -> bool:
    """True if the user chose link-local addresses, by NCCL_IB_ADDR_RANGE."""
    return bool(facts["subnet"].startswith("169.254."))


def _kinds(
    seen: Mapping[str, Mapping[str, Any]],
    picks: Mapping[str, Mapping[str, PickedGid]],
    versions: Mapping[str, str],
) -> Iterator[Finding]:
    of_ports = {
        host: {name: _kind(pick, seen[host]) for name, pick in mine.items()}
        for host, mine in picks.items()
    }
    wrong = {host: _wrong(seen[host], mine) for host, mine in of_ports.items()}
    kinds = {host: frozenset(mine.values()) for host, mine in of_ports.items()}
    odd = odd_ones_out(kinds)
    guilty: set[str] = set()
    if odd is not None:
        sound = {host for host in kinds if not wrong[host]}
        guilty, usual = set(odd.places), odd.usual
        if _is_known(kinds, sound) and not _is_chosen(seen, kinds, usual):
            guilty, usual = set(kinds) - sound, kinds[next(iter(sound))]
        who = who_has_what((host, ", ".join(sorted(mine))) for host, mine in kinds.items())
        for host in kinds:
            if host in guilty:
                ports = _apart(picks[host], seen[host], usual) or wrong[host]
                found = _differs(host, seen[host], picks[host], ports, usual, tie=odd.tie)
                yield found.replaced(evidence={**found.evidence, WHO: who})
    bad = [host for host in kinds if host not in guilty and wrong[host]]
    for host in bad:
        version = versions.get(host)
        old = version is not None and release(version) < SEARCHES_SINCE
        mine = {name: picks[host][name] for name in wrong[host]}
        yield Finding(
            _missing(seen[host]),
            f"{_shown(mine, seen[host])}; {_why(seen[host], f'NCCL {version}' if old else '')}",
            Where(hosts=(host,), interfaces=wrong[host]),
            {"ports": seen[host]["ports"]},
            fix=_fix(seen[host], mine),
            confidence=Confidence.LIKELY,
        )
    if odd is None and not bad:
        yield from _indices(seen, picks)


def _wrong(facts: Mapping[str, Any], kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Ports that would not use the kind of GID that NCCL looks for."""
    wanted = str(GidKind(*facts["wanted"]))
    return tuple(name for name, kind in kinds.items() if kind != wanted)


def _kind(pick: PickedGid, facts: Mapping[str, Any]) -> str:
    """`RoCE v2 over IPv4`, `RoCE v2 over link-local IPv4`."""
    kind = str(pick.kind or "an empty entry")
    local = pick.is_link_local_ipv4 and not _meant(facts)
    return kind.replace("IPv4", "link-local IPv4") if local else kind


def _is_known(kinds: Mapping[str, frozenset[str]], sound: Collection[str]) -> bool:
    """True if some hosts, but not all, use the kind that NCCL looks for, and it is one kind."""
    return 0 < len(sound) < len(kinds) and len({kinds[host] for host in sound}) == 1


def _is_chosen(
    seen: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, frozenset[str]],
    usual: frozenset[str] | None,
) -> bool:
    """True if most hosts use one kind although they have the usual one as well: on purpose."""
    most = [host for host in kinds if kinds[host] == usual]
    return (
        usual is not None
        and len(usual) == 1
        and all(_good(port, seen[host]) for host in most for port in seen[host]["ports"])
    )


def _apart(
    picks: Mapping[str, PickedGid], facts: Mapping[str, Any], usual: frozenset[str] | None
) -> tuple[str, ...]:
    return tuple(
        name for name, pick in picks.items() if usual is None or _kind(pick, facts) not in usual
    )


def _missing(facts: Mapping[str, Any]) -> Kind:
    """The kind `MISSING`, in words that fit what the settings make NCCL look for."""
    wanted = GidKind(*facts["wanted"])
    if wanted == USUAL:
        return MISSING
    return MISSING.variant(
        title=f"NCCL would not use a {wanted} GID, which its settings ask for",
        fix=Fix(
            look(shell("show_gids"), f"or point NCCL_IB_GID_INDEX at an entry with {wanted}"),
            Step(shell("unset NCCL_IB_ADDR_FAMILY NCCL_IB_ROCE_VERSION_NUM"), On.EVERY),
        ),
    )


def _fix(facts: Mapping[str, Any], picks: Mapping[str, PickedGid]) -> str:
    """The command for a link-local address that stands before a good one; else empty."""
    ports = {port["name"]: port for port in facts["ports"]}
    local = [name for name, pick in picks.items() if pick.is_link_local_ipv4]
    if facts["fixed"] is not None or not local or not all(_good(ports[n], facts) for n in local):
        return ""
    good = _good(ports[local[0]], facts)[0]["address"]
    return Fix(
        Step(shell("# export NCCL_IB_ADDR_RANGE=ADDRESS"), On.EVERY, note=f"the network of {good}"),
        alternatives=["take the 169.254 address off the interface"],
    )


def _differs(
    host: str,
    facts: Mapping[str, Any],
    picks: Mapping[str, PickedGid],
    ports: tuple[str, ...],
    usual: frozenset[str] | None,
    *,
    tie: bool,
) -> Finding:
    """Finding on one host; `ports`: those to blame; `usual`: the kind of the other hosts."""
    wanted = GidKind(*facts["wanted"])
    others = " and ".join(sorted(usual)) if usual else "another kind"
    # The fault: the others have the kind that NCCL looks for, and this host does not.
    lacks = tuple(each["name"] for each in facts["ports"] if not _good(each, facts))
    missing = bool(lacks) and usual is not None and str(wanted) in usual
    return Finding(
        _missing(facts) if missing else DIFFERS,
        f"{_shown(picks, facts)}; the other hosts: {others}; {_why(facts, '')}",
        Where(hosts=(host,), interfaces=ports),
        {"ports": facts["ports"]},
        fix=_fix(facts, picks),
        severity=Severity.FAIL,
        confidence=Confidence.POSSIBLE if tie else Confidence.LIKELY,
    )


def _indices(
    seen: Mapping[str, Mapping[str, Any]], picks: Mapping[str, Mapping[str, PickedGid]]
) -> Iterator[Finding]:
    """Note if all hosts use the right kind, but at different indices."""
    indices = {host: frozenset(p.index for p in mine.values()) for host, mine in picks.items()}
    odd = odd_ones_out(indices)
    if odd is None or any(seen[host]["fixed"] is not None for host in indices):
        return
    shown = ", ".join(
        str(index) for index in sorted({i for mine in indices.values() for i in mine})
    )
    yield Finding(
        DIFFERS.variant(
            title=INDICES,
            why="Nothing is wrong now. A single NCCL_IB_GID_INDEX for all hosts would point to "
            "another kind of GID on some of them.",
        ),
        f"the same kind on every host, but at indices {shown}: one NCCL_IB_GID_INDEX for all hosts "
        "would be wrong on some",
        Where(hosts=tuple(sorted(odd.places))),
        {"indices": {host: sorted(mine) for host, mine in indices.items()}},
        fix="set no NCCL_IB_GID_INDEX",
        severity=Severity.INFO,
    )


def _shown(picks: Mapping[str, PickedGid], facts: Mapping[str, Any]) -> str:
    """`mlx5_0:1, mlx5_1:1 index 3 RoCE v2 over IPv4`, once for ports that are alike."""
    alike: dict[str, list[str]] = {}
    for name, pick in picks.items():
        kind = _kind(pick, facts) if pick.kind else "empty"
        alike.setdefault(f"index {pick.index} {kind}", []).append(name)
    return ", ".join(f"{', '.join(names)} {what}" for what, names in alike.items())


def _why(facts: Mapping[str, Any], old: str) -> str:
    settings = ", ".join(facts["told"])
    return settings or (
        f"{old} uses index 0 unless NCCL_IB_GID_INDEX is set" if old else "NCCL found no better GID"
    )
