"""Did error counters of RDMA ports move while this examination ran?

What it checks
--------------
The error counters that the kernel shows for every RDMA port that NCCL may use: link errors
(symbol_error, link_downed, port_rcv_errors, …), of mlx5 packets that nobody acknowledged, of RoCE
packets and frames that arrived changed (rx_icrc_encapsulated, rx_crc_errors of the interface), and
of EFA peers that did not answer and requests that failed.
They are read at the start (check `fabric_ports`) and again at the end, after the collectives and
the speed tests; where the first reading is missing, twice with two seconds between. Nothing is
sent.

Why it matters
--------------
A cable or transceiver that fails now and then costs time at every error, and ends a job of days
with error 12 when it fails for long. What the counters stand at says little, as they count since
the driver was loaded; that they move says that it happens now. Those of links are 4 to 16 bits
wide, and stay at the most that they can count (15, 255, 65535): such a one says nothing any more.

How to fix
----------
Clean or replace the cable and the transceiver, then try another switch port: `mlxlink -d <device>`
and `ibdiagnet` show where errors begin. link_downed: see the log of the switch.
rdma-counter-full: perfquery -C <device> -P <port> -R as root sets the counters of a port back, and
the next examination sees whether they move.

When it is wrong
----------------
A fabric on which nothing moved may fail under load: with gloo as the backend, or without GPUs, this
examination sends nothing over RDMA. Other jobs on the host move the counters too.
port_xmit_discards also counts what is dropped in congestion. Virtual functions lack most counters,
and EFA of the first generations has only those of failed requests.
Not validated on hardware: tested on made-up clusters and on a made-up sysfs.

References
----------
Kernel documentation, ABI/stable/sysfs-class-infiniband, and drivers/infiniband/core/sysfs.c (how
wide counters are); NVIDIA, understanding mlx5 counters; perfquery(8).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Finding,
    Kind,
    Layer,
    Level,
    Rank,
    Round,
    Severity,
    Skip,
    Untested,
    Where,
)
from nccl_doctor.toolkit.fabric.counters import counters_full, counters_risen, error_counters

RISING = Kind(
    "rdma-errors-rising",
    Layer.SPEED,
    "Error counters of an RDMA port are rising",
    "Packets are lost or sent again: collectives slow down, and end with error 12 when it lasts.",
    "clean or replace cable and transceiver, try another switch port; mlxlink -d <device>",
    Severity.WARN,
    delays=True,
)
FULL = Kind(
    "rdma-counter-full",
    Layer.SPEED,
    "An error counter of an RDMA port can count no further",
    "Errors happened, and whether they go on nobody can see: at its most the counter stays.",
    "as root: perfquery -C <device> -P <port> -R, then examine once more",
    Severity.INFO,
)

_ROUND = "late"
_FIRST = "fabric_ports"
_PAUSE_S = 2.0


class RdmaErrors(Check):
    """Read the counters when all else is done, and compare with those of the start."""

    name = "rdma_errors"
    layer = Layer.SPEED
    cost = "seconds"
    kinds = (RISING, FULL)
    level = Level.STANDARD
    together = True
    root: ClassVar[Path] = Path("/")

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """Every host by itself."""
        if "nccl" not in cluster.backend:
            raise Skip("the job does not use NCCL")
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        groups = tuple((rank.seat,) for rank in first if rank is not None)
        read = {rank.seat for rank, _ in cluster.facts(_FIRST)}
        again = any((seat not in read) for (seat,) in groups)
        params = {"pause_s": _PAUSE_S if again else 0.0}
        return (Round(_ROUND, groups, 10.0, params),) if groups else ()

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`counters`, read at `at_s`; `before`: those of the same round, where it read twice."""
        ctx.breadcrumb("read error counters in /sys/class/infiniband")
        before = error_counters(self.root)
        if not before:
            raise Skip("no RDMA device here")
        if not any(before.values()):
            raise Untested("the kernel shows no error counter here")
        facts: dict[str, Any] = {"at_s": time.monotonic(), "counters": before}
        pause_s = min(float(ctx.params.get("pause_s", 0.0)), ctx.left() / 2)
        if pause_s > 0:
            time.sleep(pause_s)
            now = error_counters(self.root)
            facts = {"at_s": time.monotonic(), "counters": now, "before": before}
            facts["pause_s"] = pause_s
        return facts

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Port by port; those that NCCL does not use are left alone."""
        first = {rank.host.id: facts for rank, facts in cluster.facts(_FIRST)}
        for rank, late in cluster.facts(self.name, _ROUND):
            early = first.get(rank.host.id)
            before = early["counters"] if early else late.get("before", {})
            seconds = late["at_s"] - early["at_s"] if early else late.get("pause_s", 0.0)
            unused = _unused(early) if early else set()
            yield from _full(rank, before, late["counters"], unused)
            for port, rise in counters_risen(before, late["counters"]).items():
                if port not in unused:
                    shown = ", ".join(f"{name} +{by}" for name, by in sorted(rise.items()))
                    yield Finding(
                        RISING,
                        f"{port} in {seconds:.0f} s: {shown}",
                        Where(hosts=(rank.host.label,), interfaces=(port,)),
                        {"before": before.get(port, {}), "after": late["counters"][port]},
                        confidence=Confidence.LIKELY,
                    )


def _full(
    rank: Rank,
    before: Mapping[str, Mapping[str, int]],
    after: Mapping[str, Mapping[str, int]],
    unused: Collection[str],
) -> Iterator[Finding]:
    for port, counters in counters_full(before, after).items():
        if port not in unused:
            shown = ", ".join(f"{name} at {value}" for name, value in sorted(counters.items()))
            device, _, number = port.partition(":")
            yield Finding(
                FULL,
                f"{port}: {shown}",
                Where(hosts=(rank.host.label,), interfaces=(port,)),
                {"counters": counters},
                fix=f"as root: perfquery -C {device} -P {number} -R, then examine once more",
            )


def _unused(early: Mapping[str, Any]) -> set[str]:
    """Ports that NCCL's settings leave out, and those that were down from the start."""
    return {
        port["name"]
        for device in early["devices"]
        for port in device["ports"]
        if not port["wanted"] or port["state"] == "DOWN"
    }
