"""What each host prints of a run, as a person there reads it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tests.lab.corpus import Cause
from tests.lab.run import Run

_BLOCK = re.compile(r"[✗x!?] \S")
_CODE = re.compile(r"\[([a-z][a-z0-9-]+)\]$")
_WHERE, _MORE = "  where ", " " * 8
_WARNING = re.compile(r"  ! ([a-z][a-z0-9-]+)(?: \((.*?)\))?: ")
_LINK = re.compile(r"(\S+) (→|->|↔|<->) (\S+?)(?=,|$)")
_HOST, _NODE = re.compile(r"\bnd\d+\b"), re.compile(r"\bnode (\d+)")


class Printed(NamedTuple):
    """One cause, or warning beside a cause, on the screen of a host."""

    host: str
    cause: Cause

    def __str__(self) -> str:
        return f"{self.host} prints {self.cause}"


def printed(done: Run) -> tuple[Printed, ...]:
    """What stands on the screens of all hosts of a run; what only a file holds does not count."""
    return tuple(
        Printed(each.host, cause)
        for each in done.done
        for text in (each.stdout, each.stderr)
        for cause in causes_on(text.splitlines())
    )


def causes_on(lines: Sequence[str]) -> Iterator[Cause]:
    """Causes, and warnings beside them, of a report as text."""
    title, code, places = "", "", [""]
    for line in [*lines, ""]:
        if code and line.startswith(_WHERE):
            places.append(line[len(_WHERE) :])
        elif code and places[-1] and line.startswith(_MORE):
            places[-1] += f" {line.strip()}"
        elif code and places[-1]:
            places.append("")
        if code and not line.strip():
            yield _cause(code, places)
            title, code, places = "", "", [""]
        if _BLOCK.match(line) or title:
            title = f"{title} {line.strip()}"
            if found := _CODE.search(title):
                title, code = "", found[1]
            elif not line.strip():
                title = ""
        if warning := _WARNING.match(line):
            yield _cause(warning[1], [warning[2] or ""])


def _cause(code: str, places: Iterable[str]) -> Cause:
    """A cause from the words for its places, as `report.places` writes them."""
    hosts: set[str] = set()
    links: set[tuple[str, str]] = set()
    nodes: set[int] = set()
    for place in places:
        for one, arrow, other in _LINK.findall(place):
            links |= {(one, other)} if arrow in ("→", "->") else {(one, other), (other, one)}
        rest = _LINK.sub("", place)
        hosts |= set(_HOST.findall(rest))
        nodes |= set(map(int, _NODE.findall(rest)))
    return Cause(frozenset([code]), frozenset(hosts), frozenset(links), frozenset(nodes))
