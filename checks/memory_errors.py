"""Has the kernel counted memory errors that could not be corrected?

What it checks
--------------
The uncorrected errors that the kernel's EDAC drivers have counted for each memory controller of the
host, by module, since the driver was loaded or the counters were reset. It reads sysfs and needs no
privileges. Whether the counters rise, and corrected errors, are for check `hardware_errors`.

Why it matters
--------------
A memory module with an uncorrected error has lost data once: a process was killed, or the page was
not in use. Such a machine may end a job after days with a machine check or SIGBUS.

How to fix
----------
Have the module replaced at the next maintenance. `ras-mc-ctl --errors` (rasdaemon) shows when the
error happened; `dmesg | grep -e EDAC -e 'Hardware Error'` and the log of the BMC show the slot of
the module.

When it is wrong
----------------
The error may be years old and the page long out of use: it is a risk, so a warning, not a failure.
A fault of the processor or the board may look like one of a module. The labels of modules are those
of the driver or of the firmware: CPU_SrcID#0_MC#1_Chan#0_DIMM#0 is not yet a slot. If no EDAC
driver is loaded (virtual machines, some boards) errors are not counted: the check is skipped.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
Kernel documentation, ABI/testing/sysfs-devices-edac and admin-guide/RAS; ras-mc-ctl(8).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from nccl_doctor.api import Check, Cluster, Context, Finding, Layer, Skip, Where
from nccl_doctor.toolkit.memory_errors import by_module, memory_errors, memory_risen, module_names
from nccl_doctor.toolkit.shared_kinds import MEMORY_ERRORS, MEMORY_FAILING

_DAY_S = 86400
_LATER = ("hardware_errors", "late")


class MemoryErrorsFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    at_s: float
    controllers: dict[str, dict[str, Any]]


class MemoryErrors(Check):
    """Reads the counters of uncorrected memory errors once."""

    name = "memory_errors"
    layer = Layer.HOST
    kinds = (MEMORY_ERRORS,)
    reads = ("hardware_errors",)

    def observe(self, ctx: Context) -> MemoryErrorsFacts:
        """`controllers` of `memory_errors`, read at `at_s`, seconds of this host's clock."""
        ctx.breadcrumb("read error counts in /sys/devices/system/edac")
        controllers = memory_errors(ctx.root)
        if not controllers:
            raise Skip("no EDAC driver counts memory errors on this host")
        return {"at_s": time.monotonic(), "controllers": controllers}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """One finding for each host with uncorrected errors, explained by new errors if any."""
        later = {rank.host.id: facts for rank, facts in cluster.met.facts(*_LATER)}
        for rank, facts in cluster.facts(self.name):
            controllers = facts["controllers"]
            places = by_module(controllers)
            names = module_names(places, "uncorrected")
            if names:
                now = later.get(rank.host.id, {}).get("controllers") or {}
                risen = memory_risen(controllers, now)
                many = sum(counts["uncorrected"] for counts in places.values())
                yield Finding(
                    MEMORY_ERRORS,
                    f"{many} uncorrected {'error' if many == 1 else 'errors'}{_span(controllers)}",
                    Where(hosts=(rank.host.label,), devices=names),
                    {"modules": places},
                    explained_by=MEMORY_FAILING.code
                    if module_names(risen, "uncorrected")
                    else None,
                )


def _span(controllers: Mapping[str, Mapping[str, Any]]) -> str:
    """The time for which errors were counted, if all controllers report it."""
    spans = [controller["since_s"] for controller in controllers.values()]
    if None in spans:
        return ""
    longest = max(spans)
    return f" in {longest / _DAY_S:.0f} days" if longest >= 2 * _DAY_S else " within two days"
