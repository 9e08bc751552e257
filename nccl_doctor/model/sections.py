"""Sections that a check can show beside its findings: links between hosts, and set-ups.

Checks yield them (`Check.sections`); maps of the network and issue forms are made of them. They are
never saved: whoever renders a report asks the checks that are installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class HostLink:
    """One direction between two hosts, as a check knows it, for the map of links.

    A check may yield several of one link, and so may several checks: the worst reach counts, the
    best time and rate, and all segments together.

    Attributes:
        start: `id` of the host that calls or sends.
        end: `id` of the other host.
        reach: `ok`; `impaired`: small packets arrive, but not all; `failed`; or the empty string
            where nobody tried.
        words: how it failed, in a few words.
        rtt_us: round-trip time in microseconds, None where not measured.
        rate: bytes per second, 0 where it stood still, None where not measured.
        segments, lost: of TCP, sent and lost.
    """

    start: int
    end: int
    reach: Literal["", "ok", "impaired", "failed"] = ""
    words: str = ""
    rtt_us: float | None = None
    rate: float | None = None
    segments: int = 0
    lost: int = 0


@dataclass(frozen=True)
class Setup:
    """One thing that a host or a rank has, for issue forms and the card of a healthy run.

    Attributes:
        name: what it is. The forms ask for software (`torch`, `cuda`, `rocm`, `nccl`,
            `nccl loaded`, `python`, `driver`, `deepspeed`), for `gpus`, `RDMA port` and
            `interface`. The card of a run without a failure shows `results` (exact or not) and
            `speed`, too. What has another name is not shown.
        value: a version or a description; or a table, whose empty values are left out.
        host: `id` of the host.
    """

    name: str
    value: str | Mapping[str, Any]
    host: int


Section = HostLink | Setup
"""What `Check.sections` yields."""
