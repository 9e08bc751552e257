"""Differences between GPUs that should be alike: on one host, and between hosts. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache

from nccl_doctor.api import Severity
from nccl_doctor.toolkit.gpu.drift import Drift, common, drifts, known, models_of
from nccl_doctor.toolkit.versions import differences

from .peers import HostGpus, Peers
from .traits import TRAITS_OF

NEAREST = {
    "INTERNAL": "on one board",
    "SINGLE": "behind one PCIe switch",
    "MULTIPLE": "behind several PCIe switches",
    "HOSTBRIDGE": "below one host bridge",
    "NODE": "in one NUMA node",
    "SYSTEM": "in different NUMA nodes",
}
"""NVML_TOPOLOGY_* in words, from near to far."""


def within_host(host: HostGpus) -> Iterator[Drift]:
    """Differences of GPUs of one host from its other GPUs; the places are their indices."""
    models = {gpu["index"]: {"model": gpu["name"]} for gpu in host.readable if gpu["name"]}
    yield from drifts(differences(models), Severity.WARN, "the other GPUs of the host have")
    for peers in host.by_model.values():
        indices = [gpu["index"] for gpu in peers.gpus]
        for severity, traits in peers.traits.items():
            stacks = dict(zip(indices, traits, strict=True))
            yield from drifts(differences(stacks), severity, "the other GPUs of the host have")


def across_hosts(hosts: Mapping[int, HostGpus], *, count: bool) -> Iterator[Drift]:
    """Differences of hosts from the other hosts in their GPUs; the places are the keys of `hosts`.

    Args:
        hosts: the GPUs of each.
        count: whether to compare number and model, too.
    """
    every = {key: host for key, host in hosts.items() if host.readable}
    if count:
        # A GPU that does not answer has its own finding.
        numbers = {
            key: {"GPUs": models_of(host.readable)}
            for key, host in every.items()
            if len(host.readable) == len(host.every) and all(host.by_model)
        }
        yield from drifts(differences(numbers), Severity.WARN, "the other hosts have")
    by_model: dict[str | None, dict[int, Peers]] = defaultdict(dict)
    for key, host in every.items():
        if len(host.by_model) == 1:
            for name, peers in host.by_model.items():
                by_model[name][key] = peers
    for alike in by_model.values():
        for severity in TRAITS_OF:
            stacks = {
                key: {
                    **common(peers.traits[severity]),
                    **_links(peers, severity),
                    **_between(hosts[key], severity),
                }
                for key, peers in alike.items()
            }
            yield from drifts(differences(stacks), severity, "the other hosts have")
    releases = {key: host.facts["driver"] for key, host in every.items() if host.facts["driver"]}
    if len({release.split(".")[0] for release in releases.values()}) == 1:
        # Check `software` reports another branch.
        stacks = {key: {"driver": release} for key, release in releases.items()}
        yield from drifts(differences(stacks), Severity.INFO, "the other hosts have")


def _links(peers: Peers, severity: Severity) -> dict[str, str]:
    """NVLinks to compare between hosts, where all GPUs of the host have as many; within one host
    this is `nvlink-down`.
    """
    if severity is not Severity.WARN:
        return {}
    (up, every), *others = {(sum(gpu["nvlinks"]), len(gpu["nvlinks"])) for gpu in peers.gpus}
    return {"NVLinks": f"{up} of {every} up"} if every and not others else {}


def _between(host: HostGpus, severity: Severity) -> Mapping[str, str]:
    """Connections between the GPUs of a host; `host_wide` judges single pairs.

    Nothing for a host with a GPU that does not answer: not all pairs are known.
    """
    if len(host.readable) < len(host.every):
        return {}
    if severity is Severity.INFO:
        levels = tuple((level, len(pairs)) for level, pairs in host.facts["nearest"].items())
        return _topology(tuple(gpu["numa"] for gpu in host.readable), levels)
    p2p = host.facts["p2p"]
    total, able = sum(map(len, p2p.values())), len(p2p.get("OK", ()))
    words = {0: "no pair", total: "every pair"}.get(able, "") if total else ""
    return known({"GPUs that reach each other's memory": words})


@lru_cache
def _topology(
    nodes: tuple[int | None, ...], levels: tuple[tuple[str, int], ...]
) -> Mapping[str, str]:
    """Places of GPUs in words, by the NUMA node of each, and the number of pairs at each level."""
    counts = sorted(Counter(node for node in nodes if node is not None).items())
    pairs = dict(levels)
    return known(
        {
            "GPUs by NUMA node": ", ".join(f"{count} on {node}" for node, count in counts),
            "pairs by common bus": ", ".join(
                f"{pairs[level]} {words}" for level, words in NEAREST.items() if level in pairs
            ),
        }
    )
