"""Differences between two reports: hosts, words, findings, checks and speeds. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nccl_doctor.judge.history.figures import (
    SHARE,
    Change,
    ChangedWord,
    changed_words,
    changes,
    sheet_of,
)
from nccl_doctor.model.check import Check
from nccl_doctor.model.cluster import Cluster
from nccl_doctor.model.codec import encode
from nccl_doctor.model.findings import Finding, Severity, Where
from nccl_doctor.model.kinds import HISTORY_KINDS
from nccl_doctor.model.report import Report

_COMPARED = frozenset(kind.code for kind in HISTORY_KINDS)
"""Codes of comparisons with earlier runs, which are not differences between these two runs."""


@dataclass(frozen=True)
class FindingChange:
    """A finding that is `new`, `gone`, or there in both and `changed` in place or severity."""

    state: str
    before: Finding | None
    now: Finding | None

    @property
    def finding(self) -> Finding:
        """The finding as it is now, or else as it was."""
        found = self.now or self.before
        assert found is not None
        return found

    @property
    def is_worse(self) -> bool:
        """True if a failure or a warning is new, graver or in more places; what another explains
        does not count.
        """
        now = self.now
        if now is None or now.level is Severity.INFO or now.explained_by:
            return False
        before = self.before
        if before is None or now.level.order < before.level.order:
            return True
        return bool(before.where) and before.where | now.where != before.where | Where()


@dataclass(frozen=True)
class Difference:
    """Differences between two reports; `old` and `new` identify them.

    `hosts` are (host, what was, what is), `checks` (check, status before, status now), None for
    what is not there. `speeds` are all numbers that both gave; that they are two runs only lets
    nobody tell a change from noise, so none of them is judged. `notes` say what makes the
    comparison doubtful.
    """

    old: Mapping[str, Any]
    new: Mapping[str, Any]
    hosts: tuple[tuple[str, str | None, str | None], ...] = ()
    words: tuple[ChangedWord, ...] = ()
    turns: tuple[FindingChange, ...] = ()
    checks: tuple[tuple[str, str | None, str | None], ...] = ()
    speeds: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_worse(self) -> bool:
        """True if something is worse for certain: a finding that is new, graver or in more
        places, or a host that is gone. Speeds do not count.
        """
        return any(turn.is_worse for turn in self.turns) or any(
            before is not None and now is None for _, before, now in self.hosts
        )

    @property
    def notable(self) -> tuple[Change, ...]:
        """Speeds that changed by more than is worth a word, measured on idle machines."""
        return tuple(
            change
            for change in self.speeds
            if not change.busy
            and abs(change.share) >= SHARE
            and abs(change.value - change.before) >= change.now.least
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "old": dict(self.old),
            "new": dict(self.new),
            "worse": self.is_worse,
            "notes": list(self.notes),
            "hosts": [_row("host", *each) for each in self.hosts],
            "setup": [
                {
                    **_row("name", w.name, w.before, w.now),
                    "check": w.check,
                    "where": _where(w.where),
                }
                for w in self.words
            ],
            "findings": [
                {
                    "state": turn.state,
                    "code": turn.finding.code,
                    "before": None if turn.before is None else turn.before.to_json(),
                    "now": None if turn.now is None else turn.now.to_json(),
                }
                for turn in self.turns
            ],
            "checks": [_row("check", *each) for each in self.checks],
            "speeds": [
                {
                    **_row("name", change.now.name, change.before, change.value),
                    "check": change.check,
                    "where": _where(change.now.where),
                    "unit": change.now.unit,
                    "better": change.now.better,
                    "change": round(change.share, 4),
                    "busy": change.busy,
                }
                for change in self.speeds
            ],
        }


def difference(old: Report, new: Report, checks: Sequence[Check]) -> Difference:
    """Compare two reports; the checks installed here say what of their facts is worth it."""
    before, now = old.cluster, new.cluster
    sheets = sheet_of(before, checks), sheet_of(now, checks)
    speeds = changes(sheets[1], [sheets[0]])
    # A number that was measured on a busy machine is no earlier value; here it is shown as such.
    speeds += [
        Change(key[0], figure, float(sheets[0].numbers[key].value or 0.0), 1, busy=True)
        for key, figure in sheets[1].numbers.items()
        if key in sheets[0].numbers and not sheets[0].numbers[key].counts
    ]
    return Difference(
        _about(old),
        _about(new),
        tuple(_hosts(before, now)),
        tuple(changed_words(sheets[1], [sheets[0]])),
        tuple(_turns(old.findings, new.findings)),
        tuple(_checks(old, new)),
        tuple(sorted(speeds, key=lambda change: (-abs(change.share), change.now.name))),
        tuple(_notes(old, new, before, now)),
    )


def _about(report: Report) -> dict[str, Any]:
    run = report.run
    return {
        "id": run.id,
        "started": run.started,
        **_scale(report.cluster),
        "launcher": run.launcher,
        "tool": str(report.tool.get("version", "")),
        "verdict": report.verdict,
        "exit_code": report.exit_code,
        "summary": report.summary,
    }


def _scale(cluster: Cluster) -> dict[str, Any]:
    return {
        "backend": cluster.backend,
        "level": cluster.level.value,
        "world_size": cluster.world_size,
        "nnodes": cluster.nnodes,
    }


def _notes(old: Report, new: Report, before: Cluster, now: Cluster) -> Iterator[str]:
    if old.redacted != new.redacted:
        yield "one of the reports is redacted and the other is not: their names do not match"
    if old.run.id == new.run.id:
        yield "both reports are of the same run"
    elif (old.run.started or "") > (new.run.started or ""):
        yield "the first report is newer than the second"
    scale = _scale(now)
    for name, was in _scale(before).items():
        if was != scale[name]:
            yield f"{name.replace('_', ' ')} {was} → {scale[name]}"
    for report, which in ((before, "first"), (now, "second")):
        if not report.complete:
            yield f"the {which} report is the partial report of one host"


def _hosts(before: Cluster, now: Cluster) -> Iterator[tuple[str, str | None, str | None]]:
    was, there = _addresses(before), _addresses(now)
    for name in sorted({*was, *there}):
        if was.get(name) != there.get(name):
            yield name, was.get(name), there.get(name)


def _addresses(cluster: Cluster) -> dict[str, str]:
    """Host → its addresses in words; hosts of one name together."""
    found: dict[str, set[str]] = defaultdict(set)
    for host in cluster.present_hosts:
        found[host.label] |= set(host.addresses)
    return {name: ", ".join(sorted(addresses)) or "present" for name, addresses in found.items()}


def _checks(old: Report, new: Report) -> Iterator[tuple[str, str | None, str | None]]:
    was = {check.name: check.status.value for check in old.checks}
    there = {check.name: check.status.value for check in new.checks}
    for name in dict.fromkeys([*there, *was]):
        if was.get(name) != there.get(name):
            yield name, was.get(name), there.get(name)


def _turns(old: Sequence[Finding], new: Sequence[Finding]) -> Iterator[FindingChange]:
    """Findings of one code and place are the same one; then those of one code, in order."""
    left = [finding for finding in old if finding.code not in _COMPARED]
    fresh: list[Finding] = []
    for finding in (finding for finding in new if finding.code not in _COMPARED):
        same = next((f for f in left if (f.code, f.where) == (finding.code, finding.where)), None)
        if same is None:
            fresh.append(finding)
            continue
        left.remove(same)
        if same.level is not finding.level:
            yield FindingChange("changed", same, finding)
    for finding in fresh:
        moved = next((f for f in left if f.code == finding.code), None)
        if moved is None:
            yield FindingChange("new", None, finding)
            continue
        left.remove(moved)
        yield FindingChange("changed", moved, finding)
    for finding in left:
        yield FindingChange("gone", finding, None)


def _row(what: str, name: str, before: Any, now: Any) -> dict[str, Any]:
    return {what: name, "before": before, "now": now}


def _where(where: Where) -> dict[str, Any]:
    return {key: each for key, each in encode(where).items() if each}
