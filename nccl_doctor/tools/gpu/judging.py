"""From the facts of all hosts to findings about their GPUs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nccl_doctor.cluster import ALONE, Cluster, Host, OutcomeStatus, Rank
from nccl_doctor.model import Confidence, Finding, Severity, Where
from nccl_doctor.tools.fabric.direct import redirecting_bridges, translating
from nccl_doctor.tools.gpu.drift import across_hosts, within_host
from nccl_doctor.tools.gpu.health import Trouble, is_readable, troubles_of
from nccl_doctor.tools.gpu.hostwide import Between, troubles_between
from nccl_doctor.tools.gpu.kinds import (
    CLOCKS_LIMITED,
    GPU_BUSY,
    GPU_LOST,
    GPU_THROTTLED,
    GPU_VIRTUAL,
    NVLINK_DOWN,
    NVLINK_ERRORS,
    NVSWITCH_ERROR,
    P2P_UNAVAILABLE,
    PCIE_DEGRADED,
)
from nccl_doctor.tools.gpu.nvml import STEP, device_name
from nccl_doctor.tools.shared_kinds import FABRIC_MANAGER_DOWN, GPU_DIFFERS, GPU_UNHEALTHY

CHECK = "gpu_state"
"""Name of the check whose facts these are."""
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
    NVSWITCH_ERROR,
    P2P_UNAVAILABLE,
    GPU_VIRTUAL,
    GPU_DIFFERS,
)
_SYSTEM_NOT_READY = 802  # CUresult: the fabric manager has not set NVSwitch up


def judge_gpus(cluster: Cluster) -> Iterator[Finding]:
    """Every host alone, then hosts against each other."""
    hosts: dict[int, Mapping[str, Any]] = {}
    labels: dict[int, Host] = {}
    for found in (_wedged(cluster), _unread(cluster)):
        yield from (_weighed(cluster, finding) for finding in found)
    for rank, facts in cluster.facts(CHECK):
        hosts[rank.host.id], labels[rank.host.id] = facts, rank.host
        yield from (_weighed(cluster, found) for found in _of_host(cluster, rank.host, facts))
    compared = any(facts["devices"] for _, facts in cluster.facts("backend_device"))
    for drift in across_hosts(hosts, count=not compared):
        where = Where(hosts=tuple(sorted(labels[key].label for key in drift.places)))
        yield Finding(GPU_DIFFERS, drift.text, where, severity=drift.severity)


def hosts_without_gpu(cluster: Cluster) -> frozenset[int]:
    """Hosts, by id, of which a GPU is lost: there CUDA may not start at all, and that is why."""
    found = {item.rank.host.id for item in _ended(cluster) if "gpu" in item.outcome.breadcrumbs[-1]}
    for rank, facts in cluster.facts(CHECK):
        if any(gpu["lost"] or gpu.get("wedged") for gpu in facts["gpus"]):
            found.add(rank.host.id)
    return frozenset(found)


def _weighed(cluster: Cluster, finding: Finding) -> Finding:
    """A job over gloo starts without its GPUs."""
    if cluster.backend != "nccl" and finding.level is Severity.FAIL:
        return finding.replaced(severity=Severity.WARN)
    return finding


def _ended(cluster: Cluster) -> Iterator[Any]:
    """Observations that the driver did not let return."""
    for item in cluster.evidence(CHECK, ALONE):
        end = item.outcome
        if end.status in (OutcomeStatus.HUNG, OutcomeStatus.DIED) and end.last_step == STEP:
            yield item


def _wedged(cluster: Cluster) -> Iterator[Finding]:
    cuda_too = {
        item.rank.host.id
        for item in cluster.evidence("backend_device", ALONE)
        if item.outcome.status in (OutcomeStatus.HUNG, OutcomeStatus.DIED)
    }
    for item in _ended(cluster):
        end, crumb = item.outcome, item.outcome.breadcrumbs[-1]
        of_gpu = "gpu" in crumb
        if not of_gpu and item.rank.host.id in cuda_too:
            continue  # `backend_device` says it, with the ranks
        how = "did not return" if end.status is OutcomeStatus.HUNG else "killed the process"
        detail = f", process state {end.state}" if end.state else ""
        detail += f", {end.signal}" if end.signal else ""
        gpu = {"index": crumb.get("gpu"), "uuid": crumb.get("device")}
        yield Finding(
            GPU_LOST if of_gpu else GPU_UNHEALTHY,
            f"{crumb['call']} {how}{detail}",
            _place(cluster, item.rank.host, [gpu] if of_gpu else []),
            {"breadcrumb": dict(crumb), "wchan": end.wchan, "log_tail": end.log_tail},
        )


def _unread(cluster: Cluster) -> Iterator[Finding]:
    """The library starts on no GPU at all."""
    for rank, facts in cluster.facts(CHECK):
        error = facts["error"]
        if error is None or _cuda_error(cluster, rank.host) is not None:
            continue  # `backend_device` says it, by the driver's own error
        text = f"{error['call']}: {error['name']}"
        if error["name"] == "DRIVER_NOT_LOADED":
            number = facts["on_pci"]
            text = f"{number} NVIDIA GPUs on the PCI bus, and no driver is loaded"
            fix = "modprobe nvidia, and see `dmesg` for why it was not loaded"
            yield Finding(GPU_UNHEALTHY, text, _place(cluster, rank.host, []), fix=fix)
        else:
            yield Finding(GPU_UNHEALTHY, text, _place(cluster, rank.host, []), dict(error))


def _of_host(cluster: Cluster, host: Host, facts: Mapping[str, Any]) -> Iterator[Finding]:
    gpus, log = facts["gpus"], facts["kernel_log"]["xids"]
    own = {*facts["own"], *(rank.pid for rank in cluster.ranks_on(host) if rank.pid)}
    readable = [gpu for gpu in gpus if is_readable(gpu)]
    cuda = _cuda_error(cluster, host)
    same: dict[Trouble, list[Mapping[str, Any]]] = defaultdict(list)
    between = list(
        troubles_between(
            facts, cuda_starts=_cuda_starts(cluster, host), hints=_p2p_hints(cluster, host)
        )
    )
    for gpu in gpus:
        for one in troubles_of(gpu, readable, _xids_of(gpu, gpus, log), own):
            same[one].append(gpu)
    for one, sick in same.items():
        if one.kind is FABRIC_MANAGER_DOWN and cuda == _SYSTEM_NOT_READY:
            continue  # `backend_device` says it, with the ranks
        if one.kind is FABRIC_MANAGER_DOWN and _cuda_starts(cluster, host):
            # As in a virtual machine that was given one GPU, without its NVLinks.
            text = f"{one.text}; CUDA starts all the same"
            one = replace(one, text=text, severity=Severity.WARN, confidence=Confidence.LIKELY)
        for more in [more for more in between if more.kind is one.kind]:
            between.remove(more)
            one = replace(one, text=f"{one.text}; {more.text}", fix=one.fix or more.fix)
        buses = ",".join(str(gpu.get("bus_id") or gpu["index"]) for gpu in sick)
        yield Finding(
            one.kind,
            one.text,
            _place(cluster, host, sick),
            {"gpus": [_evidence(gpu, _xids_of(gpu, gpus, log)) for gpu in sick]},
            one.fix.replace("BUS_ID", buses),
            one.severity,
            one.confidence,
        )
    yield from (_finding(cluster, host, one, gpus) for one in between)
    for drift in within_host(gpus):
        odd = [gpu for gpu in gpus if gpu["index"] in drift.places]
        where = _place(cluster, host, odd)
        yield Finding(GPU_DIFFERS, drift.text, where, severity=drift.severity)


def _finding(
    cluster: Cluster, host: Host, one: Between, gpus: Sequence[Mapping[str, Any]]
) -> Finding:
    where = _place(cluster, host, [gpu for gpu in gpus if gpu["index"] in one.gpus])
    return Finding(
        one.kind,
        one.text,
        where | Where(devices=one.devices),
        dict(one.evidence),
        one.fix,
        one.severity,
        one.confidence,
    )


def _p2p_hints(cluster: Cluster, host: Host) -> tuple[str, ...]:
    """What may keep GPUs of a host from each other's memory, as `gpu_direct` saw it."""
    for rank, facts in cluster.facts("gpu_direct"):
        if rank.host.id == host.id:
            acs, iommu = len(redirecting_bridges(facts)), len(translating(facts))
            hints = [f"ACS is on on {acs} PCIe bridges"] if acs else []
            hints += [f"the IOMMU translates for {iommu} GPUs and NICs"] if iommu else []
            return tuple(hints)
    return ()


def _xids_of(
    gpu: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], log: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Those of its bus; of a lost GPU whose bus nobody knows, those of no GPU that is known."""
    if gpu.get("bus_id"):
        return [seen for seen in log if gpu["bus_id"].startswith(seen["bus"])]
    known = [str(other["bus_id"]) for other in gpus if other.get("bus_id")]
    left = [seen for seen in log if not any(bus.startswith(seen["bus"]) for bus in known)]
    return left if len(gpus) - len(known) == 1 else []


def _evidence(gpu: Mapping[str, Any], xids: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Its number and bus, what it showed, and the kernel log, for whoever goes there."""
    shown = ("index", "bus_id", "temperature", "sm_clock_mhz", "memory", "processes")
    found = {**{name: gpu.get(name) for name in shown}, "xids": list(xids)}
    return {name: value for name, value in found.items() if value not in (None, [])}


def _cuda_error(cluster: Cluster, host: Host) -> int | None:
    """CUresult with which CUDA does not start on a host; -1 where there is no number."""
    for rank, facts in cluster.facts("backend_device"):
        if rank.host.id == host.id and facts["driver_error"]:
            code = facts["driver_error"]["code"]
            return -1 if code is None else int(code)
    return None


def _cuda_starts(cluster: Cluster, host: Host) -> bool:
    return any(
        facts["devices"]
        for rank, facts in cluster.facts("backend_device")
        if rank.host.id == host.id
    )


def _place(cluster: Cluster, host: Host, gpus: Iterable[Mapping[str, Any]]) -> Where:
    """The host, the GPUs, and the ranks that would take them, where that is known."""
    names = {device_name(gpu) for gpu in gpus}
    return Where(
        hosts=(host.label,),
        ranks=tuple(
            sorted(rank.rank for rank in _users(cluster, host, names) if rank.rank is not None)
        ),
        devices=tuple(sorted(names)),
    )


def _users(cluster: Cluster, host: Host, uuids: set[str]) -> Iterator[Rank]:
    for rank, facts in cluster.facts("backend_device"):
        own = facts["device"] if rank.host.id == host.id else None
        if own is not None and facts["devices"][own]["uuid"] in uuids:
            yield rank
