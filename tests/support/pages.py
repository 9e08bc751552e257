"""The HTML page of a report as a parser of HTML sees it, and reports that fill every part of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from html.parser import HTMLParser

from nccl_doctor.api import Cluster, Finding, Layer, Level, Outcome, OutcomeStatus, Severity, Where
from nccl_doctor.checks.firewall import Firewall
from nccl_doctor.checks.links import Links
from nccl_doctor.judge.conclusion import conclude
from nccl_doctor.model.report import Report, RunRecord
from nccl_doctor.report.formats.html import render
from tests.support import exchanges, peers
from tests.support.checks import REGISTRY
from tests.support.clusters import make_cluster, outcome
from tests.support.reports import RUN, kind, made_check, through_json

HOSTILE = "<script>pwned=1</script></style></title>\"'><img src=x onerror=pwned=1>&lt;\u202e"
_VOID = ("meta", "link", "input", "br")

PORT = kind("port-shut", Layer.PORT)
SLOW = kind("road-slow", Layer.SPEED, Severity.WARN)
NOTE = kind("a-note", Layer.ROUTE, Severity.INFO)
NOBODY = Cluster(0, 0, "gloo", Level.STANDARD, (), ())
EMPTY = Report(verdict="unknown", exit_code=3, summary="", run=RunRecord(), cluster=NOBODY)


@dataclass(repr=False)
class Element:
    tag: str
    attributes: dict[str, str]
    inside: tuple[Element, ...]
    page: Page
    first: tuple[int, int]
    """How many elements and pieces of text come before what is in it."""
    end: tuple[int, int]

    @cached_property
    def text(self) -> str:
        return "".join(self.page.pieces[self.first[1] : self.end[1]])

    @property
    def under(self) -> list[Element]:
        return self.page.elements[self.first[0] : self.end[0]]

    def has(self, name: str) -> bool:
        return name in self.attributes.get("class", "").split()


class Page(HTMLParser):
    """Elements in order; asserts that every one is closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.pieces: list[str] = []
        self._open: list[Element] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open[-1].tag}"

    def handle_starttag(self, tag, attrs):
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        values = {name: value or "" for name, value in attrs}
        here = (len(self.elements) + 1, len(self.pieces))
        made = Element(tag, values, tuple(self._open), self, here, here)
        self.elements.append(made)
        if tag not in _VOID:
            self._open.append(made)

    def handle_endtag(self, tag):
        assert self._open, tag
        assert self._open[-1].tag == tag, f"</{tag}> in <{self._open[-1].tag}>"
        self._open.pop().end = (len(self.elements), len(self.pieces))

    def handle_data(self, data):
        self.pieces.append(data)

    def all(self, tag: str = "", class_: str = "") -> list[Element]:
        return [
            each
            for each in self.elements
            if tag in ("", each.tag) and (not class_ or each.has(class_))
        ]

    def one(self, tag: str, class_: str = "") -> Element:
        (found,) = self.all(tag, class_)
        return found

    def section(self, name: str) -> Element | None:
        found = [each for each in self.all("section") if each.attributes.get("id") == name]
        assert len(found) < 2
        return found[0] if found else None

    def cells(self) -> dict[tuple[str, str], Element]:
        found = [each for each in self.all("td") if "data-from" in each.attributes]
        return {(e.attributes["data-from"], e.attributes["data-to"]): e for e in found}


def page_of(report: Report) -> Page:
    html = render(report, lambda: REGISTRY.checks)
    assert html.isascii()
    assert html.startswith("<!doctype html>\n")
    return Page(html.removeprefix("<!doctype html>\n"))


def report_of(cluster: Cluster, *findings: Finding, check: str = "shm") -> Report:
    return through_json(conclude(cluster, [made_check(check, finds=findings)], run=RUN))


def healthy() -> Report:
    return report_of(measured(3))


def measured(count: int, blocked=(), slow=()) -> Cluster:
    """Hosts that called each other and measured the links between them."""
    calls = peers.World(count, "nccl").fail(blocked, peers.DROPPED).cluster()
    speeds = exchanges.World(count).slow(slow).cluster()
    hosts = [
        replace(host, facts={**host.facts, **other.facts})
        for host, other in zip(calls.hosts, speeds.hosts, strict=True)
    ]
    ranks = tuple(replace(rank, host=hosts[rank.host.id]) for rank in calls.ranks)
    return replace(calls, hosts=tuple(hosts), ranks=ranks)


def crumbs(*steps: str, group: str = "world", every_s: float = 0.1) -> tuple[dict, ...]:
    """Breadcrumbs; those that are no step of forming a group are collectives."""
    return tuple(
        {"step": step, "at_s": i * every_s, "group": group}
        | ({} if "group" in step or "store" in step else {"sequence": i})
        for i, step in enumerate(steps)
    )


def with_round(cluster: Cluster, outcomes: dict[int, Outcome], name: str = "world") -> Cluster:
    """A round of check `collectives`; rank → how it ended."""
    ranks = tuple(
        replace(
            rank,
            facts={**rank.facts, "collectives": {name: outcome(outcomes[rank.rank])}},
        )
        if rank.rank in outcomes
        else rank
        for rank in cluster.ranks
    )
    return replace(cluster, ranks=ranks)


def broken() -> Report:
    """Four hosts, one link blocked, another one slow, one rank hung and one dead."""
    cluster = measured(4, blocked=[("nd1", "nd2")], slow=exchanges.both("nd0", "nd3"))
    forming = ("connect to the store", "init_process_group")
    hung = Outcome(
        OutcomeStatus.HUNG,
        breadcrumbs=crumbs(*forming, "all_reduce"),
        stack='File "x.py", line 1\n    all_reduce()',
        state="S",
        duration_s=20.0,
        group=0,
    )
    died = Outcome(
        OutcomeStatus.DIED,
        breadcrumbs=crumbs(*forming),
        signal="SIGKILL",
        duration_s=0.3,
        group=0,
    )
    cluster = with_round(cluster, {**dict.fromkeys(range(8), hung), 5: died})
    checks = [Firewall(), Links(), made_check("collectives")]
    return through_json(conclude(cluster, checks, run=RUN))


def hostile() -> Report:
    """Everything that a report takes from outside tries to become HTML."""
    names = (f"{HOSTILE}0", f"{HOSTILE}1", "plain\ud800")
    calls = {"outcome": "dropped", "detail": HOSTILE}
    entry = {"roles": ["gloo"], "attempts": [calls, calls], "address": HOSTILE}
    facts = {
        "peers": {"2": [entry]},
        HOSTILE: {HOSTILE: [HOSTILE, {HOSTILE: HOSTILE * 40}]},
        "table": {"columns": [HOSTILE], "rows": [[HOSTILE]]},
    }
    bad = kind("bad-words")
    finding = Finding(
        replace(bad, title=HOSTILE, why=HOSTILE),
        HOSTILE,
        Where(hosts=names[:1], links=((names[0], names[1]),), interfaces=(HOSTILE,)),
        {HOSTILE: HOSTILE, "list": [HOSTILE] * 30},
        fix=HOSTILE,
        cause=HOSTILE,
    )
    explained = finding.replaced(kind=kind("bad-more"), explained_by="bad-words")
    hung = Outcome(
        OutcomeStatus.HUNG,
        reason=HOSTILE,
        breadcrumbs=crumbs("init_process_group", HOSTILE, group=HOSTILE),
        stack=HOSTILE,
        log_tail=HOSTILE,
        witness={HOSTILE: HOSTILE},
        group=0,
    )
    cluster = make_cluster(
        names,
        1,
        check="firewall",
        round_name="matrix",
        by_host=dict.fromkeys(names, facts),
        env={0: {f"NCCL_{HOSTILE}": HOSTILE}},
    )
    cluster = with_round(cluster, dict.fromkeys(range(3), hung), HOSTILE)
    check = made_check("firewall", kinds=[bad], finds=[finding, explained])
    run = replace(RUN, id=HOSTILE, launcher=HOSTILE, command=HOSTILE)
    report = conclude(cluster, [check, made_check("collectives")], run=run)
    return replace(through_json(report), summary=HOSTILE)
