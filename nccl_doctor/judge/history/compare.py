"""Comparison of a run with earlier runs: what is slower, and what else has changed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nccl_doctor.judge.conclusion import judge_again
from nccl_doctor.judge.history.changed_values import Word, changed_words, together
from nccl_doctor.judge.history.past import Choice, Past
from nccl_doctor.judge.history.places import Slower, slower_places
from nccl_doctor.judge.history.sheet import Sheet, sheet_of
from nccl_doctor.judge.history.usual import LEAST, Change, amount, changes, percent
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.findings import Confidence, Finding, Severity
from nccl_doctor.model.fixes import fill
from nccl_doctor.model.kinds import (
    BASELINE_SHORT,
    CHECK_BROKE,
    HISTORY_KINDS,
    SETUP_CHANGED,
    SLOWER,
)
from nccl_doctor.model.report import Report
from nccl_doctor.model.run_record import RunRecord
from nccl_doctor.registry import Registry

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


def _slower(numbers: Sequence[Change], words: Sequence[Word], choice: Choice) -> Iterator[Finding]:
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


def _meanwhile(words: Sequence[Word]) -> str:
    if not words:
        return ""
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return f"; also changed: {', '.join(map(str, words[:_SHOWN]))}{more}"


def _shown(change: Change) -> dict[str, Any]:
    return {
        "check": change.check,
        "name": change.now.name,
        "where": {key: each for key, each in change.now.where.to_json().items() if each},
        "unit": change.now.unit,
        "now": change.value,
        "median": change.before,
        "spread": round(change.spread, 6),
        "runs": change.runs,
        "change": round(change.share, 4),
    }


def _changed(words: Sequence[Word]) -> Iterator[Finding]:
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


def _short(numbers: Sequence[Change], choice: Choice) -> Iterator[Finding]:
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
