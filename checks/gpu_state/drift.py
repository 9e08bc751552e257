"""Differences between GPUs that should be alike: on one host, and between hosts. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nccl_doctor.api import Severity
from nccl_doctor.toolkit.gpu.drift import Drift, common, drifts, known, models_of
from nccl_doctor.toolkit.versions import differences

from .trouble import is_readable

Gpu = Mapping[str, Any]
_ON = {0: "off", 1: "on"}
NEAREST = {
    "INTERNAL": "on one board",
    "SINGLE": "behind one PCIe switch",
    "MULTIPLE": "behind several PCIe switches",
    "HOSTBRIDGE": "below one host bridge",
    "NODE": "in one NUMA node",
    "SYSTEM": "in different NUMA nodes",
}
"""NVML_TOPOLOGY_* in words, from near to far."""


def within_host(gpus: Sequence[Gpu]) -> Iterator[Drift]:
    """Differences of GPUs of one host from its other GPUs; the places are their indices."""
    seen = {gpu["index"]: gpu for gpu in gpus if is_readable(gpu)}
    models = {index: {"model": gpu["name"]} for index, gpu in seen.items() if gpu["name"]}
    yield from drifts(differences(models), Severity.WARN, "the other GPUs of the host have")
    by_model: dict[Any, dict[int, Gpu]] = defaultdict(dict)
    for index, gpu in seen.items():
        by_model[gpu["name"]][index] = gpu
    for alike in by_model.values():
        for severity, traits in _TRAITS:
            stacks = {index: traits(gpu) for index, gpu in alike.items()}
            yield from drifts(differences(stacks), severity, "the other GPUs of the host have")


def across_hosts(hosts: Mapping[int, Mapping[str, Any]], *, count: bool) -> Iterator[Drift]:
    """Differences of hosts from the other hosts in their GPUs; the places are the keys of `hosts`.

    Args:
        hosts: what `gather_gpus` saw on each.
        count: whether to compare number and model, too.
    """
    every = {
        key: [gpu for gpu in facts["gpus"] if is_readable(gpu)] for key, facts in hosts.items()
    }
    every = {key: gpus for key, gpus in every.items() if gpus}
    if count:
        # A GPU that does not answer has its own finding.
        whole = {
            key: gpus
            for key, gpus in every.items()
            if len(gpus) == len(hosts[key]["gpus"]) and all(gpu["name"] for gpu in gpus)
        }
        numbers = {key: {"GPUs": models_of(gpus)} for key, gpus in whole.items()}
        yield from drifts(differences(numbers), Severity.WARN, "the other hosts have")
    by_model: dict[Any, dict[int, list[Gpu]]] = defaultdict(dict)
    for key, gpus in every.items():
        names = {gpu["name"] for gpu in gpus}
        if len(names) == 1:
            by_model[names.pop()][key] = gpus
    for alike in by_model.values():
        for severity, traits in _TRAITS:
            stacks = {
                key: {
                    **common([{**traits(gpu), **_links(gpu, severity)} for gpu in gpus]),
                    **_between(hosts[key], gpus, severity),
                }
                for key, gpus in alike.items()
            }
            yield from drifts(differences(stacks), severity, "the other hosts have")
    releases = {key: hosts[key]["driver"] for key in every if hosts[key]["driver"]}
    if len({release.split(".")[0] for release in releases.values()}) == 1:
        # Check `software` reports another branch.
        stacks = {key: {"driver": release} for key, release in releases.items()}
        yield from drifts(differences(stacks), Severity.INFO, "the other hosts have")


def _speed(gpu: Gpu) -> dict[str, str]:
    memory, ecc, mig = gpu["memory"], gpu["ecc"], gpu["mig"]
    return known(
        {
            "memory": memory and f"{memory['total'] / (1 << 30):.1f} GiB",
            "ECC": ecc and _ON.get(ecc[0]),
            "MIG": mig and _ON.get(mig[0]),
            "power limit": gpu["power_limit_mw"] and f"{gpu['power_limit_mw'] / 1000:.0f} W",
            "highest SM clock": gpu["max_sm_clock_mhz"] and f"{gpu['max_sm_clock_mhz']} MHz",
            "highest memory clock": gpu["max_memory_clock_mhz"]
            and f"{gpu['max_memory_clock_mhz']} MHz",
            "SM clock set": _clock_set(gpu),
            "PCIe": gpu["max_pcie_generation"]
            and gpu["max_pcie_width"]
            and f"generation {gpu['max_pcie_generation']} x{gpu['max_pcie_width']}",
        }
    )


def _clock_set(gpu: Gpu) -> str:
    """The SM clock that is set by hand; one below the default is a finding of the GPU itself."""
    now, usual = gpu.get("set_sm_clock_mhz"), gpu.get("default_sm_clock_mhz")
    return f"{now} MHz" if now and usual and now >= usual else ""


def _links(gpu: Gpu, severity: Severity) -> dict[str, str]:
    """NVLinks to compare between hosts; within one host this is `nvlink-down`."""
    links = gpu["nvlinks"] if severity is Severity.WARN else ()
    return {"NVLinks": f"{sum(links)} of {len(links)} up"} if links else {}


def _between(facts: Mapping[str, Any], gpus: Sequence[Gpu], severity: Severity) -> dict[str, str]:
    """Connections between the GPUs of a host; `host_wide` judges single pairs.

    Nothing for a host with a GPU that does not answer: not all pairs are known.
    """
    if len(gpus) < len(facts["gpus"]):
        return {}
    if severity is Severity.INFO:
        nodes = sorted(Counter(gpu["numa"] for gpu in gpus if gpu["numa"] is not None).items())
        levels = {level: len(pairs) for level, pairs in facts["nearest"].items()}
        return known(
            {
                "GPUs by NUMA node": ", ".join(f"{count} on {node}" for node, count in nodes),
                "pairs by common bus": ", ".join(
                    f"{levels[level]} {words}"
                    for level, words in NEAREST.items()
                    if level in levels
                ),
            }
        )
    total, able = sum(map(len, facts["p2p"].values())), len(facts["p2p"].get("OK", ()))
    words = {0: "no pair", total: "every pair"}.get(able, "") if total else ""
    return known({"GPUs that reach each other's memory": words})


def _make(gpu: Gpu) -> dict[str, str]:
    mode = gpu["compute_mode"]
    return known(
        {
            "VBIOS": gpu["vbios"],
            "persistence mode": _ON.get(gpu["persistence"]),
            "GSP firmware": _ON.get((gpu.get("gsp") or [None])[0]),
            # Prohibited is a finding of the GPU itself.
            "compute mode": {0: "Default", 3: "Exclusive Process"}.get(mode),
        }
    )


_TRAITS = ((Severity.WARN, _speed), (Severity.INFO, _make))
"""Traits that make a GPU slower or smaller than its peers, and traits that only differ."""
