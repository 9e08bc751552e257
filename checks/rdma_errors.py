"""Did error counters of RDMA ports rise while this examination ran?

What it checks
--------------
The error counters that the kernel shows for every RDMA port that NCCL may use: link errors
(symbol_error, link_downed, port_rcv_errors, …), for mlx5 packets that were not acknowledged, for
RoCE packets and frames that arrived corrupted (rx_icrc_encapsulated, rx_crc_errors of the
interface), and for EFA peers that did not answer and requests that failed.
They are read at the start (check `fabric_ports`) and again at the end, after the collectives and
the speed tests; if the first reading is missing, twice with two seconds between. Nothing is sent.

Why it matters
--------------
A cable or transceiver that fails now and then costs time at every error, and ends a job after days
with error 12 when it fails for long. The values of the counters mean little, as they count since
the driver was loaded; if they rise, errors happen now. Link counters are 4 to 16 bits wide, and
stop at their maximum (15, 255, 65535): then they show nothing any more.

How to fix
----------
Clean or replace the cable and the transceiver, then try another switch port: `mlxlink -d <device>`
and `ibdiagnet` show where errors begin. link_downed: see the log of the switch.
rdma-counter-full: perfquery -C <device> -P <port> -R as root resets the counters of a port, and the
next examination sees whether they rise.

When it is wrong
----------------
A fabric without traffic may fail under load: with gloo as the backend, or without GPUs, this
examination sends nothing over RDMA. Other jobs on the host raise the counters too.
port_xmit_discards also counts packets dropped in congestion. Virtual functions lack most counters,
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
from typing import Any

from nccl_doctor.api import (
    Check,
    Cluster,
    Confidence,
    Context,
    Effect,
    Finding,
    Fix,
    Kind,
    Layer,
    Level,
    Rank,
    Round,
    Severity,
    Skip,
    Step,
    Turn,
    Untested,
    Where,
    fill,
    look,
    shell,
)
from nccl_doctor.toolkit.fabric.counters import counters_full, counters_risen, error_counters

RISING = Kind(
    "rdma-errors-rising",
    Layer.SPEED,
    "Error counters of an RDMA port are rising",
    "Packets are lost or sent again: collectives slow down, and end with error 12 if it continues.",
    Fix(
        look(shell("mlxlink -d DEVICE"), "the state of the link"),
        alternatives=[Fix(text="clean or replace cable and transceiver, try another switch port")],
    ),
    Severity.WARN,
    effects=(Effect.DELAYS,),
)
FULL = Kind(
    "rdma-counter-full",
    Layer.SPEED,
    "An error counter of an RDMA port is at its maximum",
    "Errors happened, and it is not visible whether they continue: the counter stops at its "
    "maximum.",
    Fix(
        Step(
            shell("# perfquery -C DEVICE -P NUMBER -R"),
            note="as root; then run nccl-doctor again",
            persists=True,
        )
    ),
    Severity.INFO,
)

_ROUND = "late"
_FIRST = "fabric_ports"
_PAUSE_S = 2.0


class RdmaErrors(Check):
    """Reads the counters after all other checks, and compares them with those of the start."""

    name = "rdma_errors"
    layer = Layer.SPEED
    cost = "seconds"
    kinds = (RISING, FULL)
    reads = ("fabric_ports",)
    level = Level.STANDARD
    together = True
    turn = Turn.LAST

    def plan(self, cluster: Cluster) -> Sequence[Round]:
        """One round, each host alone."""
        if "nccl" not in cluster.backend:
            raise Skip("the job does not use NCCL")
        first = [cluster.first_on(host) for host in cluster.present_hosts]
        groups = tuple((rank.seat,) for rank in first if rank is not None)
        read = {rank.seat for rank, _ in cluster.facts(_FIRST)}
        again = any((seat not in read) for (seat,) in groups)
        params = {"pause_s": _PAUSE_S if again else 0.0}
        return (Round(_ROUND, groups, 10.0, params),) if groups else ()

    def observe(self, ctx: Context) -> Mapping[str, Any]:
        """`counters`, read at `at_s`; `before`: the first reading, if this round read twice."""
        ctx.breadcrumb("read error counters in /sys/class/infiniband")
        before = error_counters(ctx.root)
        if not before:
            raise Skip("no RDMA device here")
        if not any(before.values()):
            raise Untested("the kernel shows no error counter here")
        facts: dict[str, Any] = {"at_s": time.monotonic(), "counters": before}
        pause_s = min(float(ctx.params.get("pause_s", 0.0)), ctx.left() / 2)
        if pause_s > 0:
            time.sleep(pause_s)
            now = error_counters(ctx.root)
            facts = {"at_s": time.monotonic(), "counters": now, "before": before}
            facts["pause_s"] = pause_s
        return facts

    def judge(self, cluster: Cluster) -> Iterable[Finding]:
        """Findings on each port that NCCL uses."""
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
                fix=fill(FULL.fix, DEVICE=device, NUMBER=number),
            )


def _unused(early: Mapping[str, Any]) -> set[str]:
    """Ports that NCCL's settings exclude, and those that were down from the start."""
    return {
        port["name"]
        for device in early["devices"]
        for port in device["ports"]
        if not port["wanted"] or port["state"] == "DOWN"
    }
