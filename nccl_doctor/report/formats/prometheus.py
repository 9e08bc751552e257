"""The report as metrics, for node_exporter: its textfile collector of Prometheus reads it.

No message and no host is a label: the scraper adds the host, and labels that grow without bound
cost a monitoring system dear. No time stamps: the collector refuses them.
"""

from __future__ import annotations

import calendar
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nccl_doctor.model.findings import Status
from nccl_doctor.model.report import VERDICTS, Report
from nccl_doctor.system.terminal import safe

_STATUSES = {status: number for number, status in enumerate(Status)}
_STARTED = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:Z|([+-])(\d\d):(\d\d))$"
)
_LABELS = str.maketrans({"\\": r"\\", '"': r"\""})

Sample = tuple[Mapping[str, str], float]


def render(report: Report) -> str:
    """Gauges only, each with its help and type, ending in a newline."""
    return "".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield from _gauge(
        "info",
        "Version of nccl-doctor that wrote this file; always 1.",
        [({"version": str(report.tool.get("version", ""))}, 1)],
    )
    yield from _gauge(
        "verdict",
        "1 for the verdict of the last run, 0 for the others.",
        [({"verdict": name}, float(report.verdict == name)) for name in VERDICTS],
    )
    yield from _gauge(
        "exit_code",
        "Exit code of the last run: 0 no failure, 1 a failure, 2 usage, 3 not completed.",
        [({}, report.exit_code)],
    )
    codes = ", ".join(f"{number} {status.value}" for status, number in _STATUSES.items())
    yield from _gauge(
        "check_status",
        f"Status of each check: {codes}.",
        [
            (
                {"check": check.name, "layer": check.layer.value, "scope": check.scope.value},
                _STATUSES[check.status],
            )
            for check in report.checks
        ],
    )
    roots = {finding.code for finding in report.root_causes}
    found = Counter(
        (f.code, f.kind.layer.value, f.level.value, str(f.code in roots).lower())
        for f in report.findings
    )
    names = ("code", "layer", "severity", "root_cause")
    yield from _gauge(
        "findings",
        "Findings of the last run, by code; root_cause: not explained by another finding.",
        [(dict(zip(names, key, strict=True)), number) for key, number in sorted(found.items())],
    )
    for thing, items in (("hosts", report.cluster.hosts), ("ranks", report.cluster.ranks)):
        reported = sum(item.reported for item in items)
        states = [({"state": "expected"}, len(items)), ({"state": "reported"}, reported)]
        yield from _gauge(thing, f"{thing.capitalize()}: expected, and reported.", states)
    started = _epoch(report.run.started or "")
    if started is not None:
        words = "Start of the last run, in seconds since 1970."
        yield from _gauge("run_timestamp_seconds", words, [({}, started)])
    took = report.run.duration_s
    if took is not None and math.isfinite(took):
        yield from _gauge(
            "run_duration_seconds", "Duration of the last run, in seconds.", [({}, took)]
        )


def _gauge(name: str, words: str, samples: Iterable[Sample]) -> Iterator[str]:
    name = f"nccl_doctor_{name}"
    rows: dict[str, float] = {}
    for labels, value in samples:
        inner = ",".join(f'{key}="{_label(text)}"' for key, text in labels.items())
        rows[f"{name}{{{inner}}}" if inner else name] = value  # a series twice spoils the file
    if rows:
        yield f"# HELP {name} {words}\n# TYPE {name} gauge\n"
    yield from (f"{series} {_number(value)}\n" for series, value in rows.items())


def _label(text: str) -> str:
    return safe(text)[:200].translate(_LABELS)


def _number(value: Any) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _epoch(started: str) -> int | None:
    """Seconds since 1970 of an ISO-8601 time; None for what is none."""
    match = _STARTED.match(started)
    if match is None:
        return None
    sign, hours, minutes = match[7], int(match[8] or 0), int(match[9] or 0)
    offset = (3600 * hours + 60 * minutes) * (-1 if sign == "-" else 1)
    try:
        return calendar.timegm(tuple(int(match[i]) for i in range(1, 7))) - offset
    except ValueError:
        return None
