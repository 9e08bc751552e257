"""Hosts where local ranks take the same GPUs as on other hosts, in another order. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    Severity,
    Where,
    export,
    odd_ones_out,
    place_of,
)
from nccl_doctor.toolkit.hosts import WHO, who_has_what

from .mapping import SeenByRank

GPU_ORDER = Kind(
    "gpu-order-differs",
    Layer.DEVICE,
    "Local ranks take GPUs in another order than on the other hosts",
    "Ranks with the same local number should be alike on all hosts: with another model, the "
    "faster ones wait for the slower, or run out of memory; with another slot, their traffic "
    "takes another path.",
    Fix(
        export(CUDA_DEVICE_ORDER="PCI_BUS_ID"),
        alternatives=[
            "give all hosts the same CUDA_VISIBLE_DEVICES: CUDA numbers GPUs by speed, "
            "the driver by PCI address"
        ],
    ),
    Severity.INFO,
    effects=(Effect.DIFFERENCE,),
)

_SHOWN = 4
_ORDER, _DEFAULT = "CUDA_DEVICE_ORDER", "FASTEST_FIRST"
Taken = Mapping[int, str]
"""Local rank → the model or the place of the GPU that it takes."""
Seen = Sequence[SeenByRank]
"""The ranks of one host."""


def judge_orders(cluster: Cluster, hosts: Iterable[Seen]) -> Iterator[Finding]:
    """Findings on hosts with another order of GPUs; hosts that take other GPUs are left out.

    Args:
        cluster: for the PCI addresses of GPUs and the NICs beside them, by check `gpu_affinity`.
        hosts: each that has a GPU for every rank.
    """
    known = {
        mine[0].rank.host.id: mine
        for mine in hosts
        if all(one.rank.local_rank is not None for one in mine)
    }
    reported = set()
    for host, found in _odd(known, {host: _models(mine) for host, mine in known.items()}, "takes"):
        reported.add(host)
        yield found.replaced(severity=Severity.WARN)
    beside = {rank.seat: facts for rank, facts in cluster.facts("gpu_affinity")}
    left = {
        host: mine
        for host, mine in known.items()
        # Where the NICs beside GPUs are known, these are compared: `gpu-nic-pairs-differ`.
        if host not in reported
        and not any((beside.get(one.rank.seat) or {}).get("rdma") for one in mine)
    }
    addresses = {host: _addresses(mine, beside) for host, mine in left.items()}
    numbers = {host: {} if addresses[host] else _numbers(mine) for host, mine in left.items()}
    for taken in (addresses, numbers):
        for _, found in _odd(known, taken, "takes the GPU"):
            yield found


def _models(mine: Seen) -> Taken:
    taken = {one.rank.local_rank or 0: str(one.own["name"]) for one in mine if one.own is not None}
    return taken if len(taken) == len(mine) else {}


def _addresses(mine: Seen, beside: Mapping[int, Mapping[str, Any]]) -> Taken:
    taken = {
        one.rank.local_rank or 0: f"at {facts['address']}"
        for one in mine
        if (facts := beside.get(one.rank.seat) or {}).get("address")
    }
    return taken if len(taken) == len(mine) else {}


def _numbers(mine: Seen) -> Taken:
    """GPU numbers by CUDA_VISIBLE_DEVICES, for unknown addresses; UUIDs differ on every host."""
    taken = {}
    for one in mine:
        text = one.facts["visible"].get("CUDA_VISIBLE_DEVICES")
        own = one.facts["device"]
        if own is None:
            return {}
        number = str(own)
        if text is not None:
            listed = [part.strip() for part in text.split(",")]
            if own >= len(listed) or not all(part.isdecimal() for part in listed):
                return {}
            number = str(int(listed[own]))
        taken[one.rank.local_rank or 0] = number
    return taken if len(taken) == len(mine) else {}


def _odd(
    known: Mapping[int, Seen], taken: Mapping[int, Taken], verb: str
) -> Iterator[tuple[int, Finding]]:
    """(host id, finding) for each host that takes the same GPUs in another order."""
    first = next(iter(taken.values()), {})
    if all(of_rank == first for of_rank in taken.values()):
        return
    alike: dict[tuple[str, ...], dict[int, tuple[tuple[int, str], ...]]] = defaultdict(dict)
    for host, of_rank in taken.items():
        if of_rank:
            alike[tuple(sorted(of_rank.values()))][host] = tuple(sorted(of_rank.items()))
    for orders in alike.values():
        odd = odd_ones_out(orders)
        if odd is None:
            continue
        who = who_has_what(
            (known[host][0].rank.host.label, ", ".join(what for _, what in order))
            for host, order in orders.items()
        )
        for host in odd.places:
            mine, order = known[host], orders[host]
            other = next(h for h, o in orders.items() if o != order and odd.usual in (None, o))
            usual = dict(orders[other])
            wrong = {local: what for local, what in order if usual.get(local) != what}
            shown = [
                f"local rank {local} {verb} {what}, on other hosts {usual.get(local, 'none')}"
                for local, what in list(wrong.items())[:_SHOWN]
            ]
            shown += [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            tie = "; equally many hosts have each order" if odd.tie else ""
            where = place_of(one.rank for one in mine if one.rank.local_rank in wrong)
            yield (
                host,
                Finding(
                    GPU_ORDER,
                    f"{'; '.join(shown)}{tie}",
                    where | Where(hosts=(mine[0].rank.host.label,)),
                    {
                        "taken": {str(local): what for local, what in order},
                        "visible": dict(mine[0].facts["visible"]),
                        WHO: who,
                    },
                    confidence=Confidence.POSSIBLE if odd.tie else Confidence.CERTAIN,
                    explained_by="env-differs" if _rule(mine) != _rule(known[other]) else None,
                ),
            )


def _rule(mine: Seen) -> set[str]:
    """CUDA's rule to number the GPUs of a host; check `environment` reports differences."""
    return {(one.rank.env.get(_ORDER) or _DEFAULT).casefold() for one in mine}
