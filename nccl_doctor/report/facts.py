"""The facts of a host for people: all of them, check by check, or the host on one screen."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import ALONE, Facts, OutcomeStatus
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import Figure, Layer, Scope
from nccl_doctor.model.launch import Launch
from nccl_doctor.model.report import Report
from nccl_doctor.report.lines import MIN_WIDTH, cell_text, finished, is_table
from nccl_doctor.report.story import Checks, and_more, as_long_as_it_works
from nccl_doctor.system.terminal import safe

_MOST = 8
"""Hosts, ranks of a host, and items of a list that are written out."""
_DEPTH = 4
"""Nesting that is followed within one value."""
_LONGEST = 2000
"""Characters of one text that are looked at; no line is longer than that."""
_FIRST = ("name", "interface")

Row = tuple[str, str]
Section = tuple[str, list[Row]]


def render(report: Report, *, width: int = 100, ascii: bool = False) -> str:
    """One block per host, launch record, environment and check; a line per fact.

    Values that need more than a line are cut: all of them are in the JSON report. Facts that only
    repeat the launch record are left out, and those that are empty share one line.

    Args:
        report: what to render; nothing in it is trusted to be free of terminal escapes.
        width: columns of the terminal; less than 40 is taken as 40.
        ascii: write nothing but ASCII.
    """
    width = max(width, MIN_WIDTH)
    sections = [(title, rows) for title, rows in _sections(report) if rows]
    longest = max((len(key) for _, rows in sections for key, _ in rows), default=0)
    column = min(longest, width // 3)
    lines: list[str] = []
    whole = True
    for title, rows in sections:
        lines.append(cut(title, width))
        for key, value in rows:
            line = f"  {cut(key, column):<{column}}  {value}".rstrip()
            whole = whole and len(line) <= width and len(key) <= column
            lines.append(cut(line, width))
    if not whole:
        lines += ["", "Longer values are cut here; --json - has all of them."]
    return finished(lines, ascii=ascii)


def _sections(report: Report) -> Iterator[Section]:
    order = [check.name for check in report.checks]
    cluster = report.cluster
    for host in islice(cluster.hosts, _MOST):
        name = text_of(host.label)
        yield f"host {name}", _rows({"addresses": host.addresses}.items())
        yield from _outcomes(host.facts, order, {})
        ranks = [rank for rank in cluster.ranks if rank.host.id == host.id]
        for rank in islice(ranks, _MOST):
            of_rank = "" if len(cluster.ranks) == 1 else f" of rank {text_of(rank.rank)}"
            launch = encode(rank.launch) if rank.launch else {}
            yield f"launch{of_rank}", launch_rows(launch)
            env = sorted(rank.env.items())
            yield f"environment{of_rank}", [(text_of(key), text_of(value)) for key, value in env]
            for title, rows in _outcomes(rank.facts, order, launch):
                yield f"{title}{of_rank}", rows
        if len(ranks) > _MOST:
            yield f"and {len(ranks) - _MOST} more ranks on {name}", [("", "see --json -")]
    if len(cluster.hosts) > _MOST:
        yield f"and {len(cluster.hosts) - _MOST} more hosts", [("", "see --json -")]


def launch_rows(launch: Mapping[str, Any]) -> list[Row]:
    """Each field that was given, and the variable that gave it."""
    sources = launch.get("sources", {})
    rows = [("launcher", text_of(launch.get("launcher")))] if launch else []
    for name in Launch.__dataclass_fields__:
        if name in sources:
            rows.append((name, f"{text_of(launch.get(name))}  ({text_of(sources[name])})"))
    return rows


def _outcomes(facts: Facts, order: list[str], launch: Mapping[str, Any]) -> Iterator[Section]:
    """One section per outcome, in the order of the report's checks."""
    others = sorted(set(facts) - set(order))
    for check in [*order, *others]:
        for name, outcome in sorted(facts.get(check, {}).items()):
            title = text_of(check) if name == ALONE else f"{text_of(check)}, round {text_of(name)}"
            if outcome.status is not OutcomeStatus.OK:
                yield title, [(outcome.status.value, text_of(outcome.reason or None))]
                continue
            items = outcome.facts.items()
            part = [("untested", text_of(outcome.reason))] if outcome.reason else []
            rest = _rows((k, v) for k, v in items if k not in launch or launch[k] != v)
            yield title, [*part, *rest]


def _rows(items: Iterable[tuple[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    empty: list[str] = []
    for key, value in _opened(items):
        if _is_empty(value):
            empty.append(key)
        elif is_table(value):
            for row in value["rows"][: 2 * _MOST]:
                first, *rest = (cell_text(cell) for cell in row)
                rows.append((text_of(f"{key}.{first}"), text_of("; ".join(rest))))
        elif isinstance(value, list) and isinstance(value[0], Mapping):
            for i, each in enumerate(value[:_MOST]):
                rows.append((f"{key}.{i}", _inline(each)))
            if len(value) > _MOST:
                rows.append((key, f"and {len(value) - _MOST} more"))
        else:
            rows.append((key, _inline(value)))
    return [*rows, *([("(none)", ", ".join(empty))] if empty else [])]


def _opened(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The items in order; a table of tables gives one item per entry."""
    for name, value in _in_order(items):
        if isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values()):
            for inner, each in islice(_in_order(value.items()), 2 * _MOST):
                yield f"{text_of(name)}.{text_of(inner)}", each
        else:
            yield text_of(name), value


def _in_order(items: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Items by name, as in a saved report, but names first."""
    return sorted(items, key=lambda item: (item[0] not in _FIRST, str(item[0])))


def _inline(value: Any, depth: int = 0, between: str = ", ") -> str:
    """A value on one line: `name eth0; addresses 10.0.0.1, fd00::2; up`."""
    if depth >= _DEPTH:
        return "…"
    if isinstance(value, Mapping):
        parts = []
        for name, each in islice(_in_order(value.items()), 4 * _MOST):
            if each is True:
                parts.append(text_of(name))
            elif each is not False and not _is_empty(each):
                parts.append(f"{text_of(name)} {_inline(each, depth + 1)}")
        return "; ".join(parts) or "–"
    if isinstance(value, (list, tuple)):
        texts = [_inline(each, depth + 1, " ") for each in value[:_MOST]]
        return between.join(texts) + (f" and {len(value) - _MOST} more" * (len(value) > _MOST))
    return text_of(value)


def text_of(value: Any) -> str:
    """A value in words that a terminal can take."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "–" if value is None else safe(str(value)[:_LONGEST])


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, tuple, Mapping)) and not value)


def cut(text: str, width: int) -> str:
    """A text that is no longer than a line."""
    return text if len(text) <= width else text[: width - 1] + "…"


# One host on one screen: what it is, what its checks list of it, and what steers the libraries.
#
# No check is known by name: what they list are their figures, in words. All facts are in
# `facts.py`.


_ORDER = (
    (Layer.DEVICE,),  # versions and GPUs
    (Layer.NAME, Layer.ROUTE, Layer.PORT),
    (Layer.HOST,),
    (Layer.ENV,),
)
"""Layers whose figures stand together, in the order of the screen; the rest comes last."""
_OTHERS = tuple(layer for layer in Layer if all(layer not in layers for layers in _ORDER))
_MOST_ROWS = 16
"""Rows of one block."""
_COLUMN = 28


_ID = re.compile(r"(, )?(GPU-)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Name of one device: it would keep eight that are alike from sharing a line."""


def render_host(report: Report, checks: Checks, *, width: int = 100, ascii: bool = False) -> str:
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
        more = and_more(len(block) - _MOST_ROWS)
        rows = [*block[:_MOST_ROWS], *([("", more)] if more else [])]
        lines += [cut(f"{cut(name, column):<{column}}  {value}", width) for name, value in rows]
        lines.append("")
    lines.append("All facts: nccl-doctor env -v; as data: nccl-doctor env --json -")
    return finished(map(str.rstrip, lines), ascii=ascii)


def _blocks(report: Report, checks: list[Check]) -> Iterator[list[Row]]:
    rank = next(iter(report.cluster.ranks), None)
    launch = encode(rank.launch) if rank and rank.launch else {}
    yield [*_host(report), *launch_rows(launch)]
    env = {} if rank is None else dict(rank.env)
    told = set(map(str, launch.get("sources", {}).values()))  # by the rows of the launch record
    for layers in (*_ORDER, _OTHERS):
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


def _host(report: Report) -> Iterator[Row]:
    for host in report.cluster.hosts[:1]:
        yield "host", text_of(host.label)
        yield "addresses", ", ".join(map(text_of, host.addresses)) or "none"


def _figures(check: Check, report: Report) -> list[Figure]:
    """Words that the check lists of this host, without numbers that were measured."""
    shown = as_long_as_it_works(lambda: check.figures(report.cluster), Figure)
    return [each for each in shown if not each.better and not _ID.search(each.name)]


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
