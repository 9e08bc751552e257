"""Every fact, folded: check by check, once for all hosts and ranks that have the very same."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

from nccl_doctor.model.cluster import ALONE, Outcome, Rank
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import CheckResult, numbered
from nccl_doctor.model.report import Report
from nccl_doctor.report.html.markup import Html, element, fold, table, together
from nccl_doctor.report.lines import cell_text, is_table
from nccl_doctor.report.story import MOST_RANGES, and_more, outcomes

# Every outcome of a report with its place, whatever the checks are: read as it comes.


T = TypeVar("T")

_MOST = 4
"""Most names of hosts in a row."""


@dataclass(frozen=True)
class Crumb:
    """One breadcrumb: what was about to be done, and seconds after the beginning."""

    name: str
    group: str
    is_collective: bool
    at_s: float


@dataclass(frozen=True)
class ParticipantEnd:
    """Ending of one participant in one round of a check.

    `rank` is None where it spoke for its host.
    """

    host: str
    rank: int | None
    outcome: Outcome

    @property
    def label(self) -> str:
        """Name of the participant."""
        return self.host if self.rank is None else f"rank {self.rank} on {self.host}"

    @property
    def status(self) -> str:
        """Status of the outcome."""
        return self.outcome.status.value

    @property
    def is_good(self) -> bool:
        """True if it finished, or had nothing to do."""
        return self.status in ("ok", "skipped")

    @property
    def is_bad(self) -> bool:
        """True if it failed. An outcome that could not be tested is neither good nor bad."""
        return self.status in ("raised", "hung", "died", "silent")

    @property
    def group(self) -> int | None:
        """Lowest seat of its group; None if it observed alone."""
        return self.outcome.group if isinstance(self.outcome.group, int) else None

    @property
    def took_s(self) -> float:
        """Duration in seconds."""
        return number(self.outcome.duration_s)

    @property
    def steps(self) -> tuple[Crumb, ...]:
        """Breadcrumbs of the outcome, in their order."""
        return tuple(
            Crumb(
                str(crumb.get("step")),
                str(crumb.get("group") or ""),
                "sequence" in crumb,
                number(crumb.get("at_s")),
            )
            for crumb in self.outcome.breadcrumbs
        )

    @property
    def last_step_s(self) -> float:
        """Seconds after the beginning of the last breadcrumb; 0 without any."""
        crumbs = self.outcome.breadcrumbs
        return number(crumbs[-1].get("at_s")) if crumbs else 0.0

    def in_words(self) -> str:
        """Ending in words."""
        words = self.status
        if self.status == "died":
            words += f" ({self.outcome.signal or f'exit code {self.outcome.exit_code}'})"
        if not self.is_good and (steps := self.steps):
            words += f" in {steps[-1].name}"
        return words


def outcomes_of(report: Report) -> dict[str, dict[str, list[ParticipantEnd]]]:
    """Check → round → outcomes: checks, hosts and ranks as in the report, rounds by name."""
    found: dict[str, dict[str, list[ParticipantEnd]]] = {check.name: {} for check in report.checks}
    for host, rank, check, name, outcome in outcomes(report):
        seen = ParticipantEnd(host, None if rank is None else _number(rank), outcome)
        found.setdefault(check, {}).setdefault(name, []).append(seen)
    return {check: dict(in_order(rounds)) for check, rounds in found.items() if rounds}


def who(places: list[ParticipantEnd]) -> str:
    """Several participants, in a few words."""
    ranks = [seen.rank for seen in places if seen.rank is not None]
    if ranks:
        return numbered("rank", ranks, MOST_RANGES)
    names = list(dict.fromkeys(seen.host for seen in places))
    more = and_more(len(names) - _MOST)
    return ", ".join(names[:_MOST]) + (more and f" {more}")


def number(value: Any) -> float:
    """A number that is none becomes 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    try:
        return max(0.0, float(value)) if math.isfinite(value) else 0.0
    except OverflowError:  # JSON knows whole numbers of any size
        return 0.0


def in_order(values: Mapping[Any, T]) -> list[tuple[Any, T]]:
    """Items by name, as in a saved report: a page must not depend on a trip through a file."""
    return sorted(values.items(), key=lambda item: str(item[0]))


_MOST_DIFFERENT, _MOST_OF_MANY = 64, 6
"""Different outcomes of one round that are shown: of a few hosts, and of many."""
_MANY = 16
_MOST_ITEMS = 256
_MOST_RANKS = 1024
_DEPTH = 12
_LONGEST = 20_000
_INLINE = 100
_OF_RANK = re.compile(r"rank$|procid$|localid$|nodeid$|nodename$|task_pid$", re.IGNORECASE)
"""Names of what only says which rank it is."""
_UNITS = {
    "_s": "seconds",
    "_ms": "ms",
    "_us": "µs",
    "_ns": "ns",
    "_khz": "kHz",
    "_mhz": "MHz",
    "_mw": "mW",
    "_mib": "MiB",
    "_gib": "GiB",
    "mtu": "bytes",
}
"""Ends of names, and the unit that they stand for."""
_TEXTS = ("reason", "state", "wchan", "signal", "exit_code")
_LONG_TEXTS = ("stack", "log_tail")


def section(report: Report) -> Html:
    """The section of the page: launch and environment, then the checks."""
    parts = [*_launch(report), *_checks(report)]
    search = element(
        "p",
        element("label", "Filter ", for_="filter"),
        element("input", type="search", id="filter"),
        class_="script",
        hidden=True,
    )
    return element("section", element("h2", "Facts"), search, *parts, id="facts")


def _checks(report: Report) -> Iterator[Html]:
    results = {check.name: check for check in report.checks}
    found, named = outcomes_of(report), _Worth(report)
    for name in [*results, *(name for name in found if name not in results)]:
        result = results.get(name)
        rounds = [_round(each, seen, named) for each, seen in found.get(name, {}).items()]
        reason = element("p", result.reason) if result and result.reason else None
        yield fold(_heading(name, result), reason, *rounds, class_="check")


def _heading(name: str, result: CheckResult | None) -> Html:
    if result is None:
        return element("b", name)
    status = result.status.value
    return together(
        element("span", status, class_=f"status {status}"),
        " ",
        element("b", name),
        f" ({result.layer.value}, {result.duration_s:.1f} s)",
    )


class _Worth:
    """Choice of what is shown where too much differs, and of what counts as the same."""

    def __init__(self, report: Report) -> None:
        many = len(report.cluster.hosts) > _MANY
        self.most = _MOST_OF_MANY if many else _MOST_DIFFERENT
        self._hosts = {name for cause in report.root_causes for name in cause.where.hosts}
        self._facts: dict[int, str] = {}  # of those that many hold in common

    def first(self, alike: Iterable[list[ParticipantEnd]]) -> list[list[ParticipantEnd]]:
        """The outcomes to be shown: those that failed, those of hosts that are blamed, the rest."""

        def order(same: list[ParticipantEnd]) -> tuple[bool, bool]:
            return not same[0].is_bad, not any(seen.host in self._hosts for seen in same)

        every = list(alike)
        return every if len(every) <= self.most else sorted(every, key=order)[: self.most]

    def identity(self, seen: ParticipantEnd) -> tuple[str, str]:
        """Equal for those that have the same to show, however long it took them."""
        facts = seen.outcome.facts
        if id(facts) not in self._facts:
            self._facts[id(facts)] = dump(facts)
        kept = replace(seen.outcome, facts={}, breadcrumbs=(), duration_s=0.0, group=None)
        return self._facts[id(facts)], dump(kept.to_json())


def _round(name: str, seen: Sequence[ParticipantEnd], worth: _Worth) -> Html:
    alike: dict[tuple[str, str], list[ParticipantEnd]] = {}
    for each in seen:
        alike.setdefault(worth.identity(each), []).append(each)
    shown = worth.first(alike.values())
    parts = [_outcome(same) for same in shown]
    if more := and_more(len(alike) - len(shown)):
        parts.append(element("p", f"{more} that differ (see the JSON report)"))
    if name == ALONE:
        return together(*parts)
    return together(element("h3", f"round {name}"), *parts)


def _outcome(same: Sequence[ParticipantEnd]) -> Html:
    record = same[0].outcome.to_json()
    took = sorted(seen.took_s for seen in same)
    span = f"{took[0]:.2f} s" if took[0] == took[-1] else f"{took[0]:.2f} to {took[-1]:.2f} s"
    title = f"{who(list(same))}: {same[0].in_words()}, {span}"
    parts: list[Html | None] = []
    texts = [(key, record[key]) for key in _TEXTS if record.get(key) not in (None, "")]
    parts.append(_rows(texts) if texts else None)
    facts, witness = record.get("facts"), record.get("witness")
    parts.append(_rows(in_order(facts)) if facts else None)
    parts += [
        fold(key, element("pre", _text(record[key]))) for key in _LONG_TEXTS if record.get(key)
    ]
    if witness:
        parts.append(fold("its state before it was stopped", _rows(in_order(witness))))
    steps = [(f"{step.at_s:.3f} s", step.name, step.group or "–") for step in same[0].steps]
    if steps:
        first = same[0].label if len(same) > 1 else ""
        parts.append(fold(f"steps {first}".strip(), table(("at", "step", "group"), steps)))
    return fold(title, *parts)


def _launch(report: Report) -> Iterator[Html]:
    hosts, ranks = report.cluster.hosts, report.cluster.ranks
    shown = [(host.label, ", ".join(host.addresses) or "–") for host in hosts[:_MOST_ITEMS]]
    if shown:
        yield fold(f"Hosts ({len(hosts)})", table(("host", "addresses"), shown))
    if ranks:
        yield _seats(ranks)
    launches = [encode(rank.launch) if rank.launch else {} for rank in ranks]
    for title, values in (("Launch", launches), ("Environment", [rank.env for rank in ranks])):
        alike: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
        for rank, value in zip(ranks, values, strict=True):
            if value:
                shared = {name: each for name, each in value.items() if not _OF_RANK.search(name)}
                alike.setdefault(dump(shared), []).append((_number(rank), value))
        parts = []
        for same in islice(alike.values(), _MOST_DIFFERENT):
            items = in_order(same[0][1])
            shared_items = [item for item in items if not _OF_RANK.search(item[0])]
            who_has_it = numbered("rank", [rank for rank, _ in same], MOST_RANGES)
            parts.append(fold(who_has_it, _rows(items if len(same) == 1 else shared_items)))
        if more := and_more(len(alike) - _MOST_DIFFERENT):
            parts.append(element("p", f"{more} that differ"))
        if parts:
            differing = f" ({len(alike)} different)" if len(alike) > 1 else ""
            yield fold(f"{title}{differing}", *parts)


def _seats(ranks: Sequence[Rank]) -> Html:
    """Table of ranks and their hosts."""
    rows = (
        (
            rank.rank,
            rank.host.label,
            rank.launch.node_rank if rank.launch else None,
            rank.local_rank,
            rank.pid,
            rank.device,
        )
        for rank in ranks[:_MOST_RANKS]
    )
    cells = (["–" if cell is None else _text(cell) for cell in row] for row in rows)
    more = and_more(len(ranks) - _MOST_RANKS)
    return fold(
        f"Ranks ({len(ranks)})",
        table(("rank", "host", "node", "local rank", "pid", "device"), cells),
        element("p", f"{more} (see the JSON report)") if more else None,
    )


def _number(rank: Rank) -> int:
    return -1 if rank.rank is None else rank.rank


def _rows(items: Iterable[tuple[Any, Any]], depth: int = 0) -> Html:
    """Names and values; values that hold more are folded."""
    every = list(items)
    parts: list[Html] = []
    for name, value in every[:_MOST_ITEMS]:
        parts += item(name, value, depth)
    if more := and_more(len(every) - _MOST_ITEMS):
        parts += [element("dt", "…"), element("dd", f"{more} (see the JSON report)")]
    return element("dl", *parts)


def item(name: Any, value: Any, depth: int = 0) -> tuple[Html, Html]:
    """A name with its unit, and the value."""
    words = next((words for end, words in _UNITS.items() if str(name).endswith(end)), "")
    unit = element("span", f" in {words}", class_="unit") if words else None
    return element("dt", str(name), unit), element("dd", value_of(value, depth))


def value_of(value: Any, depth: int = 0) -> Html:
    """A value of JSON: short ones as they are, longer ones in a fold, tables as tables."""
    if is_table(value):
        shown = [[cell_text(cell) for cell in row] for row in value["rows"][:_MOST_ITEMS]]
        head = [cell_text(name) for name in value["columns"]]
        return fold(f"table of {len(value['rows'])} rows", table(head, shown))
    if isinstance(value, (Mapping, list, tuple)) and value:
        short = dump(value) if _is_small(value) else ""
        if short and len(short) <= _INLINE:
            return element("code", short)
        if depth >= _DEPTH:
            return element("code", _text(value))
        items = in_order(value) if isinstance(value, Mapping) else enumerate(value)
        thing = "entries" if isinstance(value, Mapping) else "items"
        return fold(f"{len(value)} {thing}", _rows(items, depth + 1))
    text = _text(value)
    if "\n" in text or len(text) > 4 * _INLINE:
        return fold(f"{len(text)} characters", element("pre", text))
    return element("code", text)


def dump(value: Any) -> str:
    """A value as JSON; one that JSON cannot hold in Python's words."""
    try:
        return json.dumps(value, sort_keys=True, default=str, ensure_ascii=False)
    except (TypeError, ValueError):  # keys of several types, or a value that holds itself
        return str(value)


def _is_small(value: Mapping[Any, Any] | Sequence[Any]) -> bool:
    return len(value) <= 16 and not any(
        isinstance(each, (Mapping, list, tuple)) and len(each) > 8
        for each in (value.values() if isinstance(value, Mapping) else value)
    )


def _text(value: Any) -> str:
    if isinstance(value, str):
        text = value
    elif value is None or isinstance(value, (bool, list, tuple, Mapping)):
        text = dump(value)
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… (cut; see the JSON report)"
