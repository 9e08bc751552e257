"""One host on one screen: what it is, what its checks list of it, and what steers the libraries.

No check is known by name: what they list are their figures, in words. All facts are in `facts.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress

from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Rank
from nccl_doctor.model.findings import Figure, Layer, Scope
from nccl_doctor.model.report import Report
from nccl_doctor.report.facts import Row, cut, launch_rows, text_of
from nccl_doctor.report.lines import MIN_WIDTH, to_ascii
from nccl_doctor.report.sections import Checks

_ORDER = (
    (Layer.DEVICE,),  # versions and GPUs
    (Layer.NAME, Layer.ROUTE, Layer.PORT),
    (Layer.HOST,),
    (Layer.ENV,),
)
"""Layers whose figures stand together, in the order of the screen; the rest comes last."""
_MOST = 16
"""Rows of one block."""
_COLUMN = 28


_ID = re.compile(r"(, )?(GPU-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Name of one device: it would keep eight that are alike from sharing a line."""


def render(report: Report, checks: Checks, *, width: int = 100, ascii: bool = False) -> str:
    """Some twenty lines about a host that was examined by itself.

    Things that are alike share a line (`8 x GPU`), and so do those that are not there. Numbers that
    were measured are left out.

    Args:
        report: what to render; nothing in it is trusted to be free of terminal escapes.
        checks: asked for their figures.
        width: columns of the terminal; less than 40 is taken as 40.
        ascii: write nothing but ASCII.
    """
    width = max(width, MIN_WIDTH)
    blocks = [block for block in _blocks(report, list(checks())) if block]
    longest = max((len(name) for block in blocks for name, _ in block), default=0)
    column = min(longest, _COLUMN, width // 3)
    lines = []
    for block in blocks:
        rows = block if len(block) <= _MOST else [*block[:_MOST], _rest(block)]
        lines += [cut(f"{cut(name, column):<{column}}  {value}", width) for name, value in rows]
        lines.append("")
    lines.append("All facts: nccl-doctor env -v; as data: nccl-doctor env --json -")
    text = "".join(f"{line.rstrip()}\n" for line in lines)
    return to_ascii(text) if ascii else text


def _rest(block: list[Row]) -> Row:
    return "", f"and {len(block) - _MOST} more"


def _blocks(report: Report, checks: list[Check]) -> Iterator[list[Row]]:
    rank = next(iter(report.cluster.ranks), None)
    yield _host(report, rank)
    env = {} if rank is None else dict(rank.env)
    told = {*_told_by_launch(rank)} if rank else set()
    for layers in (*_ORDER, _others()):
        # What is of a rank, such as versions, before the list of what the host has.
        here = sorted(
            (check for check in checks if check.layer in layers),
            key=lambda check: check.scope is Scope.HOST,
        )
        figures = [f for check in here for f in _figures(check, report) if f.name not in env]
        missing = dict.fromkeys(text_of(f.name) for f in figures if f.value is None)
        rows = _folded(f for f in figures if f.value is not None)
        if layers == (Layer.ENV,):
            rows += [
                (text_of(name), text_of(env[name]) or "(empty)")
                for name in sorted(env)
                if name not in told
            ]
        yield [*rows, *([("not here", ", ".join(missing))] if missing else [])]


def _host(report: Report, rank: Rank | None) -> list[Row]:
    rows: list[Row] = []
    for host in report.cluster.hosts[:1]:
        rows.append(("host", text_of(host.label)))
        rows.append(("addresses", ", ".join(map(text_of, host.addresses)) or "none"))
    launch = rank.launch.to_json() if rank and rank.launch else {}
    return [*rows, *launch_rows(launch)]


def _told_by_launch(rank: Rank) -> Iterable[str]:
    """Variables that the rows of the launch record name."""
    launch = rank.launch.to_json() if rank.launch else {}
    return (str(source) for source in launch.get("sources", {}).values())


def _others() -> tuple[Layer, ...]:
    named = {layer for layers in _ORDER for layer in layers}
    return tuple(layer for layer in Layer if layer not in named)


def _figures(check: Check, report: Report) -> list[Figure]:
    """Words that the check lists of this host, without numbers that were measured."""
    found: list[Figure] = []
    with suppress(Exception):  # of a plug-in, or on the facts of another version
        for figure in check.figures(report.cluster):
            if not figure.better and not _ID.search(figure.name):
                found.append(figure)
    return found


def _folded(figures: Iterable[Figure]) -> list[Row]:
    """One row per figure; those with one value whose names differ in the last word share one."""
    made = [(f.name.rpartition(" ")[0], f.name, _ID.sub("", str(f.value))) for f in figures]
    alike = Counter((stem, value) for stem, _, value in made)
    rows: dict[str, str] = {}
    for stem, name, value in made:
        count = alike[stem, value] if stem else 1
        key = f"{count} x {stem}" if count > 1 else name
        if rows.get(text_of(key)) not in (None, text_of(value)):
            key = name  # as many of another kind
        rows[text_of(key)] = text_of(value)
    return list(rows.items())
