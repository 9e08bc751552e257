"""Judgement of one run by what was seen from outside; pure, but for nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.lab.chaos import SIGNALS, Plan

Report = Mapping[str, Any]

ABSENCE = frozenset({"host-absent", "rank-absent", "rank-silent", "coordinator-lost"})
"""Findings that say who did not come or went silent, and not why."""
LOST = frozenset({"store-lost", "coordinator-lost", "port-refused"})
"""Findings of a host that finds no process at the other end of a link: it can see no farther."""
SOON_S = {"kill": 1.0, "term": 1.0, "int": 1.0, "hup": 1.0, "stop": 1.0}
SOON_S |= {"cable": 3.0, "path": 3.0, "drop": 3.0}
"""Time after a strike that breaks a run in which a report may still say pass: all that it is made
of may have been there already. After it, it is a lie."""
_NAMED = re.compile(
    r"nccl-doctor: .*(received SIG|killed by SIG|is stopped|[Nn]o such file or directory)"
)
_OURS = re.compile(r'File "[^"]*/(nccl_doctor|checks)/')


@dataclass(frozen=True)
class Ended:
    """One process that was started from outside. `rank` is None where it stands for a host.

    `code` is None where the harness ended it; `hit`: the strike hit it, or a process below it.
    """

    host: str
    rank: int | None
    code: int | None
    stderr: str = ""
    hit: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one run left.

    Attributes:
        plan: what was to be done.
        struck: whether the strike hit a living run.
        ranks: ranks whose processes it hit.
        reported: whether there was a report at that moment.
        processes: all that were started.
        reports: name → report: `run` of the coordinator, `nodeK` of a host that had to judge alone,
            `viewK` of a host in the shared folder, which says no more than that host knew.
        after_s: seconds from the strike until the coordinator's report was written.
        late: processes that were there too long.
        leftovers: what was left behind.
    """

    plan: Plan
    struck: bool = False
    ranks: tuple[int, ...] = ()
    reported: bool = False
    processes: Sequence[Ended] = ()
    reports: Mapping[str, Report] = field(default_factory=dict)
    after_s: float = 0.0
    late: Sequence[str] = ()
    leftovers: Sequence[str] = ()


@dataclass(frozen=True)
class Judgement:
    """What was wrong with a run; `unknown`: it was struck, and no cause was named."""

    late: tuple[str, ...] = ()
    blamed: tuple[str, ...] = ()
    unknown: bool = False
    lies: tuple[str, ...] = ()
    tracebacks: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the run broke a promise."""
        return bool(self.late or self.blamed or self.lies or self.tracebacks or self.leftovers)


def judge(outcome: Outcome) -> Judgement:
    """Hold a run against what the doctor promises."""
    return Judgement(
        late=tuple(outcome.late),
        blamed=tuple(dict.fromkeys(_blamed(outcome))),
        unknown=_is_unknown(outcome),
        lies=tuple(dict.fromkeys(_lies(outcome))),
        tracebacks=tuple(_tracebacks(outcome)),
        leftovers=tuple(outcome.leftovers),
    )


# -- blame -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Places that a strike touched.

    `absent`: hosts that may be called absent, and no more; `lost`: links to a host of which may be
    said that no process is there, and no more.
    """

    hosts: frozenset[str] = frozenset()
    ranks: frozenset[int] = frozenset()
    links: frozenset[tuple[str, str]] = frozenset()
    absent: frozenset[str] = frozenset()
    lost: frozenset[tuple[str, str]] = frozenset()


def touched(outcome: Outcome) -> Places:
    """Places that findings may name.

    - Nothing, no hit, the output folder (which belongs to no host): none.
    - A signal: the victim's host and the ranks that depend on the process. Another host may say
      that it finds no process there, with the link that leads there, as it can see no farther.
    - Network of a host: the host, its ranks, every link that ends there.
    - A pair that the path separates: that link. If node 0 is one end, the other one cannot be
      heard: then each may call the other absent.
    - Memory: as a signal, to any process of the host. Disks, clock: the host and its ranks.
    """
    plan = outcome.plan
    if not outcome.struck or plan.strike in ("none", "folder"):
        return Places()
    victim = plan.victim
    if plan.strike == "path" and plan.other:
        ends = {victim, plan.other}
        links = frozenset({(victim, plan.other), (plan.other, victim)})
        return Places(links=links, absent=frozenset(ends if "nd0" in ends else ()))
    links = frozenset(
        pair for name in plan.names if name != victim for pair in ((victim, name), (name, victim))
    )
    if plan.strike in ("cable", "flap", "drop", "reject", "path"):
        return Places(frozenset({victim}), frozenset(plan.ranks_of(victim)), links)
    ranks = outcome.ranks if plan.strike in SIGNALS else plan.ranks_of(victim)
    calls = frozenset((name, victim) for name in plan.names if name != victim)
    ends = plan.strike in SIGNALS or plan.strike == "memory"
    return Places(frozenset({victim}), frozenset(ranks), lost=calls if ends else frozenset())


def accusations(report: Report) -> list[Mapping[str, Any]]:
    """Findings above info that no other one explains."""
    return [
        found
        for found in report.get("findings", ())
        if found["severity"] != "info" and not found["explained_by"]
    ]


def _blamed(outcome: Outcome) -> Iterator[str]:
    allowed = touched(outcome)
    harmless = not outcome.struck or outcome.plan.strike == "none"
    if harmless and "run" not in outcome.reports:
        yield "nothing was done, and there is no report"
    for name, report in outcome.reports.items():
        for found in accusations(report):
            wrong = _wrong_places(found, allowed, outcome.plan)
            if wrong or (harmless and not _has_place(found)):
                where = ", ".join(wrong) or "nowhere"
                yield f"{name}: {found['code']} {where}: {found['message']}"


def _wrong_places(found: Mapping[str, Any], allowed: Places, plan: Plan) -> list[str]:
    absent = allowed.absent if found["code"] in ABSENCE else frozenset()
    hosts = allowed.hosts | absent
    ranks = allowed.ranks | {rank for name in absent for rank in plan.ranks_of(name)}
    where = found["where"]
    wrong = [name for name in where["hosts"] if name not in hosts]
    wrong += [f"node {node}" for node in where["nodes"] if f"nd{node}" not in hosts]
    wrong += [f"rank {rank}" for rank in where["ranks"] if rank not in ranks]
    links = allowed.links | (allowed.lost if found["code"] in LOST else frozenset())
    wrong += [
        f"{a} → {b}"
        for a, b in where["links"]
        if (a, b) not in links and not (a == b and a in hosts)
    ]
    return wrong


def _has_place(found: Mapping[str, Any]) -> bool:
    where = found["where"]
    return any(where[kind] for kind in ("hosts", "nodes", "ranks", "links"))


def _is_unknown(outcome: Outcome) -> bool:
    """Whether a run did not pass, and names no place and no reason; so may a busy machine."""
    if outcome.reports.get("run", {}).get("exit_code") == 0:
        return False
    if not outcome.struck:
        return True
    allowed = touched(outcome)
    found = [each for report in outcome.reports.values() for each in accusations(report)]
    right = [
        each
        for each in found
        if each["code"] == "run-interrupted"
        or (_has_place(each) and not _wrong_places(each, allowed, outcome.plan))
    ]
    return not right and not any(_NAMED.search(each.stderr) for each in outcome.processes)


# -- lies ------------------------------------------------------------------------------------------


def _lies(outcome: Outcome) -> Iterator[str]:
    plan = outcome.plan
    for name, report in outcome.reports.items():
        if report["exit_code"] == 0 and not name.startswith("view"):
            for gap in _gaps(report, plan):
                yield f"{name} says {report['verdict']}, but {gap}"
            if name == "run" and _must_break(outcome) and outcome.after_s > SOON_S[plan.strike]:
                yield f"{name} says {report['verdict']} {outcome.after_s:.1f} s after the strike"
    deleted = outcome.struck and plan.strike == "folder" and outcome.reported
    for process in outcome.processes:
        who = process.host if process.rank is None else f"rank {process.rank}"
        if process.code == 0 and "run" not in outcome.reports and not deleted:
            yield f"{who} left with 0 and without a report"
        report = _report_of(process, outcome)
        if report is None or process.code is None or process.code < 0:
            continue
        if (process.code == 0) != (report["exit_code"] == 0) and not process.hit:
            yield f"{who} left with {process.code}, its report says {report['exit_code']}"
        elif plan.launcher != "torchrun" and process.code != report["exit_code"]:
            if not process.hit or process.code == 0:
                yield f"{who} left with {process.code}, its report says {report['exit_code']}"
        elif process.code == 0 and report["exit_code"]:
            yield f"{who} left with 0, its report says {report['exit_code']}"


def _report_of(process: Ended, outcome: Outcome) -> Report | None:
    """The report that the exit code of a process stands for."""
    node = outcome.plan.names.index(process.host)
    if f"node{node}" in outcome.reports and outcome.plan.nproc == 1:
        return outcome.reports[f"node{node}"]
    first = process.rank in (None, 0)
    return outcome.reports.get("run") if node == 0 and first else None


def _must_break(outcome: Outcome) -> bool:
    """Whether nothing can be measured any more after the strike, with all ranks."""
    plan = outcome.plan
    if not outcome.struck or plan.strike not in SOON_S:
        return False
    if plan.strike == "stop":  # what stands above a rank only waits for it
        return plan.role == "rank"
    if plan.strike in SIGNALS:
        mere = plan.role == "child" or (plan.launcher == "torchrun" and plan.role == "launcher")
        return not mere
    return plan.strike != "drop" or plan.scope == "all"


def _gaps(report: Report, plan: Plan) -> Iterator[str]:
    """What was not measured."""
    if not report["run"]["complete"]:
        yield "the run is not complete"
    there = {rank["rank"] for rank in report["ranks"] if rank["reported"]}
    if missing := sorted(set(range(plan.hosts * plan.nproc)) - there):
        yield f"ranks {missing} did not report"
    unmeasured = [c["name"] for c in report["checks"] if c["status"] in ("unknown", "blocked")]
    if unmeasured:
        yield f"not measured: {', '.join(unmeasured)}"
    if not report["checks"]:
        yield "nothing was measured"


# -- words -----------------------------------------------------------------------------------------


def _tracebacks(outcome: Outcome) -> Iterator[str]:
    """Last lines of tracebacks; torchrun ends with one of its own if a worker failed."""
    for process in outcome.processes:
        for block in process.stderr.split("Traceback (most recent call last)")[1:]:
            frames = re.match(r"(?::?\n?(?:[ \t]+.*\n?)*)", block)
            text = frames.group(0) if frames else ""
            if outcome.plan.launcher != "torchrun" or _OURS.search(text):
                rest = block[len(text) :].strip().splitlines()
                yield f"{process.host}: {rest[0] if rest else 'cut off'}"
