"""Comparison of a run with earlier runs: what is slower, and what else has changed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nccl_doctor.judge.conclusion import judge_again
from nccl_doctor.judge.history.figures import (
    LEAST,
    Change,
    ChangedWord,
    Sheet,
    amount,
    changed_words,
    changes,
    hosts_of,
    percent,
    sheet_of,
    together,
)
from nccl_doctor.judge.history.past import ChosenRuns, Past
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import Confidence, Finding, Severity, Where
from nccl_doctor.model.fixes import fill
from nccl_doctor.model.kinds import (
    BASELINE_SHORT,
    CHECK_BROKE,
    HISTORY_KINDS,
    SETUP_CHANGED,
    SLOWER,
)
from nccl_doctor.model.report import Report, RunRecord
from nccl_doctor.registry import Registry
from nccl_doctor.toolkit.blame import blame_links

# Places that have become slower: many figures, few places. Pure.


Link = tuple[str, str]

_APART = 3
"""Most slower links without a host to blame that get a finding each; more share one finding."""


@dataclass(frozen=True)
class Slower:
    """One place, and what is slower there, the worst first.

    An `echo` is a group of which a part is slower too: that is the same fault once more.
    """

    where: Where
    changes: tuple[Change, ...]
    echo: bool = False

    @property
    def confidence(self) -> Confidence:
        """Confidence of the surest figure."""
        return min(
            (each.confidence for each in self.changes if each.confidence),
            key=list(Confidence).index,
            default=Confidence.POSSIBLE,
        )


def slower_places(judged: Sequence[Change]) -> list[Slower]:
    """Places of figures that are worse; if all links at one end are slow, they become a host,
    provided that enough others show it (see `blame_links`).

    Args:
        judged: every figure that earlier runs let one judge, good ones too.
    """
    found: dict[Hashable, list[tuple[Where, Change]]] = defaultdict(list)
    by_name: dict[tuple[str, str], list[Change]] = defaultdict(list)
    for change in judged:
        if change.now.where.links:
            by_name[change.check, change.now.name].append(change)
        elif change.is_worse:
            found[_same(change.now.where)].append((change.now.where, change))
    slow_links = [item for group in by_name.values() for item in _of_links(group)]
    blamed = {where.hosts[0] for where, _ in slow_links if where.hosts}
    for where, change in slow_links:
        host = next((h for h in sorted(blamed) if all(h in link for link in where.links)), None)
        if host is not None and where.links:
            where = Where(hosts=(host,))
        found[_same(where)].append((where, change))
    places = [_united(each) for each in found.values()]
    echoes = [replace(place, echo=_is_echo(place, places)) for place in places]
    return sorted(echoes, key=lambda place: (place.echo, -place.changes[0].loss))


def _united(found: Sequence[tuple[Where, Change]]) -> Slower:
    """Changes for the worse at one place; of several links the narrowest names the place."""
    where = min((where for where, _ in found), key=lambda where: len(where.links))
    if not where.links:
        for other, _ in found:
            where = where | other
    return Slower(where, tuple(sorted((change for _, change in found), key=lambda c: -c.loss)))


def _is_echo(place: Slower, places: Sequence[Slower]) -> bool:
    others = [other for other in places if other is not place and other.where]
    if not place.where:
        return bool(others)
    here = hosts_of(place.where)
    many = len(place.where.hosts) > 1
    return many and any(hosts_of(other.where) <= here for other in others)


def _of_links(group: Sequence[Change]) -> Iterator[tuple[Where, Change]]:
    """Figures of links that are worse, each under the host or the links to blame for it."""
    worse: dict[Link, Change] = {}
    tested: set[Link] = set()
    for change in group:
        tested |= set(change.now.where.links)
        if change.is_worse:
            worse |= dict.fromkeys(change.now.where.links, change)
    causes = blame_links(tested, worse).causes
    links = [cause for cause in causes if not cause.is_host]
    rest = frozenset(pair for cause in links for pair in cause.pairs)
    seen: set[tuple[Where, Link]] = set()
    for cause in causes:
        pairs = rest if len(links) > _APART and not cause.is_host else cause.pairs
        where = Where(hosts=cause.ends) if cause.is_host else Where(links=tuple(sorted(pairs)))
        for pair in sorted(cause.pairs):
            first = worse[pair].now.where.links[0]
            if (where, first) not in seen:
                seen.add((where, first))
                yield where, worse[pair]


def _same(where: Where) -> Hashable:
    """Two places are one if they name the same hosts, or join the same hosts."""
    edges = frozenset(frozenset(link) for link in where.links)
    return edges or (where.hosts, where.devices) if where else ""


_SHOWN = 3
"""Most figures, or words, in a message; the evidence has more."""
_KEPT = 20


@dataclass(frozen=True)
class Comparison:
    """Findings of a comparison, and what was compared, for `run` of the report."""

    findings: tuple[Finding, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)


def compare(cluster: Cluster, checks: Sequence[Check], past: Past, run: RunRecord) -> Comparison:
    """Hold a run against earlier reports of the same hosts.

    Args:
        cluster: what was gathered in this run.
        checks: those that judge it; what they have no figures of is not compared.
        past: the reports that were found.
        run: the record of this run.
    """
    choice = past.beside(cluster, run)
    now = sheet_of(cluster, checks)
    earlier = [each.sheet for each in choice.used]
    numbers, words = changes(now, earlier), changed_words(now, earlier)
    findings = (
        *_broken(now),
        *_slower(numbers, words, choice),
        *_changed(words),
        *_short(numbers, choice),
    )
    judged = sum(change.is_judged for change in numbers)
    record = choice.to_json()
    if len(choice.used) >= LEAST:
        record["text"] += f"; {judged} of {len(now.numbers)} speeds judged"
        busy = sum(not figure.counts for figure in now.numbers.values())
        record["text"] += f", {busy} measured on a busy machine" if busy else ""
    return Comparison(findings, {**record, "figures": judged})


def _broken(now: Sheet) -> Iterator[Finding]:
    for check, error in sorted(now.broken.items()):
        words = f"`figures` of check {check} raised {error}"
        yield Finding(CHECK_BROKE, words, evidence={"check": check, "error": error})


def _slower(
    numbers: Sequence[Change], words: Sequence[ChangedWord], choice: ChosenRuns
) -> Iterator[Finding]:
    places = slower_places([change for change in numbers if change.is_judged])
    file = choice.used[0].file if choice.used else "OLD"
    for each in places:
        yield Finding(
            SLOWER,
            _said(each) + _meanwhile(words),
            each.where,
            {
                "figures": [_shown(change) for change in each.changes[:_KEPT]],
                "runs": choice.runs,
            },
            fix=fill(SLOWER.fix, FILE=file),
            severity=Severity.INFO if each.echo else None,
            confidence=Confidence.POSSIBLE if each.echo else each.confidence,
        )


def _said(slower: Slower) -> str:
    """The worst figure of each name, with how many more there are."""
    names: dict[str, list[Change]] = {}
    for change in slower.changes:
        names.setdefault(change.now.name, []).append(change)
    parts = []
    for name, found in list(names.items())[:_SHOWN]:
        worst = found[0]
        more = f" at worst, and less on {len(found) - 1} more" if len(found) > 1 else ""
        spread = f" ± {100 * worst.spread / worst.before:.0f} %" if worst.before else ""
        parts.append(
            f"{name} {percent(worst.share)}{more}: {amount(worst.now, worst.value)}, the median of "
            f"{worst.runs} earlier runs is {amount(worst.now, worst.before)}{spread}"
        )
    if len(names) > _SHOWN:
        parts.append(f"and {len(names) - _SHOWN} more figures")
    return "; ".join(parts)


def _meanwhile(words: Sequence[ChangedWord]) -> str:
    if not words:
        return ""
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return f"; also changed: {', '.join(map(str, words[:_SHOWN]))}{more}"


def _shown(change: Change) -> dict[str, Any]:
    return {
        "check": change.check,
        "name": change.now.name,
        "where": {key: each for key, each in encode(change.now.where).items() if each},
        "unit": change.now.unit,
        "now": change.value,
        "median": change.before,
        "spread": round(change.spread, 6),
        "runs": change.runs,
        "change": round(change.share, 4),
    }


def _changed(words: Sequence[ChangedWord]) -> Iterator[Finding]:
    for where, found in together(words):
        said = ", ".join(map(str, found[: 2 * _SHOWN]))
        more = len(found) - 2 * _SHOWN
        runs = min(word.runs for word in found)
        yield Finding(
            SETUP_CHANGED,
            f"{said}{f' and {more} more' if more > 0 else ''}; {runs[0]} of {runs[1]} earlier "
            f"runs had the old value{'s' if len(found) > 1 else ''}",
            where,
            {
                "changed": [
                    {"check": w.check, "name": w.name, "before": w.before, "now": w.now}
                    for w in found[: 2 * _KEPT]
                ]
            },
        )


def _short(numbers: Sequence[Change], choice: ChosenRuns) -> Iterator[Finding]:
    """A finding with the largest changes, if there are too few runs to judge speeds."""
    if len(choice.used) >= LEAST:
        return
    text = f"{choice.in_words()}; {LEAST} are needed to judge speeds"
    by_loss = sorted(numbers, key=lambda change: -abs(change.share))
    largest = [f"{each.now.name} {percent(each.share)}" for each in by_loss[:_SHOWN]]
    if largest:
        text += f"; the largest changes: {', '.join(largest)}"
    evidence = {"figures": [_shown(change) for change in by_loss[:_KEPT]]}
    yield Finding(BASELINE_SHORT, text, evidence=evidence)


_CODES = frozenset(kind.code for kind in HISTORY_KINDS)


def judge_beside(saved: Report, registry: Registry, past: Past | None) -> Report:
    """Judge the facts of a saved report again, and compare it with earlier reports if there are
    any.

    What an earlier comparison found gives way to this one; without one it stands.

    Raises:
        ValueError: the report does not hold a whole cluster.
    """
    if past is None:
        return judge_again(saved, registry)
    found = compare(saved.cluster, registry.checks, past, saved.run)
    kept = tuple(finding for finding in saved.findings if not _is_compared(finding))
    run = replace(saved.run, baseline=found.record)
    return judge_again(replace(saved, run=run, findings=(*kept, *found.findings)), registry)


def _is_compared(finding: Finding) -> bool:
    return finding.code in _CODES or (finding.code == CHECK_BROKE.code and not finding.check)
