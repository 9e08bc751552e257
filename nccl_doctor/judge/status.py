"""Status of each check: passed, failed, blocked by a failure in a lower layer, or unknown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from nccl_doctor.judge.causes import importance
from nccl_doctor.judge.checks import error_words, view_for
from nccl_doctor.judge.place import Place, PlaceIndex, host_where, is_of_a_group, rank_where
from nccl_doctor.model.check import Check, Skip
from nccl_doctor.model.cluster import ALONE, Cluster, Outcome, OutcomeStatus, Rank
from nccl_doctor.model.findings import (
    CheckResult,
    Effect,
    Finding,
    Layer,
    Scope,
    Severity,
    Status,
    Where,
    numbered,
)
from nccl_doctor.model.kinds import ENGINE_CODES

# Account of one check: which ranks should observe, which did, and what is missing.


_MOST_TEXTS = 6
"""Descriptions of what is missing, for one reason."""

_MOST_RANGES = 8
"""Ranges of ranks, for one description."""

_WORDS = {
    OutcomeStatus.RAISED: "raised",
    OutcomeStatus.HUNG: "hung",
    OutcomeStatus.DIED: "died",
    OutcomeStatus.SILENT: "stopped responding",
    OutcomeStatus.UNTESTED: "could not be tested",
}


class Gap(NamedTuple):
    """One unit (host or rank) with something that should be known and is not."""

    unit: int
    where: Where
    text: str
    missing: bool = False
    absent: bool = False


class Units:
    """Those that should observe: the same for every check of one scope, so they are listed once.

    The unit is a host (by id) for a host-scope check and a participant (by seat) otherwise.
    """

    def __init__(self, cluster: Cluster, *, by_host: bool) -> None:
        self.by_host = by_host
        self.labels: dict[int, str] = {}
        self.numbers: dict[int, int] = {}
        self.where: dict[int, Where] = {}
        self.absent: dict[int, Gap] = {}
        self.seats: dict[int, Rank] = {rank.seat: rank for rank in cluster.ranks}
        self._never = "never signed in" if cluster.complete else "no report from it"
        self._enroll(cluster)
        self.present = {unit: at for unit, at in self.where.items() if unit not in self.absent}
        self._in_order: dict[frozenset[int], tuple[str, ...]] = {}
        self._in_group: dict[tuple[Sequence[int], bool], Mapping[int, Where]] = {}
        self._sets: list[tuple[Sequence[Rank], frozenset[int]]] = []

    def unit_of(self, rank: Rank) -> int:
        """The unit for which a participant observes."""
        return rank.host.id if self.by_host else rank.seat

    def of(self, ranks: Sequence[Rank]) -> frozenset[int]:
        """Units of some observers: mostly the same as those of another check."""
        for others, units in self._sets:
            if others == ranks:
                return units
        made = frozenset(map(self.unit_of, ranks))
        self._sets.append((ranks, made))
        return made

    def labels_of(self, units: Set[int]) -> tuple[str, ...]:
        """Labels of units in order; one tuple for all checks that were tested by the same ones."""
        key = frozenset(units)
        if key not in self._in_order:
            self._in_order[key] = tuple(self.labels.get(at, str(at)) for at in sorted(units))
        return self._in_order[key]

    def places_in(self, group: Sequence[int], *, together: bool) -> Mapping[int, Where]:
        """Unit → its own place, or that of the whole group where it stands or falls `together`, for
        those of a group of seats that are here: checks hold rounds with the same groups.
        """
        key = tuple(group), together
        if key not in self._in_group:
            ranks = [self.seats[seat] for seat in group if seat in self.seats]
            whole = _all_of(ranks) if together else Where()
            units = map(self.unit_of, ranks)
            at = (
                dict.fromkeys(units, whole) if whole else {unit: self.where[unit] for unit in units}
            )
            here = self.present
            self._in_group[key] = {unit: place for unit, place in at.items() if unit in here}
        return self._in_group[key]

    def _enroll(self, cluster: Cluster) -> None:
        for host in cluster.hosts if self.by_host else ():
            self._unit(host.id, host.label, host_where(host), host.reported)
        for rank in () if self.by_host else cluster.ranks:
            label = f"seat {rank.seat}" if rank.rank is None else str(rank.rank)
            if rank.rank is not None:
                self.numbers[rank.seat] = rank.rank
            self._unit(rank.seat, label, rank_where(rank), rank.reported)

    def _unit(self, unit: int, label: str, where: Where, reported: bool) -> None:
        self.labels[unit] = label
        self.where[unit] = where
        if not reported:
            self.absent[unit] = Gap(unit, where, self._never, absent=True)


class Roll:
    """The units of one cluster, for checks of both scopes."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._units: dict[tuple[int, bool], Units] = {}

    def units_of(self, check: Check) -> tuple[Cluster, Units]:
        """The cluster as a check sees it, and its units."""
        cluster, by_host = view_for(check, self._cluster), check.scope is Scope.HOST
        key = (id(cluster), by_host)
        if key not in self._units:
            self._units[key] = Units(cluster, by_host=by_host)
        return cluster, self._units[key]


class Account:
    """Account of one check: which ranks should observe, which did, and what is missing.

    `gaps` are those of units that are here; `units.absent` are the others.
    """

    def __init__(self, roll: Roll, check: Check) -> None:
        cluster, self.units = roll.units_of(check)
        self.check = check
        self.by_host = self.units.by_host
        self.broken: str | None = None
        self.labels, self.numbers = self.units.labels, self.units.numbers
        self.tested: Set[int] = frozenset()
        self.skips: dict[str, None] = {}
        self.gaps: list[Gap] = []
        self._took: dict[str, float] = {}
        self._said: dict[str, str] = {}
        self.due = self._due(cluster)
        held = self._read(cluster)
        for name, units in self.due.items():
            there = held.get(name, frozenset())
            text = "no outcome" if name == ALONE else f"no outcome of {name}"
            for unit in () if units.keys() <= there else units:
                if unit not in there:
                    self._gap(unit, name, text, missing=True)

    @property
    def duration_s(self) -> float:
        """Sum over the rounds of the slowest time in each."""
        return sum(self._took.values())

    def _due(self, cluster: Cluster) -> Mapping[str, Mapping[int, Where]]:
        """Round → unit → place whose failure stops that unit's part of the round."""
        if not self.check.together:
            return {ALONE: self.units.present}
        due: dict[str, Mapping[int, Where]] = {}
        try:
            rounds = tuple(self.check.plan(cluster))
        except Skip as reason:
            self.skips[str(reason)] = None
            rounds = ()
        except Exception as error:  # as in judge_all
            self.broken = f"plan raised {error_words(error)}"
            rounds = ()
        symptom = is_of_a_group(self.check.layer)
        for item in rounds:
            here = dict(due.get(item.name, {}))
            for group in item.groups:
                here.update(self.units.places_in(group, together=symptom))
            due[item.name] = here
        return due

    def _read(self, cluster: Cluster) -> dict[str, Set[int]]:
        """Round → units with an outcome; what they are is noted."""
        there: dict[str, Set[int]] = {}
        skips: dict[str, None] = {}
        for name, held in cluster.held(self.check.name).items():
            self._took[name] = held.took_s
            good = self.units.of(held.ranks)
            self.tested = self.tested | good if self.tested else good
            unlike = set()
            for rank, outcome in held.unlike:
                unit = self.units.unit_of(rank)
                unlike.add(unit)
                if outcome.status is OutcomeStatus.SKIPPED:  # nearly all of these, for one reason
                    skips[outcome.reason] = None
                else:
                    self._outcome(unit, name, outcome)
            there[name] = good | unlike if unlike else good
        self.skips.update(dict.fromkeys(map(_in_one_line, skips)))
        return there

    def _outcome(self, unit: int, name: str, outcome: Outcome) -> None:
        reason = self._said.get(outcome.reason, "")
        if outcome.reason and not reason:  # the same on nearly all ranks
            reason = self._said[outcome.reason] = _in_one_line(outcome.reason)
        part_of_it = outcome.status is OutcomeStatus.OK
        text = _WORDS[OutcomeStatus.UNTESTED if part_of_it else outcome.status]
        if outcome.status in (OutcomeStatus.HUNG, OutcomeStatus.DIED) and outcome.last_step:
            text += f" in {outcome.last_step}"
        if outcome.signal:
            text += f" ({outcome.signal})"
        self._gap(unit, name, f"{text}: {reason}" if reason else text)

    def _gap(self, unit: int, name: str, text: str, *, missing: bool = False) -> None:
        where = self.due.get(name, _NOWHERE).get(unit) or self.units.where.get(unit) or Where()
        self.gaps.append(Gap(unit, where, text, missing=missing))

    def in_one_line(self, gaps: Iterable[Gap]) -> str:
        """Gaps in one line: `hung in barrier (ranks 1–3); never signed in (rank 5)`."""
        by_text: dict[str, dict[int, None]] = defaultdict(dict)  # a set that keeps the order
        for gap in gaps:
            by_text[gap.text][gap.unit] = None
        most = list(by_text.items())[:_MOST_TEXTS]
        parts = [f"{text} ({self._units([*units])})" for text, units in most]
        more = len(by_text) - len(parts)
        return "; ".join([*parts, *([f"and {more} more"] if more else [])])

    def _units(self, units: Sequence[int]) -> str:
        if not self.by_host:
            numbers = [self.numbers[unit] for unit in units if unit in self.numbers]
            others = [self.labels.get(unit, "") for unit in units if unit not in self.numbers]
            ranks = [numbered("rank", numbers, _MOST_RANGES)]
            return ", ".join((ranks if numbers else []) + others)
        names = [self.labels.get(unit, str(unit)) for unit in units]
        return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


_NOWHERE: Mapping[int, Where] = {}


def _in_one_line(reason: str) -> str:
    reason = reason.strip()
    if reason.startswith("Traceback"):  # its last line says it; the whole stands in the facts
        reason = reason.splitlines()[-1]
    return " ".join(reason.split())


def _all_of(ranks: Sequence[Rank]) -> Where:
    return Where(
        hosts=tuple(sorted({rank.host.name for rank in ranks if rank.host.name is not None})),
        ranks=tuple(sorted({rank.rank for rank in ranks if rank.rank is not None})),
        nodes=tuple(
            sorted(
                {
                    rank.host.node_rank
                    for rank in ranks
                    if rank.host.name is None and rank.host.node_rank is not None
                }
            )
        ),
    )


_NONE: Mapping[str, str] = {}


def check_results(
    cluster: Cluster,
    checks: Iterable[Check],
    findings: Sequence[Finding],
    *,
    skipped: Mapping[str, str] = _NONE,
    broken: Mapping[str, str] = _NONE,
) -> list[CheckResult]:
    """Result of each check.

    `findings` are as `explain` left them. Each mapping is by check name: `skipped` to why it does
    not apply, `broken` to what went wrong in its `judge`.
    """
    blockers, roll = _Reasons(cluster, findings), Roll(cluster)
    return [
        _result(
            Account(roll, check),
            [f for f in findings if f.check == check.name and f.code not in ENGINE_CODES],
            blockers,
            skipped=skipped.get(check.name),
            broken=broken.get(check.name),
        )
        for check in checks
    ]


def _result(
    account: Account,
    own: Sequence[Finding],
    reasons: _Reasons,
    *,
    skipped: str | None,
    broken: str | None,
) -> CheckResult:
    check = account.check
    gaps = [gap for gap in account.gaps if not (gap.missing and skipped)]
    open_gaps: list[Gap] = []
    blockers: list[str] = []
    if not skipped:
        absent = reasons.of_absent(account.units)
        open_gaps, blockers = list(absent[0]), list(absent[1])
    known: dict[tuple[int, str], str | None] = {}  # a whole group shares one place
    for gap in gaps:
        key = (id(gap.where), gap.text)
        if key not in known:
            known[key] = reasons.of(check, gap)
        code = known[key]
        if code is None:
            open_gaps.append(gap)
        elif code not in blockers:
            blockers.append(code)
    broken = broken or account.broken
    levels = {finding.level for finding in own}
    codes = ", ".join(dict.fromkeys(f.code for f in own if f.level is not Severity.INFO))
    missing = account.in_one_line(open_gaps)
    if Severity.FAIL in levels:
        status, reason = Status.FAIL, "; ".join(text for text in (codes, broken, missing) if text)
    elif broken or open_gaps:
        status, reason = Status.UNKNOWN, "; ".join(text for text in (broken, missing) if text)
    elif blockers:
        words = ", ".join(blockers)
        status = Status.BLOCKED
        reason = words if words.startswith("blocked by ") else f"blocked by {words}"
    elif Severity.WARN in levels:
        status, reason = Status.WARN, codes
    elif account.tested:
        status, reason = Status.PASS, ""
    elif skipped or account.skips:
        status = Status.SKIPPED
        reason = skipped or "; ".join(sorted({skip for skip in account.skips if skip}))
    elif check.together and account.labels:
        status, reason = Status.SKIPPED, "no group here to test"
    else:
        status, reason = Status.UNKNOWN, "no participant reported"
    return CheckResult(
        name=check.name,
        layer=check.layer,
        scope=check.scope,
        status=status,
        reason=reason,
        duration_s=round(account.duration_s, 4),
        tested=account.units.labels_of(account.tested),
    )


class _Reasons:
    """The failures of one report, as reasons for what could not be observed."""

    def __init__(self, cluster: Cluster, findings: Sequence[Finding]) -> None:
        self._ground = PlaceIndex(cluster)
        self._failures = [
            (finding, self._ground.place(finding.where), finding.kind.layer.order)
            for finding in sorted(findings, key=lambda f: (f.kind.layer.order, importance(f)))
            if finding.level is Severity.FAIL and not finding.has(Effect.JOB_ONLY)
        ]
        self._codes = {finding.code for finding, _, _ in self._failures}
        self._absent: dict[int, tuple[Sequence[Gap], Sequence[str]]] = {}  # by units
        self._naming: dict[int, list[int]] = defaultdict(list)  # rank → failures that name it
        for number, (_, there, _) in enumerate(self._failures):
            for rank in there.ranks:
                self._naming[rank].append(number)
        self._kept: dict[Hashable, str | None] = {}

    def of_absent(self, units: Units) -> tuple[Sequence[Gap], Sequence[str]]:
        """Units that are not here and that no failure explains, and the codes of the
        failures that explain the others.
        """
        if id(units) not in self._absent:
            codes = {
                unit: self._keeper(self._ground.place(gap.where))
                for unit, gap in units.absent.items()
            }
            unexplained = [gap for unit, gap in units.absent.items() if codes[unit] is None]
            explained = dict.fromkeys(code for code in codes.values() if code is not None)
            self._absent[id(units)] = (unexplained, tuple(explained))
        return self._absent[id(units)]

    def of(self, check: Check, gap: Gap) -> str | None:
        """Code of the failure that is the reason for a gap: the lowest one that covers it.

        What the engine itself held back names its failure.
        """
        held_back = gap.text.rpartition("blocked by ")[2]
        if held_back in self._codes:
            return held_back
        place = self._ground.place(gap.where)
        reach = self._ground.meets if is_of_a_group(check.layer) else self._ground.covers
        for finding, there, order in self._failures:
            if order < check.layer.order and reach(there, place):
                return finding.code
        return None

    def _keeper(self, place: Place) -> str | None:
        """Code of a failure, on any layer, that names a place that never signed in: nothing at all
        could be observed there.
        """
        key = self._alike(place)
        if key not in self._kept:
            self._kept[key] = self._lowest_keeper(place)
        return self._kept[key]

    def _alike(self, place: Place) -> Hashable:
        """Ranks of one host that the same failures name are kept out by the same one."""
        if len(place.ranks) != 1 or place.whole or place.links or place.things:
            return place
        (rank,) = place.ranks
        return self._ground.hosts_of(rank), tuple(self._naming.get(rank, ()))

    def _lowest_keeper(self, place: Place) -> str | None:
        covering = [
            finding
            for finding, there, _ in self._failures
            if self._ground.covers(there, place) or self._ground.keeps_out(there, place)
        ]
        covering.sort(key=lambda finding: finding.kind.layer is not Layer.RANKS)
        return covering[0].code if covering else None
