"""Did the kernel count errors of PCIe links or memory while this examination ran?

What it checks
--------------
The counts of checks `pcie_errors` (GPUs, NVSwitches, network cards, and the PCIe ports above them)
and `memory_errors` (memory modules), read again at the end, after the collectives and the speed
tests. It runs only on hosts where one of the two had something to read at the start, and judges
what was known at both times.

Why it matters
--------------
The values of the counters may be old; if they grow, the hardware is failing now. A PCIe link that
replays packets slows every step of the job; one that loses them takes the GPU or the card off the
bus. Uncorrectable memory errors kill ranks with SIGBUS, or stop the machine: a host where that
happens within minutes is broken for every job.

How to fix
----------
pcie-errors: reseat the card, its riser or cable, or use another slot; both ends of the link are
named where both counted. memory-failing: drain the host, have the module replaced. memory-errors:
have the module replaced at the next maintenance.

When it is wrong
----------------
Other jobs on the host raise the counters too. Correctable PCIe errors of a link are reported above
8 a minute (a shorter run counts as a minute), which is the limit of DCGM for replays of a GPU;
fewer are not reported. Advisory errors are not counted, and uncorrectable ones that a driver or a
scan of the bus causes (UnsupReq, ACSViol) are only information.
Corrected memory errors are a warning from 10 of one module on, the limit of mcelog for a day, and
information below that: many modules have a few.
Where the kernel counts only one of the two, only that one was judged: the statuses of `pcie_errors`
and `memory_errors` show which. A kernel that is set to panic counts no uncorrected error. An error
that the memory controller found in a page that nothing uses has killed nothing yet; drain the host
all the same. One that the controller assigns to no module is only likely a fault of the memory.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
Kernel documentation, ABI/testing/sysfs-bus-pci-devices-aer_stats, ABI/testing/sysfs-devices-edac
and admin-guide/RAS; NVIDIA/DCGM, dcgm_gpu_hardware_limits.h; mcelog.conf(5).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Host,
    Layer,
    Level,
    Round,
    Severity,
    Skip,
    Turn,
    Untested,
    Where,
)
from nccl_doctor.toolkit.memory_errors import (
    CORRECTED_TOO_MANY,
    memory_errors,
    memory_risen,
    module_names,
)
from nccl_doctor.toolkit.pcie_errors import (
    by_link,
    counts_in_words,
    pcie_errors,
    pcie_is_broken,
    pcie_risen,
)
from nccl_doctor.toolkit.shared_kinds import MEMORY_ERRORS, MEMORY_FAILING, PCIE_ERRORS

_ROUND = "late"
_PCIE, _MEMORY = "pcie_errors", "memory_errors"


class HardwareErrorsFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    at_s: float
    devices: dict[str, dict[str, Any]]
    controllers: dict[str, dict[str, Any]]


class HardwareErrors(Check):
    """Error counts after all other checks, compared with those of the start."""

    name = "hardware_errors"
    layer = Layer.SPEED
    kinds = (PCIE_ERRORS, MEMORY_FAILING, MEMORY_ERRORS)
    reads = ("memory_errors", "pcie_errors")
    level = Level.STANDARD
    together = True
    turn = Turn.LAST

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round: every host that had something to read at the start, by itself."""
        read = {rank.host.id for name in (_PCIE, _MEMORY) for rank, _ in cluster.facts(name)}
        first = [cluster.first_on(host) for host in cluster.present_hosts if host.id in read]
        groups = tuple((rank.seat,) for rank in first if rank is not None)
        if not groups:
            raise Skip("neither pcie_errors nor memory_errors had anything to read at the start")
        return (Round(_ROUND, groups, 10.0),)

    def observe(self, ctx: Context) -> HardwareErrorsFacts:
        """`devices` of `pcie_errors` and `controllers` of `memory_errors`, read at `at_s`."""
        ctx.breadcrumb("read error counts of PCIe devices and memory controllers in /sys")
        devices, controllers = pcie_errors(ctx.root)["devices"], memory_errors(ctx.root)
        if not devices and not controllers:
            raise Untested("the counts that were there at the start are gone")
        return {"at_s": time.monotonic(), "devices": devices, "controllers": controllers}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings host by host, from counts that are known at both times."""
        pcie = {rank.host.id: facts for rank, facts in cluster.facts(_PCIE)}
        memory = {rank.host.id: facts for rank, facts in cluster.facts(_MEMORY)}
        for rank, late in cluster.facts(self.name, _ROUND):
            host = rank.host
            if host.id in pcie:
                yield from _links(host, pcie[host.id], late)
            if host.id in memory:
                yield from _modules(host, memory[host.id], late)


def _links(host: Host, early: Mapping[str, Any], late: Mapping[str, Any]) -> Iterator[Finding]:
    """One finding for each link, or chain of links, with new errors."""
    seconds = late["at_s"] - early["at_s"]
    devices = late["devices"]
    rises = pcie_risen(early["devices"], devices)
    broken = {
        address: verdict
        for address, rise in rises.items()
        if (verdict := pcie_is_broken(rise, seconds)) is not None
    }
    for ends in by_link(devices, set(broken)):
        shown = "; ".join(
            f"{devices[end]['kind']} {end}: {counts_in_words(rises[end], '+')}" for end in ends
        )
        yield Finding(
            PCIE_ERRORS,
            f"in {seconds:.0f} s, {shown}",
            Where(hosts=(host.label,), devices=tuple(ends)),
            {end: {"before": early["devices"][end], "after": devices[end]} for end in ends},
            severity=None if any(broken[end] for end in ends) else Severity.INFO,
            confidence=Confidence.LIKELY,
        )


def _modules(host: Host, early: Mapping[str, Any], late: Mapping[str, Any]) -> Iterator[Finding]:
    """One finding for the host: its worst."""
    seconds = late["at_s"] - early["at_s"]
    risen = memory_risen(early["controllers"], late["controllers"])
    lost, corrected = module_names(risen, "uncorrected"), module_names(risen, "corrected")
    if lost:
        # One that the controller assigns to no module may come from the bus, or from a test.
        of_module = any("/" in place and risen[place]["uncorrected"] for place in risen)
        yield Finding(
            MEMORY_FAILING,
            f"{_errors(risen, 'uncorrected')} in {seconds:.0f} s",
            Where(hosts=(host.label,), devices=lost),
            {"modules": risen},
            confidence=Confidence.CERTAIN if of_module else Confidence.LIKELY,
        )
    elif corrected:
        many = any(counts["corrected"] >= CORRECTED_TOO_MANY for counts in risen.values())
        yield Finding(
            MEMORY_ERRORS,
            f"{_errors(risen, 'corrected')} in {seconds:.0f} s",
            Where(hosts=(host.label,), devices=corrected),
            {"modules": risen},
            severity=None if many else Severity.INFO,
            confidence=Confidence.LIKELY,
        )


def _errors(risen: Mapping[str, Mapping[str, Any]], kind: str) -> str:
    many = sum(counts[kind] for counts in risen.values())
    return f"{many} {kind} {'error' if many == 1 else 'errors'}"
