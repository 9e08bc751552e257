"""Made-up reports, and hostile text, for tests of reports for CI systems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nccl_doctor.api import Check, Finding, Layer, Severity
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.report import Report
from tests.support.clusters import make_cluster
from tests.support.reports import RUN, kind, made_check, through_json

SHM = kind("shm-small", Layer.HOST)
PORT = kind("port-shut", Layer.PORT)
GROUP = kind("group-hang", Layer.GROUP)
RISK = kind("a-risk", Layer.ROUTE, Severity.WARN)
NOTE = kind("a-note", Layer.ROUTE, Severity.INFO)
OK = {"x": 1}

HOSTILE = (
    "a\033[2J\007\n\r\0\u202ec\u2028d\x9be\x7f\ud800\ufffe\uffff ]]> <b a='\"'>&amp; "
    "::error title=x::y %0A ##[error]z ```` ![i](http://x.example/i.png) @everyone #1 |\\"
)
"""No terminal, XML, Markdown, workflow command or metric may take any of it for its own."""


def report_of(
    *findings: Finding,
    hosts: tuple[str, ...] = ("nd0", "nd1"),
    by_host: Any = None,
    others: tuple[Check, ...] = (),
    strict: bool = False,
    **more: Any,
) -> Report:
    """A report of one check, `shm`, with these findings, two ranks on each host; and of other
    checks, about which nothing was gathered.
    """
    facts = dict.fromkeys(hosts, OK) if by_host is None else by_host
    cluster = make_cluster(hosts, 2, check="shm", by_host=facts, **more)
    run = replace(RUN, options={"strict": strict})
    checks = [made_check("shm", finds=findings), *others]
    return through_json(conclude(cluster, checks, run=run, strict=strict))
