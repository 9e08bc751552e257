"""Kinds of finding of every layer, for tests of what explains what."""

from __future__ import annotations

from nccl_doctor.api import Layer, Severity, Where
from tests.support.reports import kind

HOST = kind("low-host", Layer.HOST)
NAME = kind("low-name", Layer.NAME)
ROUTE = kind("mid-route", Layer.ROUTE)
PORT = kind("mid-port", Layer.PORT)
RANKS = kind("host-gone", Layer.RANKS)
DEVICE = kind("up-device", Layer.DEVICE)
GROUP = kind("top-group", Layer.GROUP)
SPEED = kind("slow-link", Layer.SPEED, Severity.WARN)
NOTE = kind("a-note", Layer.SPEED, Severity.INFO)
RISK = kind("a-risk", Layer.ROUTE, Severity.WARN)

OK = {"x": 1}
"""Facts that a made-up check takes for good."""


def at(*hosts: str, ranks: tuple[int, ...] = (), links: tuple[tuple[str, str], ...] = ()) -> Where:
    return Where(hosts=hosts, ranks=ranks, links=links)
