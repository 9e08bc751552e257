"""Hosts and GPUs that are not where their neighbours are in the NVLink fabric. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Effect,
    Finding,
    Fix,
    Host,
    Kind,
    Layer,
    On,
    Severity,
    Where,
    look,
    odd_ones_out,
    shell,
)
from nccl_doctor.toolkit.gpu.mnnvl import Clique, clique_of, fabric_gpus
from nccl_doctor.toolkit.gpu.nvml import device_name

DOMAIN_SPLIT = Kind(
    "nvlink-domain-split",
    Layer.DEVICE,
    "A host or GPU is in another NVLink domain or clique than its neighbours",
    "NCCL uses the network in place of NVLink between them, and all ranks wait for it.",
    Fix(
        look(shell("nvidia-smi -q | grep -A 6 Fabric"), on=On.EVERY),
        alternatives=["look at the partitions in the fabric manager of the NVSwitches (NMX-C)"],
    ),
    Severity.WARN,
    effects=(Effect.DIFFERENCE,),
)


class Gpu(NamedTuple):
    """The place of a GPU in the fabric."""

    name: str
    model: str
    chassis: str | None
    clique: Clique | None
    alone: bool
    """Registered, and in no domain."""


def members(cluster: Cluster) -> Iterator[tuple[Host, list[Gpu]]]:
    """Every host with those of its GPUs that answer and have a fabric."""
    for rank, facts in cluster.facts("gpu_state"):
        yield rank.host, [_place(gpu) for gpu in fabric_gpus(facts)]


def _place(gpu: Mapping[str, Any]) -> Gpu:
    fabric, clique = gpu["fabric"], clique_of(gpu)
    registered = fabric["state"] == "COMPLETED" and not fabric["status"]
    known = "cluster_uuid" in fabric
    alone = registered and known and clique is None
    return Gpu(device_name(gpu), gpu["name"] or "", gpu.get("chassis"), clique, alone)


def splits(cluster: Cluster, *, told_uuid: bool, told_clique: bool) -> Iterator[Finding]:
    """Findings on GPUs and hosts that NCCL cannot reach by NVLink where it should.

    `told_uuid`, `told_clique`: NCCL is told to take another domain or clique than NVML reports.
    """
    hosts: dict[int, Host] = {}
    whole: dict[int, Clique] = {}
    chassis: dict[int, str] = {}
    alone: dict[int, Host] = {}
    models: dict[int, set[str]] = {}
    for host, gpus in members(cluster):
        hosts[host.id] = host
        models[host.id] = {gpu.model for gpu in gpus}
        cliques = {gpu.clique for gpu in gpus if gpu.clique}
        if gpus and all(gpu.alone for gpu in gpus):
            alone[host.id] = host
        elif len(cliques) == 1:
            whole[host.id] = cliques.pop()
            shelves = {gpu.chassis for gpu in gpus}
            if len(shelves) == 1 and (shelf := shelves.pop()):
                chassis[host.id] = shelf
        elif not (told_uuid or told_clique):
            yield from _within(host, gpus)
    if not told_uuid:
        yield from _in_no_domain(alone, whole, models)
        yield from _in_chassis(hosts, whole, chassis)
    if not told_clique:
        yield from _in_domain(hosts, whole)


def _within(host: Host, gpus: list[Gpu]) -> Iterator[Finding]:
    """GPUs of one host in different cliques."""
    places = {gpu.name: gpu.clique for gpu in gpus if gpu.clique}
    odd = odd_ones_out(places)
    if odd is not None:
        yield Finding(
            DOMAIN_SPLIT,
            "GPUs of the host: " + _sides(Counter(places.values()), "GPU"),
            Where(hosts=(host.label,), devices=tuple(sorted(odd.places))),
            {"cliques": {name: str(clique) for name, clique in places.items()}},
            confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
        )


def _in_no_domain(
    alone: Mapping[int, Host], whole: Mapping[int, Clique], models: Mapping[int, set[str]]
) -> Iterator[Finding]:
    """Hosts in no domain, where hosts with the same GPUs are in one."""
    others = set().union(*(models[number] for number in whole))
    for number, host in alone.items():
        if models[number] & others and len(alone) < len(whole):
            yield Finding(
                DOMAIN_SPLIT,
                "its GPUs are in no NVLink domain; hosts with the same GPUs are: NCCL then uses "
                "the network between all hosts",
                Where(hosts=(host.label,)),
                confidence=Confidence.LIKELY,
            )


def _in_chassis(
    hosts: Mapping[int, Host], whole: Mapping[int, Clique], chassis: Mapping[int, str]
) -> Iterator[Finding]:
    """Hosts in another domain than the others in their chassis."""
    shelves: dict[str, dict[int, str]] = defaultdict(dict)
    for number, shelf in chassis.items():
        shelves[shelf][number] = whole[number].cluster_uuid
    for domains in shelves.values():
        odd = odd_ones_out(domains)
        if odd is not None:
            yield Finding(
                DOMAIN_SPLIT,
                "hosts of one chassis: " + _sides(Counter(domains.values()), "host", "domain "),
                Where(hosts=tuple(sorted(hosts[number].label for number in odd.places))),
                {"domains": {hosts[number].label: uuid for number, uuid in domains.items()}},
                confidence=Confidence.POSSIBLE if odd.tie else Confidence.LIKELY,
            )


def _in_domain(hosts: Mapping[int, Host], whole: Mapping[int, Clique]) -> Iterator[Finding]:
    """Hosts in another clique than the others of their domain."""
    domains: dict[str, dict[int, Clique]] = defaultdict(dict)
    for number, clique in whole.items():
        domains[clique.cluster_uuid][number] = clique
    for uuid, cliques in domains.items():
        odd = odd_ones_out(cliques)
        if odd is None:
            continue
        # Partitions are made on purpose as well; a job is seldom given a single host of one.
        numbers = Counter(clique.number for clique in cliques.values())
        strange = not odd.tie and len(odd.places) == 1 and len(cliques) > 2
        yield Finding(
            DOMAIN_SPLIT,
            f"hosts of NVLink domain {uuid}: " + _sides(numbers, "host", "clique "),
            Where(hosts=tuple(sorted(hosts[number].label for number in odd.places))),
            {"cliques": {hosts[number].label: str(each) for number, each in cliques.items()}},
            severity=Severity.WARN if strange else Severity.INFO,
            confidence=Confidence.LIKELY if strange else Confidence.POSSIBLE,
        )


def _sides(counts: Mapping[Any, int], what: str, of: str = "") -> str:
    sides = sorted(counts.items(), key=lambda side: (-side[1], str(side[0])))
    return ", ".join(f"{n} {what}{'s' if n > 1 else ''} in {of}{side}" for side, n in sides)
