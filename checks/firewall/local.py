"""Rules and routes of a host that may explain failed calls, by its own tools and kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from nccl_doctor.api import Context
from nccl_doctor.toolkit.firewall.netfilter import Packet, Rules
from nccl_doctor.toolkit.firewall.rulesets import read_rules
from nccl_doctor.toolkit.net.interfaces import Interface, interfaces
from nccl_doctor.toolkit.net.ports import port_range, reserved_ports
from nccl_doctor.toolkit.net.routes import reverse_path_filter
from nccl_doctor.toolkit.net.rtnetlink import leads_back, vrf_of, way_in, way_to

from .culprits import follow_pairs
from .windows import open_windows


class RulesFacts(TypedDict):
    """Facts that `observe` returns in round `rules`."""

    readable: bool
    reason: str
    managers: list[str]
    drops: list[str]
    hits: list[dict[str, Any]]
    open: list[tuple[int, int]]
    reserved: str
    ways: list[dict[str, Any]]


def observe_rules(ctx: Context) -> RulesFacts:
    """Follow the failed calls in `params` through the rules and routes of this host.

    `open`: ranges of ports on which the rules let the first of them in, if they stop it;
    `reserved`: ports that the kernel gives to nobody.
    """
    ctx.breadcrumb("reading the firewall rules of this host")
    rules = read_rules(root=ctx.root)
    pairs, nics = ctx.params.get("pairs", ()), interfaces()
    hits = follow_pairs(rules, pairs, ctx.seat, nics, port_range(ctx.root), leads_back=leads_back)
    return {
        "readable": rules.readable,
        "reason": rules.reason,
        "managers": list(rules.managers),
        "drops": rules.dropping(),
        "hits": hits,
        "open": _open(rules, hits, nics, port_range(ctx.root)),
        "reserved": reserved_ports(ctx.root),
        "ways": ways_of_pairs(pairs, ctx.seat, nics, ctx.root),
    }


def _open(
    rules: Rules,
    hits: Iterable[Mapping[str, Any]],
    nics: Sequence[Interface],
    ports: tuple[int, int],
) -> list[tuple[int, int]]:
    """Windows in the rules that surely stop a call to this host; empty if they stop none."""
    names = {address: nic.name for nic in nics for address in nic.addresses}
    for hit in hits:
        if hit["sure"] and hit["incoming"] and hit["packet"] == "first":
            ends = (names.get(hit["target"], ""), hit["source"], hit["target"])
            return open_windows(rules, Packet(True, *ends, ports, ports))
    return []


def ways_of_pairs(
    pairs: Iterable[Mapping[str, Any]], seat: int, nics: Sequence[Interface], root: Path
) -> list[dict[str, Any]]:
    """Fate of packets of failed calls that reach this host: whether its kernel takes them, and by
    which interface it answers.

    Args:
        pairs: from `sample_for_rules`; those that do not touch this host are left out.
        seat: of this host.
        nics: of this host.
        root: holds proc.

    Returns: for each call `caller` and `listener`; `own` address, its `interface`, and that of the
    other end, `peer`; `taken`: whether the kernel takes a packet that arrives there; `filter`: the
    reverse path filter; `leaves`: the interface of the answer, empty where there is no way back.
    Calls about which the kernel may not be asked are left out.
    """
    owners = {address: nic for nic in nics for address in nic.addresses}
    found = []
    for pair in pairs:
        calling = seat == pair["caller"]
        own, peer = pair["source"], pair["target"]
        if not calling:
            own, peer = peer, own
        nic = owners.get(own)
        if nic is None or not (calling or seat == pair["listener"]):
            continue
        name = nic.name.partition(":")[0]
        arrives, answer = way_in(own, peer, name), way_to(peer, own, vrf_of(name))
        if arrives is not None and answer is not None:
            found.append(
                {
                    "caller": pair["caller"],
                    "listener": pair["listener"],
                    "own": own,
                    "peer": peer,
                    "interface": name,
                    "taken": not arrives.errno,
                    "filter": reverse_path_filter(name, root),
                    "leaves": answer.interface,
                }
            )
    return found
