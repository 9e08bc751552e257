"""Kinds of check links, and their fixes."""

from __future__ import annotations

from nccl_doctor.api import Effect, Fix, Kind, Layer, Severity, look, shell

_PATH = (
    look(shell("ip route get ADDRESS")),
    look(shell("tracepath -n ADDRESS"), "the path between the hosts"),
)
_SLOWEST = "a collective is as slow as its slowest link, so the whole job waits at each step"

HOST_SLOW = Kind(
    "host-slow",
    Layer.SPEED,
    "A host sends or receives much more slowly than the others",
    _SLOWEST,
    Fix(
        look(shell("ethtool NIC | grep -i -e speed -e duplex")),
        look(shell("ip -s link show NIC"), "errors and drops"),
        alternatives=[
            Fix(
                text="compare the PCIe slot, driver and switch port of the NIC, and rate limits, "
                "with those of another host"
            )
        ],
    ),
    Severity.WARN,
    effects=(Effect.DELAYS,),
)
LINK_SLOW = Kind(
    "link-slow",
    Layer.SPEED,
    "A link is much slower than the others, and both of its ends are fast with other hosts",
    _SLOWEST,
    Fix(*_PATH, alternatives=[Fix(text="look for a VPN, a switch uplink, a rate limit")]),
    Severity.WARN,
    effects=(Effect.DELAYS,),
)
LATENCY_HIGH = Kind(
    "latency-high",
    Layer.SPEED,
    "Round trips take much longer than on the other links",
    "small collectives and barriers wait for it several times in each step",
    Fix(
        *_PATH,
        alternatives=[Fix(text="look for a VPN, another site, power saving of the NIC")],
    ),
    Severity.WARN,
    effects=(Effect.DELAYS,),
)
HOST_LATE = Fix(
    look(shell("ethtool -c NIC"), "interrupt coalescing"),
    look(shell("cpupower idle-info"), "power saving of the CPUs"),
    look(shell("top -b -n 1 | head -20"), "other work"),
)
