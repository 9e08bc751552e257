"""The report as JSON, for machines and for keeping.

The facts of many ranks are folded (`nccl_doctor.model.folding`): what they have in common stands
once, and each host and rank on a line of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from nccl_doctor.model.findings import CheckResult
from nccl_doctor.model.folding.plain import clean
from nccl_doctor.model.folding.report import SHARED, Records
from nccl_doctor.model.report import Report, host_to_json, rank_to_json

FEW = 8
"""Ranks of a report that stands in full: it is read by eye, too."""


def render(report: Report, *, expand: bool = False) -> str:
    """The report as `schema.json` describes it: sorted keys, ASCII only, a final newline.

    Never fails on what a check put into its facts: NaN and infinities, which JSON does not know,
    become the texts "NaN", "Infinity" and "-Infinity", and other foreign values their `str`. With
    `expand` nothing is folded.
    """
    if len(report.cluster.ranks) <= FEW:
        return _indented(clean(report.to_json())) + "\n"
    return in_lines(report, expand=expand)


def in_lines(report: Report, *, expand: bool = False) -> str:
    """The same for many ranks: each host, rank and check on one line."""
    shared: dict[str, Any] = {}
    head = clean(report.head_to_json())
    parts: dict[str, list[str]] = {name: [_part(name, value)] for name, value in head.items()}
    cluster = report.cluster
    lists: dict[str, Records[Any]] = {
        "hosts": Records(
            "hosts", cluster.hosts, host_to_json, facts_of=lambda host: host.facts, expand=expand
        ),
        "ranks": Records(
            "ranks", cluster.ranks, rank_to_json, facts_of=lambda rank: rank.facts, expand=expand
        ),
        "checks": Records("checks", report.checks, CheckResult.to_json, expand=expand),
    }
    for name, records in lists.items():
        parts[name] = _lines(name, records.lines())
        shared |= records.shared()
    if not expand:
        parts[SHARED] = [_part(SHARED, shared)]
    # Put together at once: these may be many megabytes.
    texts = chain.from_iterable((",\n", *parts[name]) for name in sorted(parts))
    return "".join(chain(["{\n"], islice(texts, 1, None), ["\n}\n"]))


def _indented(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, allow_nan=False)


def _part(name: str, value: Any) -> str:
    """One key of the report, and its value."""
    return _indented({name: value})[2:-2]


def _lines(name: str, records: Iterable[str]) -> list[str]:
    """The same in pieces, with each record on one line."""
    pieces = [f' "{name}": [\n  ']
    for record in records:
        pieces += (record, ",\n  ")
    return [*(pieces[:-1] if len(pieces) > 1 else pieces), "\n ]"]
