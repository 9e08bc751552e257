"""NVLink SHARP (NVLS) alone inside a host: which hosts can try it, and which cannot use it. Pure.

With NCCL_ALGO=allreduce:nvls NCCL 2.24 and newer take nothing else for an all-reduce, and raise an
error where they cannot use it; older ones take rings then, without a word, so they are not asked.
By itself NCCL uses it where the driver says that the GPU has multicast, among three GPUs or more.
Where it cannot be set up, NCCL 2.27 and newer go on without it, and nobody is told.
Sources: src/graph/tuning.cc (parseList), src/enqueue.cc (topoGetAlgoInfo), src/transport/nvls.cc
(ncclNvlsInit, nvlsAllocateMem) and ncclNvlsSupported in src/include/device.h of NCCL 2.19 to 2.30.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from nccl_doctor.api import Confidence, Finding, Fix, Level, Where, export, look, shell
from nccl_doctor.toolkit.gpu.own import OwnGpu, own_gpus
from nccl_doctor.toolkit.groups.attempts import Attempt
from nccl_doctor.toolkit.groups.doing import step_of, what_they_did
from nccl_doctor.toolkit.outliers import bus_bandwidth, slow_ones
from nccl_doctor.toolkit.shared_kinds import BANDWIDTH_LOW
from nccl_doctor.toolkit.units import rate_text
from nccl_doctor.toolkit.versions import release

from .measured import AGAIN_NVLS, NVLS, WORLD, Measured, refusal, with_controls

T = TypeVar("T")

NVLS_ALONE = {"NCCL_ALGO": "allreduce:nvls"}
NVLS_SIZES = (1 << 20, 1 << 24, 1 << 27)
BY_NVLS = "by NVLink SHARP alone (NCCL_ALGO=allreduce:nvls) "
NVLS_FIX = Fix(
    look(shell("systemctl status nvidia-fabricmanager"), "and its log"),
    look(shell("nvidia-smi -q | grep -A4 Fabric")),
    alternatives=[
        "if it was restarted while GPUs were in use: reset the GPUs or reboot the host",
        Fix(export(NCCL_NVLS_ENABLE="0")),
    ],
)
NVLS_FAILS = BANDWIDTH_LOW.variant(
    title="NVLink SHARP fails inside a host, and works inside others",
    why="NCCL chooses it by itself for many sizes: collectives of the job may fail on this host.",
)
_SINCE = (2, 24)
_LEAST_RANKS = 3
_HOPPER = 9
"""Major number of the compute capability."""


def nvls_hosts(seen: Measured) -> list[int]:
    """Hosts where NCCL should be able to use NVLink SHARP, once all-reduces inside them worked.

    All their GPUs are Hopper or later, in an NVLink fabric that is set up, the driver does not deny
    multicast, and no setting keeps NCCL from it.
    """
    if seen.cluster.backend != "nccl" or seen.cluster.level is not Level.FULL:
        return []
    own, worked, free = own_gpus(seen.cluster), seen.tries_inside(), _unhindered(seen)
    return [
        host
        for host, seats in seen.hosts.items()
        if len(seats) >= _LEAST_RANKS
        and host in worked
        and all(seat in free and seat in own and _has_nvls(own[seat]) for seat in seats)
    ]


def nvls_again(seen: Measured) -> list[tuple[int, ...]]:
    """Groups of the second try: hosts that were slow, or failed while others like them worked."""
    failed, groups = _failures(seen, NVLS), list[tuple[int, ...]]()
    for worked in alike(seen, seen.inside(NVLS, NVLS)):
        odd = [*slow_ones(worked), *_failed_beside(seen, failed, worked)]
        groups += [seen.hosts[host] for host in with_controls(odd, worked)] if odd else []
    return groups


def alike(seen: Measured, values: Mapping[int, T]) -> list[dict[int, T]]:
    """Values of hosts with as many ranks and the same GPUs: only these can be compared."""
    kinds = _kinds(seen)
    found: dict[tuple[str, ...], dict[int, T]] = defaultdict(dict)
    for host, value in values.items():
        found[kinds[host]][host] = value
    return list(found.values())


def judge_failures(seen: Measured) -> Iterator[Finding]:
    """Findings on hosts where it failed twice, while it worked twice inside a host like them."""
    first, again = _failures(seen, NVLS), _failures(seen, AGAIN_NVLS)
    repeated, size = seen.inside(AGAIN_NVLS, NVLS), seen.size(NVLS)
    for worked in alike(seen, seen.inside(NVLS, NVLS)):
        good = [repeated[host] for host in worked if host in repeated]
        for host in _failed_beside(seen, first, worked) if good else ():
            if host not in again:
                continue
            attempt, how = again[host]
            rate = rate_text(bus_bandwidth(size, min(good), len(attempt.members)))
            yield Finding(
                NVLS_FAILS,
                f"{BY_NVLS}all-reduces inside the host fail, twice: {how}; inside others they give "
                f"{rate} bus bandwidth",
                Where(hosts=(seen.labels[host],)),
                {"tries": [first[host][1], how], **_doing(attempt)},
                fix=NVLS_FIX,
                confidence=Confidence.LIKELY,
            )


def _failed_beside(
    seen: Measured, failed: Mapping[int, object], worked: Mapping[int, object]
) -> list[int]:
    """Hosts that failed, and are like those that worked; none if more failed than worked."""
    kinds = _kinds(seen)
    like = {kinds[host] for host in worked}
    found = [host for host in failed if kinds[host] in like]
    return found if len(found) <= len(worked) else []


def _failures(seen: Measured, name: str) -> dict[int, tuple[Attempt, str]]:
    """Host → its attempt that failed by itself in a round, and how."""
    tried = {each.members[0].host.id: (each, _how(each)) for each in seen.attempts(name)}
    return {host: (attempt, how) for host, (attempt, how) in tried.items() if how}


def _how(attempt: Attempt) -> str:
    if said := refusal(attempt):
        return said
    if attempt.is_unexplained:
        outcome = attempt.stuck[0].outcome
        return f"no progress in {step_of(outcome)} within {outcome.duration_s:.0f} s"
    return ""


def _doing(attempt: Attempt) -> dict[str, Any]:
    return what_they_did(attempt) if attempt.stuck else {}


def _kinds(seen: Measured) -> dict[int, tuple[str, ...]]:
    """Host → the models of its GPUs."""
    own = own_gpus(seen.cluster)
    return {
        host: tuple(sorted(own[seat].model if seat in own else "" for seat in seats))
        for host, seats in seen.hosts.items()
    }


def _unhindered(seen: Measured) -> set[int]:
    """Seats whose NCCL tells when it cannot use NVLink SHARP, and that have no setting against it;
    reports of older versions do not say.
    """
    new = {
        rank.seat
        for rank, facts in seen.cluster.facts("backend_device")
        if release(facts.get("nccl")) >= _SINCE
    }
    return {
        member.rank.seat
        for attempt in seen.good(WORLD)
        for member in attempt.members
        if member.outcome.facts.get("nvls_off") == {} and member.rank.seat in new
    }


def _has_nvls(gpu: OwnGpu) -> bool:
    fabric = gpu.state.get("fabric") or {}
    return (
        gpu.seen["capability"][0] >= _HOPPER
        and gpu.seen.get("multicast") is not False
        and fabric.get("state") == "COMPLETED"
        and not fabric.get("status")
        and any(gpu.state.get("nvlinks") or ())
    )
