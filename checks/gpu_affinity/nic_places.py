"""RDMA ports near each rank's GPU, as facts, and findings on unusual ones. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from nccl_doctor.api import (
    Confidence,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    On,
    Rank,
    Severity,
    Where,
    look,
    odd_ones_out,
    place_of,
    shell,
)
from nccl_doctor.toolkit.hosts import WHO, who_has_what

HOW_NEAR = ("same PCIe switch", "same root complex", "same NUMA node", "another NUMA node")
"""From near to far. In a virtual machine all devices often seem to be in one root complex."""
NIC_FAR = Kind(
    "gpu-far-from-nic",
    Layer.DEVICE,
    "The NIC next to a rank's GPU cannot be used",
    "NCCL sends through a NIC that is farther away and belongs to another rank: both share its "
    "bandwidth, and the data crosses the host.",
    Fix(
        look(shell("ibstat"), "the port that is named; and does NCCL_IB_HCA exclude it?"),
        look(shell("nvidia-smi topo -m"), "which NIC is near which GPU"),
    ),
    Severity.WARN,
)
NO_NEAR_NIC = NIC_FAR.variant(
    title="A rank's GPU is farther from a NIC than the other GPUs of its host",
    fix=Fix(
        look(shell("nvidia-smi topo -m"), "which NIC is near which GPU"),
        look(
            shell("lspci | grep -i -e mellanox -e ethernet -e infiniband"),
            "did one fall off the bus?",
        ),
        alternatives=["in a container: was it given to it?"],
    ),
)
NIC_PAIRS = Kind(
    "gpu-nic-pairs-differ",
    Layer.DEVICE,
    "GPUs and NICs are paired differently than on the other hosts",
    "NCCL connects GPUs of the same number through NICs of the same number: if a host pairs them "
    "differently, its traffic crosses rails, or the link between its sockets.",
    Fix(
        look(shell("nvidia-smi topo -m"), "compare", on=On.EVERY),
        alternatives=["have the same order in CUDA_VISIBLE_DEVICES on all hosts"],
    ),
    Severity.WARN,
    effects=(Effect.DIFFERENCE,),
)


class NicsBeside(TypedDict):
    """The RDMA ports near one GPU, as `nics_beside` returns them."""

    near: int | None
    at: list[int]
    names: list[str]
    own: dict[str, str]
    own_near: int | None
    count: int


def nics_beside(place: Mapping[str, Any], rails: Mapping[str, Any]) -> NicsBeside | None:
    """The RDMA ports near one GPU.

    Args:
        place: of `place_on_host`.
        rails: of `rails_of`.

    Returns: None if there is no RDMA device. `near`: index of `HOW_NEAR` of the nearest ports that
    NCCL may use, None if there is none or it is unknown; `at`: their places in NCCL's order;
    `names`; `own`: nearer devices of which no port may be used: PCI address → `down` or
    `left out`, and `own_near`; `count`: number of ports that may be used.
    """
    near_of = {nic["pci"]: nic["near"] for nic in place["nics"] if nic["near"] is not None}
    devices = [pci for pci in rails["slots"] if pci in near_of]
    if not devices:
        return None
    usable = [
        (number, rail)
        for number, rail in enumerate(rails["rails"])
        if rail["state"] == "ACTIVE" and rail["pci"] in near_of
    ]
    near = min((near_of[rail["pci"]] for _, rail in usable), default=None)
    beside = [(number, rail) for number, rail in usable if near_of[rail["pci"]] == near]
    nearest = min(near_of[pci] for pci in devices)
    wanted = {rail["pci"] for rail in rails["rails"]}
    own = {
        pci: "down" if pci in wanted else "left out"
        for pci in devices
        if near_of[pci] == nearest != near
    }
    return {
        "near": near,
        "at": [number for number, _ in beside],
        "names": [str(rail["name"]) for _, rail in beside],
        "own": own,
        "own_near": nearest if own else None,
        "count": len(usable),
    }


def judge_nics(seen: Iterable[tuple[Rank, Mapping[str, Any]]]) -> Iterator[Finding]:
    """Findings on ranks whose own NIC cannot be used or is farther than others', then on hosts.

    Args:
        seen: for each rank `uuid`, and `rdma` as `nics_beside` returns it. If no port of a host
            may be used, other checks report it.
    """
    hosts: dict[int, list[tuple[Rank, Mapping[str, Any]]]] = defaultdict(list)
    for rank, facts in seen:
        if facts.get("rdma") and facts["rdma"]["near"] is not None:
            hosts[rank.host.id].append((rank, facts))
    whole = []
    for mine in hosts.values():
        far = list(_far(mine))
        yield from far
        # Parts of one GPU are at one address. Check backend_device reports both.
        gpus = [gpu for _, facts in mine if (gpu := facts.get("address") or facts["uuid"])]
        shared = len(set(gpus)) < len(gpus)
        if not (far or shared) and all(rank.local_rank is not None for rank, _ in mine):
            whole.append(mine)
    yield from _pairs(whole)


def _far(mine: Sequence[tuple[Rank, Mapping[str, Any]]]) -> Iterator[Finding]:
    nears = [facts["rdma"]["near"] for _, facts in mine]
    if len(set(nears)) == 1 and not any(facts["rdma"]["own"] for _, facts in mine):
        return
    (usual, count), *_ = Counter(nears).most_common(1)
    most = count if 2 * count > len(mine) and count > 1 else 0
    for rank, facts in mine:
        rdma = facts["rdma"]
        farther = most and rdma["near"] > usual
        if not (rdma["own"] or farther):
            continue
        now = f"nearest usable NIC: {_names(rdma)} ({HOW_NEAR[rdma['near']]})"
        where = place_of([rank]) | Where(devices=(facts["uuid"],) if facts["uuid"] else ())
        if rdma["own"]:
            devices = ", ".join(f"{pci} is {why}" for pci, why in sorted(rdma["own"].items()))
            # A NIC that a setting excludes may be for storage.
            sure = Confidence.LIKELY if "down" in rdma["own"].values() else Confidence.POSSIBLE
            text = f"{devices} ({HOW_NEAR[rdma['own_near']]}); {now}"
            yield Finding(NIC_FAR, text, where, dict(rdma), confidence=sure)
        else:
            text = f"{now}; for {most} other ranks of the host: {HOW_NEAR[usual]}"
            yield Finding(NO_NEAR_NIC, text, where, dict(rdma), confidence=Confidence.LIKELY)


def _pairs(hosts: Sequence[Sequence[tuple[Rank, Mapping[str, Any]]]]) -> Iterator[Finding]:
    """Findings on hosts with equally many ranks and ports whose local ranks have other NICs."""
    sizes: dict[tuple[int, int], list[Sequence[tuple[Rank, Mapping[str, Any]]]]] = defaultdict(list)
    for mine in hosts:
        sizes[len(mine), mine[0][1]["rdma"]["count"]].append(mine)
    for alike in sizes.values():
        shapes = {mine[0][0].host.id: _shape(mine) for mine in alike}
        odd = odd_ones_out(shapes)
        if odd is None:
            continue
        who = who_has_what((mine[0][0].host.label, _in_words(mine)) for mine in alike)
        for mine in alike:
            host = mine[0][0].host
            if host.id not in odd.places:
                continue
            others = [odd.usual] if odd.usual else [s for h, s in shapes.items() if h != host.id]
            mismatched = [
                (rank, facts)
                for rank, facts in mine
                if any(_one(rank, facts) not in other for other in others)
            ]
            shown = [
                f"local rank {rank.local_rank} is next to {_names(facts['rdma'])} (rail "
                f"{', '.join(map(str, facts['rdma']['at']))}, {HOW_NEAR[facts['rdma']['near']]})"
                for rank, facts in mismatched[:4]
            ]
            shown += [f"and {len(mismatched) - 4} more"] if len(mismatched) > 4 else []
            rest = "the other hosts pair them equally" if odd.usual else "a tie between hosts"
            yield Finding(
                NIC_PAIRS,
                f"{'; '.join(shown)}; {rest}",
                place_of(rank for rank, _ in mismatched) | Where(hosts=(host.label,)),
                {
                    "pairs": {str(rank.local_rank): facts["rdma"]["names"] for rank, facts in mine},
                    WHO: who,
                },
                confidence=Confidence.LIKELY if odd.usual else Confidence.POSSIBLE,
            )


def _shape(mine: Sequence[tuple[Rank, Mapping[str, Any]]]) -> tuple[Any, ...]:
    return tuple(sorted([_one(rank, facts) for rank, facts in mine]))


def _one(rank: Rank, facts: Mapping[str, Any]) -> tuple[Any, ...]:
    rdma = facts["rdma"]
    return rank.local_rank or 0, rdma["near"], tuple(rdma["at"])


def _in_words(mine: Sequence[tuple[Rank, Mapping[str, Any]]]) -> str:
    """The NIC beside each local rank, in order."""
    return ", ".join(f"{rank.local_rank}: {_names(facts['rdma'])}" for rank, facts in mine)


def _names(rdma: Mapping[str, Any]) -> str:
    names = rdma["names"]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
