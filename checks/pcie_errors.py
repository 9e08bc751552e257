"""Has the kernel counted fatal PCIe errors at a GPU or a network card?

What it checks
--------------
The error counters of PCIe advanced error reporting that the kernel keeps for GPUs, NVSwitches,
network cards and the PCIe ports above them: fatal errors, and correctable ones of a link (RxErr,
BadTLP, BadDLLP, Rollover, Timeout), compared with devices of the same model on all hosts. It reads
sysfs, needs no privileges, and touches no device. Whether the counters rise is for check
`hardware_errors`.

Why it matters
--------------
A link with errors sends packets again, trains again, or loses the device: that is the GPU that fell
off the bus after two days. A counter shows that errors happened since the kernel found the device,
not that they happen now: so it is only information.

How to fix
----------
lspci -vvs ADDRESS shows speed and width of the link (LnkSta compared with LnkCap). Reseat the card,
its riser or cable; try another slot; update firmware of the board and of the card.

When it is wrong
----------------
Either end of a link may have counted the errors, whichever of the two is at fault. A fatal error
may be left from a device that was reset or removed on purpose. Correctable errors are reported for
a device that has 100 or more, and more than 10 times the median of at least three others of its
model: this program's own thresholds, chosen so that links that train when a machine starts are not
reported. In a virtual machine, and where the firmware handles error reporting itself, errors are
not counted: the check is skipped. It cannot recognise a virtual machine on Arm.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
Kernel documentation, ABI/testing/sysfs-bus-pci-devices-aer_stats and PCI/pcieaer-howto;
drivers/pci/pcie/aer.c.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TypedDict

from nccl_doctor.api import (
    Check,
    Cluster,
    Context,
    Finding,
    Fix,
    Layer,
    Severity,
    Skip,
    Where,
    look,
    shell,
)
from nccl_doctor.toolkit.pcie_errors import pcie_errors, pcie_outliers
from nccl_doctor.toolkit.shared_kinds import PCIE_ERRORS


class PcieErrorsFacts(TypedDict):
    """Facts that `observe` returns; other checks read them."""

    at_s: float
    devices: dict[str, dict[str, Any]]


class PcieErrors(Check):
    """Reads the counters once, and compares devices of the same model."""

    name = "pcie_errors"
    layer = Layer.DEVICE
    kinds = (PCIE_ERRORS,)

    def observe(self, ctx: Context) -> PcieErrorsFacts:
        """`devices` of `pcie_errors`, read at `at_s`, seconds of this host's monotonic clock."""
        ctx.breadcrumb("read error counters of PCIe devices in /sys/bus/pci/devices")
        seen = pcie_errors(ctx.root)
        if not seen["devices"]:
            raise Skip(seen["why_not"])
        return {"at_s": time.monotonic(), "devices": seen["devices"]}

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """One finding for each device with errors that others of its model do not have."""
        seen = {rank.host.id: (rank, facts["devices"]) for rank, facts in cluster.facts(self.name)}
        by_host = pcie_outliers({host: devices for host, (_, devices) in seen.items()})
        for host, outliers in by_host.items():
            rank, devices = seen[host]
            for address, words in sorted(outliers.items()):
                yield Finding(
                    PCIE_ERRORS,
                    f"{devices[address]['kind']} {address}, since the kernel found it: {words}",
                    Where(hosts=(rank.host.label,), devices=(address,)),
                    {"counters": devices[address]},
                    fix=Fix(
                        look(
                            shell("lspci -vvs {}", address),
                            "again after a job; reseat the card, its riser or cable if they grow",
                        )
                    ),
                    severity=Severity.INFO,
                )
