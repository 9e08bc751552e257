"""Findings about the AMD GPUs of all hosts, from their facts. Pure."""

from __future__ import annotations

import binascii
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.api import (
    ALONE,
    Cluster,
    Confidence,
    Effect,
    Finding,
    Fix,
    Host,
    OutcomeStatus,
    Rank,
    Severity,
    Where,
    fill,
    look,
    shell,
)
from nccl_doctor.toolkit.gpu.drift import Drift, common, drifts, known, models_of
from nccl_doctor.toolkit.gpu.ends import certainty_of, certainty_of_reader
from nccl_doctor.toolkit.gpu.kinds import STATE_UNREAD
from nccl_doctor.toolkit.gpu.nvml import STEP, device_name
from nccl_doctor.toolkit.gpu.unread import is_unread, why_unread
from nccl_doctor.toolkit.hosts import WHO
from nccl_doctor.toolkit.shared_kinds import GPU_DIFFERS, GPU_UNHEALTHY
from nccl_doctor.toolkit.versions import differences

from .health import Gpu, Trouble, is_held_by_any, is_readable, troubles_of

CHECK = "amd_gpus"
"""Name of the check that these facts belong to."""
_NORMAL = ("NOT_SUPPORTED", "NOT_YET_IMPLEMENTED", "FUNCTION_NOT_FOUND", "FILE_NOT_FOUND")
"""Refusals of a GPU or a release that does not have something: no gap."""
_OTHERS = "the other GPUs of the host have"
_JUDGED = frozenset(
    [
        "handle",
        "memory",
        "temperature",
        "errors",
        "xgmi_errors",
        "pages",
        "pcie",
        "throttle",
        "xgmi_links",
        "processes",
    ]
)
"""Fields in which a fault would show; the others are compared only."""


def judge_amd(cluster: Cluster) -> Iterator[Finding]:
    """Findings on every host alone, then on differences between hosts."""
    yield from (_weighed(cluster, found) for found in _ended(cluster))
    hosts: dict[int, Mapping[str, Any]] = {}
    labels: dict[int, Host] = {}
    for rank, facts in cluster.facts(CHECK):
        hosts[rank.host.id], labels[rank.host.id] = facts, rank.host
        for found in _of_host(cluster, rank.host, facts):
            yield _weighed(cluster, found)
    compared = any(facts["devices"] for _, facts in cluster.facts("backend_device"))
    for drift in _across(hosts, count=not compared):
        where = Where(hosts=tuple(sorted(labels[key].label for key in drift.places)))
        who = drift.in_words({key: host.label for key, host in labels.items()})
        text = "; ".join(f"{trait} {words}" for trait, words in who.items())
        text = f"{text}: equally many have each" if drift.tie else drift.text
        yield Finding(GPU_DIFFERS, text, where, {WHO: who}, severity=drift.severity)


def why_refused(facts: Mapping[str, Any]) -> list[str]:
    """A clause for each GPU that the library refuses altogether.

    `facts` are those of `gather_amd`.
    """
    return [
        f"GPU {gpu['index']} could not be read: amdsmi refuses ({', '.join(gpu['refused'])})"
        for gpu in facts["gpus"]
        if not (is_readable(gpu) or gpu.get("wedged") or gpu.get("raised"))
    ]


def _weighed(cluster: Cluster, found: Finding) -> Finding:
    """The finding, only a warning for a job over gloo: it starts without its GPUs."""
    if cluster.backend != "nccl" and found.level is Severity.FAIL:
        return found.replaced(severity=Severity.WARN)
    return found


def _ended(cluster: Cluster) -> Iterator[Finding]:
    """Findings on observations that ended in a call to the driver, by themselves."""
    for item in cluster.ended(CHECK):
        end = item.outcome
        if end.last_step == STEP and certainty_of(end) is not None:
            how = "did not return" if end.status is OutcomeStatus.HUNG else "killed the process"
            crumb = end.breadcrumbs[-1]
            yield _no_answer(item.rank.host, f"{crumb.get('call')} {how}")


def _no_answer(host: Host, text: str) -> Finding:
    return Finding(
        GPU_UNHEALTHY,
        text,
        Where(hosts=(host.label,)),
        fix=Fix(
            look(shell("amd-smi list")),
            look(shell("dmesg | grep amdgpu"), "shows why"),
            alternatives=["drain and reboot the host"],
        ),
        confidence=Confidence.LIKELY,
    )


@dataclass(frozen=True)
class _Users:
    """The ranks of one host by the GPU that they take, named by bus id and by unique id.

    `complete`: the GPU of every rank of the host is known, so that all others belong to nobody.
    """

    by_name: Mapping[str, Sequence[Rank]]
    complete: bool

    def of(self, gpu: Gpu) -> list[Rank]:
        names = [str(gpu.get(name)) for name in ("bus_id", "unique_id") if gpu.get(name)]
        found = {rank.seat: rank for name in names for rank in self.by_name.get(name, ())}
        return list(found.values())

    def is_foreign(self, gpu: Gpu) -> bool:
        """True if surely no rank takes it; one that does not answer is never foreign."""
        return self.complete and is_readable(gpu) and not self.of(gpu)


def _users(cluster: Cluster, host: Host, gpus: Sequence[Gpu]) -> _Users:
    """By what torch says of the GPU that each rank takes, after HIP_VISIBLE_DEVICES and
    ROCR_VISIBLE_DEVICES have hidden some and changed the order.
    """
    by_name: dict[str, list[Rank]] = defaultdict(list)
    listed = {gpu.get(name) for gpu in gpus for name in ("bus_id", "unique_id")}
    ranks, placed = cluster.ranks_on(host), set()
    for rank in ranks:
        outcome = rank.facts.get("backend_device", {}).get(ALONE)
        facts = outcome.facts if outcome and outcome.status is OutcomeStatus.OK else {}
        own = facts.get("device")
        names = _names(facts["devices"][own]) if own is not None else []
        for name in names:
            by_name[name].append(rank)
        if listed.intersection(names):
            placed.add(rank.seat)
    most = max((rank.launch.local_world_size or 0 for rank in ranks if rank.launch), default=0)
    # Parts of one GPU have one bus id for torch.
    whole = all(gpu.get("compute_partition") in (None, "SPX") for gpu in gpus)
    complete = whole and bool(ranks) and len(ranks) >= most
    complete = complete and all(rank.seat in placed for rank in ranks)
    return _Users(by_name, complete)


def _names(device: Mapping[str, Any]) -> list[str]:
    """The bus id of a device of torch, and its unique id: bytes of HIP's UUID are its digits."""
    names = [str(device["bus_id"])] if device.get("bus_id") else []
    digits = str(device.get("uuid") or "").removeprefix("GPU-").replace("-", "")
    try:
        unique = binascii.unhexlify(digits).decode("ascii").lower()
    except ValueError:
        return names
    return [*names, unique] if re.fullmatch(r"[0-9a-f]{16}", unique) else names


def _of_host(cluster: Cluster, host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    error, gpus = facts["error"], facts["gpus"]
    if error and certainty_of_reader(error) is not None:
        yield _no_answer(host, f"{error['call']} {error['how']}")
    held = [gpu["wedged"] for gpu in gpus if is_held_by_any(gpu)]
    if stuck := next((one for one in held if certainty_of_reader(one) is not None), None):
        yield _no_answer(host, f"{stuck['call']} {stuck['how']}")
    users = _users(cluster, host, gpus)
    own = {*facts["own"], *(rank.pid for rank in cluster.ranks_on(host) if rank.pid)}
    readable = [gpu for gpu in gpus if is_readable(gpu)]
    same: dict[tuple[Trouble, bool], list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        for one in troubles_of(gpu, readable, own):
            same[one, users.is_foreign(gpu)].append(gpu)
    for (one, foreign), sick in same.items():
        buses = [str(gpu.get("bus_id") or gpu["index"]) for gpu in sick]
        found = Finding(
            one.kind,
            one.text,
            _place(users, host, sick),
            {"gpus": [_evidence(gpu) for gpu in sick]},
            fill(one.fix, BUS_ID=buses),
            one.severity,
            one.confidence,
            effects=(Effect.STAYS_IN_SERVICE,),
        )
        yield _not_ours(found, sick) if foreign else found
    yield from _gaps(users, host, facts)
    for drift in _within(readable):
        odd = [gpu for gpu in gpus if gpu["index"] in drift.places]
        found = Finding(GPU_DIFFERS, drift.text, _place(users, host, odd), severity=drift.severity)
        yield _not_ours(found, odd) if all(map(users.is_foreign, odd)) else found


def _gaps(users: _Users, host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Facts that could not be read, so that no rule judged them."""
    unread = why_unread(facts)
    gaps: dict[str, list[Gpu]] = defaultdict(list)
    for gpu in facts["gpus"]:
        for name, fields in gpu["refused"].items():
            silent = [field for field in fields if field in _JUDGED]
            if silent and name not in _NORMAL:
                gaps[f"{', '.join(silent)} ({name})"].append(gpu)
    said = [*unread, *gaps]
    if said:
        silent = [gpu["index"] for each in gaps.values() for gpu in each]
        sick = [gpu for gpu in facts["gpus"] if is_unread(gpu) or gpu["index"] in silent]
        yield Finding(
            STATE_UNREAD,
            f"not read: {'; '.join(said[:4])}",
            _place(users, host, sick),
            fix="run it as root, or as a member of the groups video and render",
            severity=Severity.WARN if unread else None,
        )


def _within(gpus: Sequence[Gpu]) -> Iterator[Drift]:
    """Differences of GPUs of one host from its other GPUs; the places are their indices."""
    models = {gpu["index"]: {"model": gpu["name"]} for gpu in gpus if gpu["name"]}
    yield from drifts(differences(models), Severity.WARN, _OTHERS)
    by_model: dict[Any, list[Gpu]] = defaultdict(list)
    for gpu in gpus:
        by_model[gpu["name"]].append(gpu)
    for alike in by_model.values():
        stacks = {gpu["index"]: _traits(gpu) for gpu in alike}
        yield from drifts(differences(stacks), Severity.WARN, _OTHERS)


def _across(hosts: Mapping[int, Mapping[str, Any]], *, count: bool) -> Iterator[Drift]:
    """Differences of hosts from the other hosts; the places are the keys of `hosts`."""
    every = {
        key: [gpu for gpu in facts["gpus"] if is_readable(gpu)] for key, facts in hosts.items()
    }
    every = {key: gpus for key, gpus in every.items() if gpus}
    if count:
        # A GPU that does not answer has its own finding; those of another container are not known.
        whole = {
            key: {"GPUs": models_of(gpus)}
            for key, gpus in every.items()
            if len(gpus) == len(hosts[key]["gpus"])
            and not hosts[key]["hidden"]
            and all(gpu["name"] for gpu in gpus)
        }
        yield from drifts(differences(whole), Severity.WARN, "the other hosts have")
    by_model: dict[Any, dict[int, list[Gpu]]] = defaultdict(dict)
    for key, gpus in every.items():
        names = {gpu["name"] for gpu in gpus}
        if len(names) == 1:
            by_model[names.pop()][key] = gpus
    for alike in by_model.values():
        stacks = {key: common([_traits(gpu) for gpu in gpus]) for key, gpus in alike.items()}
        yield from drifts(differences(stacks), Severity.WARN, "the other hosts have")
    releases = {key: {"driver": hosts[key]["driver"]} for key in every if hosts[key]["driver"]}
    yield from drifts(differences(releases), Severity.INFO, "the other hosts have")


def _traits(gpu: Gpu) -> dict[str, str]:
    """Traits that make a GPU slower or smaller than its peers."""
    memory, pcie, limit = gpu["memory"], gpu["pcie"] or {}, gpu["power_limit_mw"]
    clock, width, speed = gpu["max_sm_clock_mhz"], pcie.get("max_width"), pcie.get("max_speed")
    return known(
        {
            "memory": memory and f"{memory['total'] / (1 << 30):.1f} GiB",
            "compute partition": gpu["compute_partition"],
            "memory partition": gpu["memory_partition"],
            "power limit": limit and f"{limit / 1000:.0f} W",
            "highest clock": clock and f"{clock} MHz",
            "PCIe": width and speed and f"{speed} MT/s x{width}",
        }
    )


def _not_ours(found: Finding, gpus: Sequence[Gpu]) -> Finding:
    """The finding as information: a GPU of another job is not for this job to repair."""
    return found.replaced(
        message=f"{found.message}; no rank uses {'this GPU' if len(gpus) == 1 else 'these GPUs'}",
        fix="nothing for this job: inform the administrator of the host",
        severity=Severity.INFO,
    )


def _evidence(gpu: Gpu) -> dict[str, Any]:
    shown = (
        "index",
        "bus_id",
        "temperature",
        "memory",
        "errors",
        "pages",
        "xgmi_links",
        "throttle",
    )
    return {name: gpu[name] for name in shown if gpu.get(name) not in (None, [])}


def _place(users: _Users, host: Host, gpus: Sequence[Gpu]) -> Where:
    """The host, the GPUs, and the ranks that would take them, where that is known."""
    numbers = {rank.rank for gpu in gpus for rank in users.of(gpu) if rank.rank is not None}
    return Where(
        hosts=(host.label,),
        ranks=tuple(sorted(numbers)),
        devices=tuple(sorted({device_name(gpu) for gpu in gpus})),
    )
