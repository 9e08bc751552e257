"""Findings about the GPUs of all hosts, from their facts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nccl_doctor.api import (
    Cluster,
    Confidence,
    Effect,
    Finding,
    Fix,
    Host,
    OutcomeStatus,
    Severity,
    Step,
    Where,
    fill,
    look,
    shell,
)
from nccl_doctor.toolkit.fabric.direct import blockers
from nccl_doctor.toolkit.gpu.ends import DRIVER_STEP, certainty_of, certainty_of_reader
from nccl_doctor.toolkit.gpu.kinds import (
    CLOCKS_LIMITED,
    GPU_BUSY,
    GPU_LOST,
    GPU_THROTTLED,
    NVLINK_DOWN,
    NVLINK_ERRORS,
    PCIE_DEGRADED,
    STATE_UNREAD,
)
from nccl_doctor.toolkit.gpu.lost import ended_in_driver, unless_serviced
from nccl_doctor.toolkit.gpu.nvml import LOST, device_name
from nccl_doctor.toolkit.hosts import WHO
from nccl_doctor.toolkit.shared_kinds import FABRIC_MANAGER_DOWN, GPU_DIFFERS, GPU_UNHEALTHY

from .drift import across_hosts, within_host
from .gpu_kinds import (
    C2C_DOWN,
    GPU_VIRTUAL,
    NVSWITCH_ERROR,
    P2P_UNAVAILABLE,
    P2P_UNSUPPORTED,
    PERSISTENCE_OFF,
)
from .health import troubles_of
from .host_wide import Between, Copying, troubles_between
from .peers import HostGpus
from .trouble import Gpu, Trouble
from .users import Users

CHECK = "gpu_state"
"""Name of the check that these facts belong to."""
GPU_STATE_KINDS = (
    GPU_LOST,
    GPU_UNHEALTHY,
    FABRIC_MANAGER_DOWN,
    GPU_BUSY,
    GPU_THROTTLED,
    CLOCKS_LIMITED,
    PCIE_DEGRADED,
    NVLINK_DOWN,
    NVLINK_ERRORS,
    C2C_DOWN,
    NVSWITCH_ERROR,
    P2P_UNAVAILABLE,
    P2P_UNSUPPORTED,
    GPU_VIRTUAL,
    PERSISTENCE_OFF,
    STATE_UNREAD,
    GPU_DIFFERS,
)
_SYSTEM_NOT_READY = 802  # CUresult: the fabric manager has not set NVSwitch up


def judge_gpus(cluster: Cluster) -> Iterator[Finding]:
    """Findings on every host alone, then on differences between hosts."""
    hosts: dict[int, HostGpus] = {}
    labels: dict[int, Host] = {}
    yield from (_weighed(cluster, finding) for finding in _wedged(cluster))
    for rank, facts in cluster.facts(CHECK):
        host, gpus = rank.host, HostGpus(facts)
        hosts[host.id], labels[host.id] = gpus, host
        for found in (*_unread(cluster, host, facts), *_of_host(cluster, host, gpus)):
            yield _weighed(cluster, unless_serviced(found, facts))
    compared = any(facts["devices"] for _, facts in cluster.facts("backend_device"))
    for drift in across_hosts(hosts, count=not compared):
        where = Where(hosts=tuple(sorted(labels[key].label for key in drift.places)))
        who = drift.in_words({key: host.label for key, host in labels.items()})
        text = "; ".join(f"{trait} {words}" for trait, words in who.items())
        text = f"{text}: equally many have each" if drift.tie else drift.text
        yield Finding(GPU_DIFFERS, text, where, {WHO: who}, severity=drift.severity)


def _weighed(cluster: Cluster, finding: Finding) -> Finding:
    """The finding, only a warning for a job over gloo: it starts without its GPUs."""
    if cluster.backend != "nccl" and finding.level is Severity.FAIL:
        return finding.replaced(severity=Severity.WARN)
    return finding


def _cuda_too(cluster: Cluster, host: Host) -> bool:
    """True if CUDA did not start, because of the driver: `backend_device` reports it, with the
    ranks.
    """
    return any(
        item.outcome.last_step == DRIVER_STEP and certainty_of(item.outcome) is not None
        for item in cluster.evidence_on("backend_device", host)
    )


def _wedged(cluster: Cluster) -> Iterator[Finding]:
    """Findings on observations that ended in a call to the driver, by themselves."""
    for item in ended_in_driver(cluster):
        end, crumb = item.outcome, item.outcome.breadcrumbs[-1]
        of_gpu, sure = "gpu" in crumb, certainty_of(end)
        if sure is None or (not of_gpu and _cuda_too(cluster, item.rank.host)):
            continue
        how = "did not return" if end.status is OutcomeStatus.HUNG else "killed the process"
        detail = f", process state {end.state}" if end.state else ""
        detail += f", {end.signal}" if end.signal else ""
        gpu = {"index": crumb.get("gpu"), "uuid": crumb.get("device")}
        yield Finding(
            GPU_LOST if of_gpu else GPU_UNHEALTHY,
            f"{crumb['call']} {how}{detail}",
            _place(Users(cluster, item.rank.host), [gpu] if of_gpu else []),
            {"breadcrumb": dict(crumb), "wchan": end.wchan, "log_tail": end.log_tail},
            confidence=sure,
        )


_OF_HARDWARE = (LOST, "RESET_REQUIRED", "IRQ_ISSUE", "INSUFFICIENT_POWER")
"""Errors that the driver has for a GPU alone; others may come from the process, the container, or
a driver that is just being replaced."""


def _unread(cluster: Cluster, host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """The finding on a host where the library does not start at all."""
    error, where = facts["error"], Where(hosts=(host.label,))
    if error is None or _cuda_error(cluster, host) is not None:
        return  # `backend_device` reports it, by the driver's own error
    if error.get("how"):
        # A crash of the library at its start says nothing of a GPU: it may be half replaced.
        sure = certainty_of_reader(error)
        if "killed the process" in error["how"] and sure is not None:
            sure = Confidence.LIKELY
        if sure is None or _cuda_too(cluster, host):
            return
        state = f", process state {error['state']}" if error["state"] else ""
        text = f"{error['call']}: {error['name']}{state}"
        yield Finding(GPU_UNHEALTHY, text, where, dict(error), confidence=sure)
    elif error["name"] == "DRIVER_NOT_LOADED":
        # Likely: a driver that is being replaced is not loaded, nor one that nobody asked for yet.
        text = f"{facts['on_pci']} NVIDIA GPUs on the PCI bus, but no driver is loaded"
        fix = Fix(
            Step(shell("modprobe nvidia")),
            look(shell("dmesg | grep -i -e nvidia -e NVRM"), "if it fails"),
        )
        yield Finding(GPU_UNHEALTHY, text, where, fix=fix, confidence=Confidence.LIKELY)
    else:
        sure = Confidence.CERTAIN if error["name"] in _OF_HARDWARE else Confidence.LIKELY
        text = f"{error['call']}: {error['name']}"
        yield Finding(GPU_UNHEALTHY, text, where, dict(error), confidence=sure)


def _of_host(cluster: Cluster, host: Host, seen: HostGpus) -> Iterator[Finding]:
    facts, gpus, log = seen.facts, seen.every, seen.facts["kernel_log"]["xids"]
    users = Users(cluster, host, gpus, facts["own"])
    same: dict[tuple[Trouble, bool], list[Mapping[str, Any]]] = defaultdict(list)
    between = list(
        troubles_between(
            seen,
            cuda_starts=_cuda_starts(cluster, host),
            hints=partial(blockers, cluster, host),
            copying=partial(_copying, cluster, host, facts, users),
        )
    )
    for gpu in gpus:
        for one in troubles_of(gpu, seen, _xids_of(gpu, gpus, log), users):
            if one.kind is GPU_LOST and gpu.get("uuid") in _working(cluster, host):
                text = f"{one.text}; but a rank worked with it"
                one = replace(one, text=text, confidence=Confidence.LIKELY)
            # The fabric belongs to the whole host.
            foreign = one.kind.code != FABRIC_MANAGER_DOWN.code and gpu["index"] in users.foreign
            same[one, foreign].append(gpu)
    for (one, foreign), sick in same.items():
        if one.kind is FABRIC_MANAGER_DOWN and _cuda_error(cluster, host) == _SYSTEM_NOT_READY:
            continue  # `backend_device` reports it, with the ranks
        if one.kind is FABRIC_MANAGER_DOWN and _cuda_starts(cluster, host):
            # As in a virtual machine that has one GPU, without its NVLinks.
            text = f"{one.text}; CUDA still starts"
            one = replace(one, text=text, severity=Severity.WARN, confidence=Confidence.LIKELY)
        for more in [more for more in between if more.kind is one.kind]:
            between.remove(more)
            one = replace(one, text=f"{one.text}; {more.text}", fix=one.fix or more.fix)
            if more.confidence is Confidence.CERTAIN:
                one = replace(one, confidence=Confidence.CERTAIN)
        buses = ",".join(str(gpu.get("bus_id") or gpu["index"]) for gpu in sick)
        found = Finding(
            one.kind,
            one.text,
            _place(users, sick),
            {"gpus": [_evidence(gpu, _xids_of(gpu, gpus, log)) for gpu in sick]},
            fill(one.fix, BUS_ID=buses),
            one.severity,
            one.confidence,
            effects=() if one.drains else (Effect.STAYS_IN_SERVICE,),
        )
        yield _not_ours(found, _unused(sick)) if foreign else found
    for trouble in between:
        found = _finding(users, trouble)
        apart = trouble.pairs and all(users.foreign.intersection(pair) for pair in trouble.pairs)
        yield _not_ours(found, "no two ranks use such a pair") if apart else found
    for drift in within_host(seen):
        odd = [gpu for gpu in gpus if gpu["index"] in drift.places]
        found = Finding(GPU_DIFFERS, drift.text, _place(users, odd), severity=drift.severity)
        foreign = users.foreign.issuperset(drift.places)
        yield _not_ours(found, _unused(odd)) if foreign else found


def _working(cluster: Cluster, host: Host) -> set[str]:
    """UUIDs of GPUs that computed for a rank of this host without an error."""
    return {
        str(seen["uuid"])
        for _, seen in cluster.facts_on("gpu_work", host)
        if seen["uuid"] and not (seen["error"] or seen["wrong"])
    }


def _unused(gpus: Sequence[Mapping[str, Any]]) -> str:
    return f"no rank uses {'this GPU' if len(gpus) == 1 else 'these GPUs'}"


def _not_ours(found: Finding, why: str) -> Finding:
    """The finding as information: a GPU of another job is not for this job to repair."""
    return found.replaced(
        message=f"{found.message}; {why}",
        fix="nothing for this job: inform the administrator of the host",
        severity=Severity.INFO,
    )


def _finding(users: Users, one: Between) -> Finding:
    return Finding(
        one.kind,
        one.text,
        _place(users, [gpu for gpu in users.gpus if gpu["index"] in one.gpus], one.devices),
        dict(one.evidence),
        one.fix,
        one.severity,
        one.confidence,
    )


def _copying(
    cluster: Cluster, host: Host, facts: Mapping[str, Any], users: Users
) -> Copying | None:
    """Direct copies that NCCL would make between the GPUs of a host, and those of `gpu_work`."""
    ranks = cluster.ranks_on(host)
    by_env = bool(ranks) and all(rank.env.get("NCCL_P2P_DISABLE") == "1" for rank in ranks)
    if cluster.backend != "nccl" or by_env or facts.get("p2p_off"):
        return None
    index = {gpu["uuid"]: gpu["index"] for gpu in facts["gpus"] if gpu.get("uuid")}
    made, bad = set(), set()
    for _, seen in cluster.facts_on("gpu_work", host):
        peer = seen.get("peer") or {}
        ends = (seen["uuid"], peer.get("uuid"))
        if all(end in index for end in ends):
            one, other = sorted(index[end] for end in ends)
            made.add((one, other))
            if peer["error"] or peer["wrong"]:
                bad.add((one, other))
    used = frozenset(gpu["index"] for gpu in facts["gpus"]) - users.foreign
    return Copying(used, frozenset(made), frozenset(bad))


def _xids_of(
    gpu: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], log: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Xids of a GPU by its bus; for a lost GPU without a known bus, those of no known GPU."""
    if gpu.get("bus_id"):
        return [seen for seen in log if gpu["bus_id"].startswith(seen["bus"])]
    known = [str(other["bus_id"]) for other in gpus if other.get("bus_id")]
    left = [seen for seen in log if not any(bus.startswith(seen["bus"]) for bus in known)]
    return left if len(gpus) - len(known) == 1 else []


def _evidence(gpu: Mapping[str, Any], xids: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Evidence about a GPU: its number and bus, some values, and its Xids."""
    shown = ("index", "bus_id", "temperature", "sm_clock_mhz", "memory", "processes")
    found = {**{name: gpu.get(name) for name in shown}, "xids": list(xids)}
    return {name: value for name, value in found.items() if value not in (None, [])}


def _cuda_error(cluster: Cluster, host: Host) -> int | None:
    """CUresult of the failed start of CUDA on a host; -1 where there is no number."""
    for _, facts in cluster.facts_on("backend_device", host):
        if facts["driver_error"]:
            code = facts["driver_error"]["code"]
            return -1 if code is None else int(code)
    return None


def _cuda_starts(cluster: Cluster, host: Host) -> bool:
    return any(facts["devices"] for _, facts in cluster.facts_on("backend_device", host))


def _place(users: Users, gpus: Iterable[Gpu], devices: Iterable[str] = ()) -> Where:
    """The host, the GPUs and other devices, and the ranks that would take these GPUs, where that is
    known.
    """
    sick = list(gpus)
    numbers = {rank.rank for gpu in sick for rank in users.of(gpu) if rank.rank is not None}
    return Where(
        hosts=(users.host.label,),
        ranks=tuple(sorted(numbers)),
        devices=tuple(sorted({*devices, *(device_name(gpu) for gpu in sick)})),
    )
