"""Placement of a device mesh on the hosts of a cluster, and a better one. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nccl_doctor.api import Cluster, Fix, Step, shell
from nccl_doctor.toolkit.mesh import Mesh, Span, mesh_in_words, order_inside, spans

_TENSOR = frozenset(
    ("tp", "tensor", "tensor_parallel", "tensor_model_parallel", "mp", "model", "model_parallel")
)
"""Names of dimensions that exchange data within every layer."""
_ROOMY = frozenset(
    ("dp", "ddp", "data", "data_parallel", "dp_replicate", "replicate", "pp", "pipe", "pipeline")
)
"""Names of dimensions that are meant to cross hosts."""
_SHOWN = 8


@dataclass(frozen=True)
class MeshPlaces:
    """Placement of a mesh on several hosts.

    `words` describe it for every dimension, `figures` are the same as data for JSON. `trouble` and
    `fix` are empty where nothing is wrong, or nothing helps.
    """

    words: str
    figures: Mapping[str, Any]
    trouble: str = ""
    fix: str = ""


def mesh_on_hosts(cluster: Cluster) -> MeshPlaces | None:
    """Placement of the job's mesh, whose sizes fit the world, on the hosts.

    A tensor parallel dimension (by its name; where there is none, the innermost one of several)
    should stay inside hosts. One that is larger than a host cannot.

    Returns: None with only one host, or where some rank's host is unknown.
    """
    mesh, hosts = cluster.job.mesh, _host_of_each_rank(cluster)
    if len(set(hosts)) < 2:
        return None
    lies = spans(mesh, hosts)
    figures = {
        "mesh": mesh_in_words(mesh),
        "dimensions": {span.dimension: _in_figures(span) for span in lies},
    }
    words = "; ".join(_in_words(span) for span in lies)
    found = (each for span in _busy(lies) for each in _trouble(mesh, span, hosts))
    trouble, fix = next(found, ("", ""))
    return MeshPlaces(words, figures, trouble, fix)


def _host_of_each_rank(cluster: Cluster) -> list[str]:
    """Host labels in order of rank; empty where a rank's host is not known, or known twice."""
    hosts = {rank.rank: rank.host for rank in cluster.ranks if rank.rank is not None}
    if len(cluster.ranks) != cluster.world_size or set(hosts) != set(range(cluster.world_size)):
        return []
    names = Counter(host.label for host in cluster.hosts)
    return [
        f"{host.label} (node {host.node_rank})" if names[host.label] > 1 else host.label
        for host in (hosts[rank] for rank in range(cluster.world_size))
    ]


def _busy(lies: Sequence[Span]) -> list[Span]:
    """Dimensions that should stay inside hosts."""
    tensor = [span for span in lies if span.dimension.lower() in _TENSOR]
    last = lies[-1]
    if tensor or len(lies) == 1 or last.dimension.lower() in _ROOMY:
        return tensor
    return [last]


def _trouble(mesh: Mesh, span: Span, hosts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(trouble, fix) of a dimension that crosses hosts without need."""
    counts = sorted(set(Counter(hosts).values()))
    name, size = span.dimension, span.size
    if not span.crossing or size > counts[-1]:
        return
    order = order_inside(mesh, name, hosts)
    if order is not None:
        better = mesh_in_words(order)
        yield (
            f"{name} crosses hosts; in the order {better} it would not",
            Fix(Step(shell("# --mesh {}", better), note="and the same order in the job")),
        )
    elif name.lower() not in _TENSOR:
        return
    elif any(count % size for count in counts):
        of_each = " or ".join(map(str, counts))
        yield (
            f"{name} crosses hosts: {size} does not divide the {of_each} ranks of a host",
            f"choose a size of {name} that divides the number of ranks of each host"
            if math.gcd(*counts) > 1
            else "start the same number of ranks on every host",
        )
    elif len(list(groupby(hosts))) > len(set(hosts)):
        yield (
            f"{name} crosses hosts in any order: neighbouring ranks are on different hosts",
            Fix(
                Step(shell("# srun --distribution=block"), note="numbers the ranks host by host"),
                alternatives=["elsewhere: by the slots in a hostfile"],
            ),
        )


def _in_words(span: Span) -> str:
    what = f"{span.dimension}={span.size}"
    if not span.crossing:
        return f"{what} inside hosts"
    if len(span.crossing) < span.groups:
        some = f"{len(span.crossing)} of {span.groups} groups"
        return f"{what} across up to {span.widest} hosts in {some}"
    return f"{what} across {span.widest} hosts"


def _in_figures(span: Span) -> dict[str, Any]:
    return {
        "size": span.size,
        "groups": span.groups,
        "groups_across_hosts": len(span.crossing),
        "most_hosts_of_a_group": span.widest,
        "across_hosts": {group.name: _few(there) for group, there in span.crossing[:_SHOWN]},
    }


def _few(names: Sequence[str]) -> list[str]:
    more = len(names) - _SHOWN
    return [*names[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
